"""DFlash, as the rest of the library knows it."""

from typing import Any

from ..feature_kind import feature_kind, feature_names
from ..published import DFLASH
from .config import block_config
from .model import DFlashDrafter


def described(config: dict[str, Any], names: list[str]) -> list[tuple[str, Any]]:
    """What was understood of a block drafter's files."""
    block = block_config(config, names)
    readings = {True: "fills masks in", False: "guesses from the newest token on", None: "not in the files: probed when attached"}
    head = f"{block.markov_type}, rank {block.markov_rank}" if block.markov_rank else "none"
    return [
        ("layout", block.layout),
        ("reads", feature_names(block.features)),
        ("block", f"{block.block_size} rows, {block.num_drafts} guesses: {readings[block.fill_in]}"),
        ("own layers", f"{block.layers.num_hidden_layers} × {block.layers.hidden_size}"),
        ("mask token", block.mask_token_id),
        ("guesses ids", f"{block.draft_vocab_size or block.vocab_size} of {block.vocab_size}"),
        ("head for the token before", head),
        ("confidences", "yes" if block.confidence else "no"),
        *block.notes,
    ]


DFLASH_KIND = feature_kind(DFlashDrafter, (DFLASH,), described)
