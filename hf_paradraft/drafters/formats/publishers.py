"""The layouts of all publishers, by family; the first that fits a config counts.

z-lab and SpecForge write DFlash, and DSpark by the same classes; DeepSpec DSpark, DFlash and
EAGLE-3; SafeAI and SpecForge EAGLE-3 and P-EAGLE; transformers its own DFlash assistants.
"""

from collections.abc import Mapping
from typing import Any

from .fields import (
    BLOCK_LAYOUT,
    BLOCKS,
    EAGLE3_FIELDS,
    EAGLE3_LAYOUT,
    LISTED,
    NO_LAYERS,
    block_size,
    markov_tensors,
)
from .layout import (
    DFLASH,
    DFLASH2,
    DSPARK,
    DSPINE,
    EAGLE3,
    XPRESS,
    Layout,
    Said,
    architecture,
    key,
    outputs,
)

PART = "dflash_config"
ZLABS = {
    "DFlashDraftModel": DFLASH,
    "DFlash2DraftModel": DFLASH2,
    "DFlashQwen3XPressModel": XPRESS,
    "DSpineDraftModel": DSPINE,
    "DSparkDraftModel": DSPARK,
    "Lfm2DSparkDraftModel": DSPARK,
    "Qwen3XPressModel": XPRESS,
}
DEEPSPECS = {
    "Qwen3DSparkModel": DFLASH,
    "Gemma4DSparkModel": DFLASH,
    "Qwen35DSparkModel": DSPARK,
}
# z-lab's and SpecForge's that name their layers at the top in some exports
AT_TOP = "DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel", "Qwen3XPressModel"
MUSE = "muse_glimmer_assistant"


def spread(count: int, layers: int) -> tuple[int, ...]:
    """Spread `count` layers to read evenly from 1 to L - 3.

    They are read where a config names none. A single one is the middle layer.
    """
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + index * (layers - 4) / (count - 1)) for index in range(count))


def from_anchor(said: Said) -> bool | None:
    """Tell whether a block's first row, the newest token's, guesses the next token.

    None: the config does not say.
    """
    start, sampled = said("logits_start"), said("sample_from_anchor")
    return sampled if start is None else start == 0


def _described(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Describe the layers, all with windows where `use_swa` says so and none has one of its own."""
    if not _windowed(config):
        return config
    window = config[PART].get("swa_window_size") or config.get("sliding_window")
    kinds = ["sliding_attention"] * config.get("num_hidden_layers", 0)
    return {**config, "layer_types": kinds, "sliding_window": window, "use_sliding_window": True}


def _windowed(config: Mapping[str, Any]) -> bool:
    return bool((config.get(PART) or {}).get("use_swa")) and "sliding_attention" not in (
        config.get("layer_types") or ()
    )


def _causal(said: Said) -> tuple[str, ...]:
    """List the kinds of layers whose rows see only the rows before them.

    Where the config does not say, these are the sliding ones, but none by `use_swa`; of DSpine all.
    """
    said.only(PART, "use_swa", "swa_window_size")
    values = said.only("", "is_causal"), said.only(PART, "causal", "causal_head")
    if (causal := next((value for value in values if value is not None), None)) is not None:
        return said.kinds if causal else ()
    if said.has("injection."):  # DSpine's classes know no other
        return said.kinds
    return (
        ()
        if _windowed(said.config)
        else tuple(kind for kind in said.kinds if kind == "sliding_attention")
    )


def _features(said: Said) -> Any:
    if (listed := outputs("target_layer_ids")(said)) is not None:
        return listed
    count, total = said.config.get("num_hidden_layers"), said("num_target_layers")
    if count is None or total is None:
        raise ValueError(
            "This DFlash drafter names neither its layers (target_layer_ids) nor num_target_layers."
        )
    return spread(count, total)


def _dspark(said: Said) -> bool:
    return (
        said.only(PART, "projector_type") == "dspark"
        or said.has("markov.")
        or "DSpark" in architecture(said.config)
    )


def _fill_in(said: Said) -> bool:
    anchor = from_anchor(said)
    return not (_dspark(said) if anchor is None else anchor)


def _block_size(said: Said) -> int:
    """Look up the rows of a block, which windows may not be shorter than.

    They would hide rows after a row too.

    Raises:
        ValueError: they are.
    """
    size = block_size(said)
    short = "sliding_attention" in said.kinds and said.layers.sliding_window < size
    if short and not _causal(said):
        raise ValueError(
            f"This DFlash drafter has windows of {said.layers.sliding_window} tokens, shorter than "
            "its blocks, which are not served."
        )
    return size


ZLAB = Layout(
    "z-lab",
    lambda config: True,
    {
        **BLOCKS,
        "features": _features,
        "fill_in": _fill_in,
        "causal": _causal,
        "block_size": _block_size,
        "softcap": lambda said: said.only(PART, "final_logit_softcapping"),
        "embedding_scale": lambda said: said.only(PART, "input_embedding_scale") or 1.0,
        # vLLM scales raw rows of the target's by it; z-lab's own classes without one ask
        # transformers' scaled module.
        "raw_target": lambda said: (
            said.only(PART, "input_embedding_scale") is not None or said.has("selector.")
        ),
        "logit_scale": lambda said: said.only(PART, "output_multiplier"),
        "layout": lambda said: "SpecForge" if _dspark(said) else "z-lab",
        "notes": lambda said: (
            [] if said("target_layer_ids") else [("layers", "default: none are named")]
        ),
    },
    part=PART,
    described=_described,
    classes=ZLABS,
    tensors={
        **markov_tensors("logit_head"),
        "xpress_head.w1.": "refiner.token_embed.",
        "xpress_head.w2.": "refiner.readout.",
        "xpress_head.mix.L": "refiner.mix_l",
        "xpress_head.mlp.gate_proj.": "refiner.mlp_gate.",
        "xpress_head.mlp.up_proj.": "refiner.mlp_up.",
        "xpress_head.mlp.down_proj.": "refiner.mlp_down.",
        "xpress_head.": "refiner.",
    },
)
DEEPSPEC = Layout(
    "DeepSpec",
    lambda config: (
        architecture(config) in DEEPSPECS
        or (
            "target_layer_ids" in config
            and PART not in config
            and architecture(config) not in AT_TOP
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
    classes=DEEPSPECS,
)
TRANSFORMERS = Layout(
    "transformers",
    lambda config: config.get("model_type") == MUSE,
    {
        **BLOCKS,
        "features": outputs("target_layer_ids", needed=True),
        "fill_in": True,
    },
    described=lambda config: {
        **config,
        "layer_types": config.get("layer_types")
        or ["sliding_attention"] * config.get("num_hidden_layers", 5),
        "use_sliding_window": True,
    },
    tensors={"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."},
)
BLOCK_LAYOUTS = (BLOCK_LAYOUT, TRANSFORMERS, DEEPSPEC, ZLAB)

# whose numbers of layers count outputs
DEEPSPEC_EAGLE3 = Layout(
    "DeepSpec",
    lambda config: config.get("target_layer_ids") is not None,
    {
        **EAGLE3_FIELDS,
        "features": outputs("target_layer_ids"),
        "num_draft_tokens": key("ttt_length"),
    },
    part="eagle_config",
)


def _notes(said: Said) -> list[tuple[str, str]]:
    listed = said(LISTED)
    settled = (
        "layers",
        f"{listed}, counted as outputs or inputs: settled by the target's number of layers",
    )
    return [settled if listed else NO_LAYERS]


# who do not say whether numbers of layers count outputs or inputs
SAFEAI = Layout(
    "SafeAI or SpecForge",
    lambda config: True,
    {**EAGLE3_FIELDS, "ambiguous": outputs(LISTED), "notes": _notes},
    part="eagle_config",
    classes={"LlamaForCausalLMEagle3": EAGLE3},
    tensors={"midlayer.hidden_norm.": "hidden_norm.", "midlayer.": "stack.layers.0."},
)
EAGLE3_LAYOUTS = (EAGLE3_LAYOUT, DEEPSPEC_EAGLE3, SAFEAI)
