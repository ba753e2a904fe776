"""Whether a drafter's ids are its target's."""

from torch import LongTensor

PADDING = 512  # rows by which tables of one vocabulary differ, padded to this or that multiple


def check_ids(
    who: str, vocabulary: LongTensor | None, own_size: int | None, target_size: int, mask_token: int | None, table_size: int
) -> None:
    """Refuse a drafter of other ids, which would draft and never be right.

    Args:
        who: begins a sentence about it.
        vocabulary: int64 `(V',)`, the target's ids that it guesses; None: all.
        own_size: of the vocabulary that it was made for, if it is known.
        target_size: V.
        mask_token: of its masks, or None.
        table_size: rows of the embedding in which it looks that up.

    Raises:
        ValueError: ids that the target does not have, another vocabulary, or a mask without an embedding.
    """
    if vocabulary is not None and int(vocabulary.max()) >= target_size:
        raise ValueError(f"{who} guesses ids up to {int(vocabulary.max())}; the target's end at {target_size - 1}.")
    if vocabulary is None and own_size is not None and abs(own_size - target_size) > max(PADDING, target_size // 100):
        raise ValueError(
            f"{who} was made for a vocabulary of {own_size}, and the target's has {target_size}: it was made for another target."
        )
    if mask_token is not None and not 0 <= mask_token < table_size:
        raise ValueError(
            f"{who} guesses in place of mask token {mask_token}, and its embedding ends at {table_size - 1}: it was made for "
            "another target, or for one with more tokens."
        )
