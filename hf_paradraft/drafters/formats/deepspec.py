"""DeepSpec's folders: DSpark, DFlash and EAGLE-3, whose numbers of layers count outputs."""

from .fields import BLOCKS, EAGLE3, from_anchor
from .layout import Layout, architecture, key, outputs

CLASSES = ("Qwen3DSparkModel", "Gemma4DSparkModel", "Qwen35DSparkModel")
# Which name their layers at the top in some exports.
ZLABS = ("DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel", "Qwen3XPressModel")

BLOCK_LAYOUT = Layout(
    "DeepSpec",
    lambda config: (
        architecture(config) in CLASSES
        or (
            "target_layer_ids" in config
            and "dflash_config" not in config
            and architecture(config) not in ZLABS
        )
    ),
    {
        **BLOCKS,
        "features": outputs("target_layer_ids", needed=True),
        "fill_in": lambda said: from_anchor(said) is False,
        "causal": lambda said: said.kinds if said("dflash_query_causal") else (),
        "softcap": key("final_logit_softcapping"),
    },
    described=lambda config: config,
)
EAGLE3_LAYOUT = Layout(
    "DeepSpec",
    lambda config: config.get("target_layer_ids") is not None,
    {**EAGLE3, "features": outputs("target_layer_ids"), "num_draft_tokens": key("ttt_length")},
    part="eagle_config",
)
