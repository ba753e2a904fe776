"""Folders of z-lab and SpecForge: DFlash, and DSpark by the same classes."""

from collections.abc import Mapping
from typing import Any

from .fields import BLOCKS, MARKOV, from_anchor
from .layout import Layout, Said, outputs

PART = "dflash_config"


def spread(count: int, layers: int) -> tuple[int, ...]:
    """Spread `count` layers to read evenly from 1 to L - 3.

    They are read where a config names none. A single one is the middle layer.
    """
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + index * (layers - 4) / (count - 1)) for index in range(count))


def _described(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Describe the layers, all with windows where `use_swa` says so and none has one of its own."""
    nested = config.get(PART) or {}
    if not _windowed(config):
        return config
    window = nested.get("swa_window_size") or config.get("sliding_window")
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
        or said.has(*MARKOV)
        or "DSpark" in said.architecture
    )


def _fill_in(said: Said) -> bool:
    anchor = from_anchor(said)
    return not (_dspark(said) if anchor is None else anchor)


def _window(said: Said) -> bool:
    """Refuse windows shorter than a block, for they hide rows after a row too.

    Raises:
        ValueError: there are some.
    """
    window = (
        getattr(said.layers, "sliding_window", None) if "sliding_attention" in said.kinds else None
    )
    if window is not None and window < said("block_size", default=0) and not _causal(said):
        raise ValueError(
            f"This DFlash drafter has windows of {window} tokens, shorter than its blocks, which "
            "are not served."
        )
    return False


BLOCK_LAYOUT = Layout(
    "z-lab",
    lambda config: True,
    {
        **BLOCKS,
        "features": _features,
        "fill_in": _fill_in,
        "causal": _causal,
        "window_from_anchor": _window,
        "softcap": lambda said: said.only(PART, "final_logit_softcapping"),
        "embedding_scale": lambda said: said.only(PART, "input_embedding_scale") or 1.0,
        # vLLM scales raw rows of the target's by it; z-lab's own classes without one ask
        # transformers' scaled module.
        "raw_target": lambda said: (
            said.only(PART, "input_embedding_scale") is not None or said.has("candidate_selector.")
        ),
        "logit_scale": lambda said: said.only(PART, "output_multiplier"),
        "layout": lambda said: "SpecForge" if _dspark(said) else "z-lab",
        "notes": lambda said: (
            [] if said("target_layer_ids") else [("layers", "default: none are named")]
        ),
    },
    part=PART,
    described=_described,
)
