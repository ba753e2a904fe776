"""The speculators layout, which vLLM reads, and in which other publishers' drafters are saved too.
It numbers layers by inputs.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from ..layers import GEMMA4, QWEN35
from .fields import BLOCKS, EAGLE3_FIELDS, NO_LAYERS, markov_tensors, proposed_tokens
from .layout import DSPARK, EAGLE3, PEAGLE, Layout, Said, outputs
from .values import provenance_of

VERSION = "0.9.0"
TENSORS = {
    "embed_tokens.": "embedding.",
    "lm_head.": "head.",
    "norm.": "stack.norm.",
    "layers.": "stack.layers.",
}
SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def layer_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Look up the part of a config that describes layers.

    Raises:
        ValueError: it has none.
    """
    described = config.get("transformer_layer_config")
    if not isinstance(described, Mapping):
        raise ValueError(
            "A speculators config describes its layers under transformer_layer_config, and this "
            "one does not."
        )
    return described


def _fill_in(said: Said) -> bool:
    """Tell whether masks guess their own places.

    A DSpark drafter whose config does not say so fills in if it proposes a token less than it has
    rows. All other drafters that do not say so fill in.
    """
    anchor, size = said("sample_from_anchor"), said("block_size", default=0)
    if anchor is None:
        anchor = _is(said, "dspark") and proposed_tokens(said.config) != size - 1
    return not anchor


def _is(said: Said, kind: str) -> bool:
    return said.config.get("speculators_model_type") == kind


def _causal(said: Said) -> tuple[str, ...]:
    """List the kinds of layers whose rows see only those before them in a block."""
    both_ways = said("sliding_window_non_causal", default=_is(said, "dflash2"))
    return ("sliding_attention",) if "sliding_attention" in said.kinds and not both_ways else ()


def _notes(said: Said) -> list[tuple[str, str]]:
    """List the assumptions made where the config is silent."""
    reading = "fill-in" if _fill_in(said) else "the newest token guesses too"
    return (
        [("anchor", f"not in the config: {reading}")] if said("sample_from_anchor") is None else []
    )


def _is_speculators(config: Mapping[str, Any]) -> bool:
    return (
        config.get("speculators_model_type") is not None
        or config.get("transformer_layer_config") is not None
    )


def _raw_target(said: Said) -> bool:
    """Tell whether the target's table and head are used without its scales and cap.

    That is so in all files but those that are made here.
    """
    made = provenance_of(said.config)
    return bool(made.get("raw_target", not made["training"]))


BLOCK_LAYOUT = Layout(
    "speculators",
    _is_speculators,
    {
        **BLOCKS,
        "features": outputs("aux_hidden_state_layer_ids", offset=-1, needed=True),
        "fill_in": _fill_in,
        "causal": _causal,
        "window_from_anchor": True,
        "raw_target": _raw_target,
        "notes": _notes,
    },
    described=layer_config,
    classes={"DSparkSpeculator": DSPARK},
    tensors={
        **TENSORS,
        **markov_tensors("markov_head"),
        "confidence_head.proj.": "confidence.",
        "candidate_selector.": "selector.",
        "refiner_head.": "refiner.",
    },
)
INPUTS = "eagle_aux_hidden_state_layer_ids"
EAGLE3_LAYOUT = Layout(
    "speculators",
    _is_speculators,
    {
        **EAGLE3_FIELDS,
        "features": outputs(INPUTS, offset=-1),
        "raw_target": _raw_target,
        "notes": lambda said: [NO_LAYERS] if said(INPUTS) is None else [],
    },
    described=layer_config,
    classes={
        "Eagle3Speculator": EAGLE3,
        "PEagleSpeculator": PEAGLE,
        "PEagleDraftModel": PEAGLE,
    },
    tensors={"layers.0.hidden_norm.": "hidden_norm.", **TENSORS},
)


def blocks_config(block: Any, kind: str, num_guesses: int) -> dict[str, Any]:
    """Make the `config.json` of a drafter of blocks, in the speculators layout.

    Args:
        block: its `BlockConfig`.
        kind: the drafter's kind.
        num_guesses: V'.

    Raises:
        ValueError: it has options or layers for which the layout has no place.
    """
    kinds = set(getattr(block.layers, "layer_types", None) or ["full_attention"])
    refined = block.refiner_rank > 0
    unsaid = [
        name
        for name in ("softcap", "embedding_scale", "logit_scale")
        if getattr(block, name) not in (None, 1.0)
    ]
    unsaid += ["the refiner's width"] if refined and block.refiner_size % block.refiner_rank else []
    unsaid += (
        [f"layers of {block.layers.model_type}"]
        if block.layers.model_type in (GEMMA4, QWEN35)
        else []
    )
    windows = "full_attention" in block.causal or (
        block.layout != "speculators" and "sliding_attention" in kinds
    )
    if unsaid or windows:
        raise ValueError(
            "This drafter has options that the speculators layout cannot say "
            f"({', '.join(unsaid) or 'its windows'}): keep its own files."
        )
    named = {
        "dspark": "DSparkSpeculator",
        "dflash2": "DFlash2DraftModel",
        "xpress": "XPressSpeculator",
    }
    heads = {
        "markov_rank": block.markov_rank,
        "markov_head_type": block.markov_type,
        "enable_confidence_head": block.confidence,
        "confidence_head_with_markov": block.confidence_with_markov,
    }
    return {
        "speculators_model_type": kind,
        "architectures": [named.get(kind, "DFlashSpeculator")],
        "transformer_layer_config": layer_values(block.layers),
        "aux_hidden_state_layer_ids": [key + 1 for key in block.features if isinstance(key, int)],
        "block_size": block.block_size,
        "mask_token_id": block.mask_token_id,
        "sample_from_anchor": not block.fill_in,
        "sliding_window_non_causal": "sliding_attention" in kinds
        and "sliding_attention" not in block.causal,
        "draft_vocab_size": num_guesses,
        "target_hidden_size": block.target_hidden_size,
        "num_target_layers": block.target_layers,
        "speculators_version": VERSION,
        **(heads if block.markov_rank or block.confidence else {}),
        **({name: getattr(block, name) for name in SELECTOR} if block.selector_rank else {}),
        **(
            {
                "xpress_rank": block.refiner_rank,
                "xpress_mlp_ratio": block.refiner_size // block.refiner_rank,
            }
            if refined
            else {}
        ),
    }


def layer_values(layers: PreTrainedConfig) -> dict[str, Any]:
    """Make the part of a config that describes layers, as the speculators layout has it."""
    return layers.to_diff_dict() | {"model_type": layers.model_type}
