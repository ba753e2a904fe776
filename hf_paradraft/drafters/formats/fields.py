"""Fields that all layouts of a family have in common, of drafters of blocks and of EAGLE-3; and the
speculators layout, which vLLM reads, and in which other publishers' drafters are saved too. It
numbers layers by inputs.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from ..layers import GEMMA4
from .keys import paired
from .layout import DSPARK, EAGLE3, PEAGLE, Layout, Said, key, outputs, proposed_tokens
from .values import provenance_of

VERSION = "0.9.0"
TENSORS = {
    "embed_tokens.": "embedding.",
    "lm_head.": "head.",
    "norm.": "stack.norm.",
    "layers.": "stack.layers.",
}
NO_LAYERS = (
    "layers",
    "default: 2, L // 2 and L - 3 of the target's tuple of states, for none are named",
)
DSPINE_PART = "dspine_config"
LISTED = "eagle_aux_hidden_state_layer_ids"


def markov_tensors(head: str) -> dict[str, str]:
    """Map a publisher's tensors of a Markov head to ours; `head` begins their names."""
    parts = {
        "markov_w1": "before",
        "markov_w2": "after",
        "gate_proj": "gate",
        "joint_proj": "joint",
    }
    return {f"{head}.{theirs}.": f"markov.{ours}." for theirs, ours in parts.items()}


def mask_token(said: Said) -> int:
    """Look up the id of a drafter's mask token, under any of the names that it has.

    Raises:
        ValueError: none is named.
    """
    token = said("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
    if token is None:
        raise ValueError(
            "This drafter's config names no mask token (mask_token_id): it cannot be guessed. Ask "
            "its publisher, and add it there."
        )
    return token


def block_size(said: Said) -> int:
    """Look up the rows of a block.

    Raises:
        ValueError: none are named, or a single one.
    """
    sizes = [said(name, default=0) for name in ("block_size", "xpress_block_size")]
    if (size := next((size for size in sizes if size >= 2), None)) is None:
        raise ValueError(
            "The drafter's config has no block_size of at least 2: save or download it again."
        )
    return size


def _vocab_size(said: Said) -> int:
    return said("vocab_size") or said.layers.vocab_size


def _draft_vocab_size(said: Said) -> int | None:
    """Look up a draft vocabulary's size V', or None where it is V."""
    size = said("draft_vocab_size")
    return size if size is not None and size < _vocab_size(said) else None


def _rank(name: str, part: str) -> Any:
    """Make the field of a head's rank; 0 where the tensors have no such head.

    Raises:
        ValueError: config and tensors differ.
    """

    def read(said: Said) -> int:
        rank = said(name)
        if said.names and bool(rank) != said.has(part):
            raise ValueError(
                f"The config says {name}={rank}, and the tensors say otherwise: download it again."
            )
        return rank or 0

    return read


def _markov_type(said: Said) -> str:
    kind = said("markov_head_type", default="vanilla")
    if kind not in ("vanilla", "gated", "rnn"):
        raise ValueError(
            f"A Markov head of type {kind!r} is not served: vanilla, gated and rnn are."
        )
    return kind


def _confidence(said: Said) -> bool:
    enabled = bool(said("enable_confidence_head"))
    return said.has("confidence.") or (not said.names and enabled)


def _refiner_size(said: Said) -> int:
    wide, ratio = said("xpress_mlp_hidden"), said("xpress_mlp_ratio", default=2)
    return wide or said("xpress_rank", default=0) * ratio


def _dspine(name: str, default: int) -> Any:
    """Make the field of one of DSpine's sizes; 0 for other drafters."""
    return lambda said: (said.only(DSPINE_PART, name) or default) if said.has("injection.") else 0


def _with_markov(said: Said) -> bool:
    rank, wanted = said("markov_rank"), said("confidence_head_with_markov", default=True)
    return bool(rank and wanted)


COMMON = {
    "layers": lambda said: said.layers,
    "in_pairs": lambda said: paired(said.described, said.layers),
    "target_hidden_size": lambda said: said("target_hidden_size") or said.layers.hidden_size,
    "target_layers": key("num_target_layers"),
    "vocab_size": _vocab_size,
    "draft_vocab_size": _draft_vocab_size,
}
BLOCKS = {
    **COMMON,
    "block_size": block_size,
    "mask_token_id": mask_token,
    "markov_rank": _rank("markov_rank", "markov."),
    "markov_type": _markov_type,
    "confidence": _confidence,
    "confidence_with_markov": _with_markov,
    "conv_kernel_size": key("conv_kernel_size", default=0),
    "conv_group_size": key("conv_group_size", default=0),
    "selector_rank": _rank("selector_rank", "selector."),
    "selector_top_k": lambda said: said("selector_top_k") or said.only(DSPINE_PART, "top_k") or 16,
    "refiner_rank": _rank("xpress_rank", "refiner."),
    "refiner_size": _refiner_size,
    "transfer_rank": _dspine("transfer_rank", 1024),
    "message_size": _dspine("message_size", 512),
}


def _is(said: Said, kind: str) -> bool:
    return said.config.get("speculators_model_type") == kind


def _parallel(said: Said) -> bool:
    return said.has("mask_hidden") or _is(said, "peagle")


def _norm(name: str, tensor: str) -> Any:
    """Make the field of a norm, which there is where the config or a tensor says so.

    Raises:
        ValueError: the config says that there is none, and the tensors hold it.
    """

    def read(said: Said) -> bool:
        wanted, held = said(name), said.has(tensor)
        if wanted is False and held:
            raise ValueError(
                f"The config says {name}=False, and the tensors hold {tensor}: download it again."
            )
        return bool(wanted) or held

    return read


def _softcap(said: Said) -> float | None:
    """Look up the cap of Gemma 4's layers; other configs may repeat the target's, which counts."""
    cap = said("final_logit_softcapping")
    return cap if said.layers.model_type == GEMMA4 else None


EAGLE3_FIELDS = {
    **COMMON,
    "norm_before_residual": lambda said: bool(said("norm_before_residual")),
    "norm_before_fc": _norm("norm_before_fc", "input_norm.weight"),
    "fc_norm": _norm("fc_norm", "fc_norm.0.weight"),
    "norm_output": lambda said: bool(said("norm_output")),
    "mask_token_id": lambda said: mask_token(said) if _parallel(said) else None,
    "num_draft_tokens": lambda said: proposed_tokens(said.config),
    "softcap": _softcap,
}


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
EAGLE3_LAYOUT = Layout(
    "speculators",
    _is_speculators,
    {
        **EAGLE3_FIELDS,
        "features": outputs(LISTED, offset=-1),
        "raw_target": _raw_target,
        "notes": lambda said: [NO_LAYERS] if said(LISTED) is None else [],
    },
    described=layer_config,
    classes={
        "Eagle3Speculator": EAGLE3,
        "PEagleSpeculator": PEAGLE,
        "PEagleDraftModel": PEAGLE,
    },
    tensors={"layers.0.hidden_norm.": "hidden_norm.", **TENSORS},
)


def layer_values(layers: PreTrainedConfig) -> dict[str, Any]:
    """Make the part of a config that describes layers, as the speculators layout has it."""
    return layers.to_diff_dict() | {"model_type": layers.model_type}
