"""The ids that a target writes most often, for drafters that guess those alone."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import LongTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..chat import end_tokens
from .data import IGNORED


def answer_vocabulary(
    rows: Iterable[dict], size: int, tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel
) -> LongTensor:
    """Choose the `size` most frequent ids of answers, special ids included.

    Ids that end a text are included too.

    Args:
        rows: from `encode_rows`.
        size: V'.
        tokenizer, target: whose special ids are always among them.

    Returns:
        int64 `(V',)`, rising.

    Raises:
        ValueError: as for `most_frequent`.
    """
    texts = ([label for label in row["labels"] if label != IGNORED] for row in rows)
    always = [*tokenizer.all_special_ids, *end_tokens(target)]
    return most_frequent(texts, size, always, target.config.get_text_config().vocab_size)


def most_frequent(
    texts: Iterable[Iterable[int]], size: int, always: Iterable[int], vocab_size: int
) -> LongTensor:
    """Choose `size` ids: those in `always`, the most frequent, then the lowest of the rest.

    The rest are ids that never occur. All are sorted in rising order.

    Args:
        texts: ids that the target has written.
        size: V'.
        always: ids that have to be in: what ends a text, and other special ones.
        vocab_size: V.

    Raises:
        ValueError: there is no room for `always`, or more is asked for than there is.
    """
    wanted = sorted({token for token in always if 0 <= token < vocab_size})
    if not len(wanted) < size <= vocab_size:
        raise ValueError(
            f"A vocabulary of {size} tokens: it must hold the {len(wanted)} special ones and some "
            f"more, and at most the target's {vocab_size}."
        )
    counts = Counter(token for text in texts for token in text)
    ranked = dict.fromkeys(
        [*wanted, *(token for token, _ in counts.most_common()), *range(vocab_size)]
    )
    return torch.tensor(sorted(list(ranked)[:size]))


def places_in(vocabulary: LongTensor, ids: LongTensor) -> LongTensor:
    """Look up ids in a vocabulary: their places in it, -100 for all others.

    Args:
        vocabulary: int64 `(V',)`, in any order.
        ids: int64 `(…)`.
    """
    rising = vocabulary.argsort()
    found = torch.searchsorted(vocabulary, ids, sorter=rising).clamp(max=len(vocabulary) - 1)
    places = rising[found]
    return torch.where(vocabulary[places] == ids, places, IGNORED)
