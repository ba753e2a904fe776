"""A head over the tokens that a target writes most often (FR-Spec; VocabTrim): most of a small drafter's time is its head.

Inputs keep the target's ids. Row `j` of the head guesses the id `draft_vocabulary[j]`, which is saved with the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import LongTensor, nn
from transformers import PreTrainedModel


def trim_head(model: PreTrainedModel, vocabulary: LongTensor) -> None:
    """Keep the rows of the head that guess `vocabulary`, in place; the embedding stays whole, and is no longer tied to it.

    Args:
        model: a causal LM.
        vocabulary: int64 `(V',)`, rising ids.
    """
    head = model.get_output_embeddings()
    rows = head.weight.detach()[vocabulary.to(head.weight.device)].clone()
    own = nn.Linear(head.in_features, len(vocabulary), bias=head.bias is not None, device=rows.device, dtype=rows.dtype)
    own.weight = nn.Parameter(rows)
    if head.bias is not None:
        own.bias = nn.Parameter(head.bias.detach()[vocabulary.to(rows.device)].clone())
    model.set_output_embeddings(own)
    model.register_buffer("draft_vocabulary", vocabulary)
    config = model.config.get_text_config()
    config.tie_word_embeddings = model.config.tie_word_embeddings = False
    model.config.draft_vocab_size = len(vocabulary)


def most_frequent(texts: Iterable[Iterable[int]], size: int, always: Iterable[int], vocab_size: int) -> LongTensor:
    """The `size` ids that occur most often, rising; those that never occur fill up from the lowest.

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
            f"A vocabulary of {size} tokens: it must hold the {len(wanted)} special ones and some more, and at most the target's "
            f"{vocab_size}."
        )
    counts = Counter(token for text in texts for token in text)
    ranked = [token for token, _ in counts.most_common() if token not in set(wanted)]
    seen = {*wanted, *ranked}
    ranked += [token for token in range(vocab_size) if token not in seen]
    return torch.tensor(sorted([*wanted, *ranked[: size - len(wanted)]]))
