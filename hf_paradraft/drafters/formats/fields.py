"""Fields that all layouts of a family have in common: of drafters of blocks, and of EAGLE-3."""

from collections.abc import Mapping
from typing import Any

from ..layers import GEMMA4
from .keys import paired
from .layout import Said, key

NO_LAYERS = (
    "layers",
    "default: 2, L // 2 and L - 3 of the target's tuple of states, for none are named",
)
DSPINE = "dspine_config"


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


def from_anchor(said: Said) -> bool | None:
    """Tell whether a block's first row, the newest token's, guesses the next token.

    None: the config does not say.
    """
    start, sampled = said("logits_start"), said("sample_from_anchor")
    return sampled if start is None else start == 0


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
    return lambda said: (said.only(DSPINE, name) or default) if said.has("injection.") else 0


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
    "selector_top_k": lambda said: said("selector_top_k") or said.only(DSPINE, "top_k") or 16,
    "refiner_rank": _rank("xpress_rank", "refiner."),
    "refiner_size": _refiner_size,
    "transfer_rank": _dspine("transfer_rank", 1024),
    "message_size": _dspine("message_size", 512),
}


def _parallel(said: Said) -> bool:
    return said.has("mask_hidden") or said.config.get("speculators_model_type") == "peagle"


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


def proposed_tokens(config: Mapping[str, Any]) -> int | None:
    """Look up how many tokens engines are told to draft."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or []
    return next((method.get("speculative_tokens") for method in methods), None)


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
