"""EAGLE-3 and P-EAGLE, as the rest of the library knows them."""

from typing import Any

from ..feature_kind import feature_kind, feature_names
from ..published import EAGLE3, PEAGLE
from .config import eagle3_config
from .model import Eagle3Drafter


def described(config: dict[str, Any], names: list[str]) -> list[tuple[str, Any]]:
    """What was understood of its files."""
    eagle = eagle3_config(config, names)
    flags = [name for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if getattr(eagle, name)]
    return [
        ("layout", eagle.layout),
        ("reads", "default layers" if eagle.features is None else feature_names(eagle.features)),
        ("own layers", f"{eagle.layers.num_hidden_layers} × {eagle.layers.hidden_size}"),
        ("guesses ids", f"{eagle.draft_vocab_size or eagle.vocab_size} of {eagle.vocab_size}"),
        ("flags", ", ".join(flags) or "none"),
        *([("mask token", eagle.mask_token_id)] if eagle.parallel else []),
        *eagle.notes,
    ]


EAGLE3_KIND = feature_kind(Eagle3Drafter, (EAGLE3, PEAGLE), described)
