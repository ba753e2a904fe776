"""A drafter's logits after whole texts, with nothing read before."""

from __future__ import annotations

from typing import Any

import torch
from torch import LongTensor, Tensor

from ..decoding.trees import to_target
from ..protocol import Drafting, GuessedLogits, Observation, Prefix
from ..protocol.drafter import FeatureKey


@torch.no_grad()
def logits_behind(
    drafting: Drafting, ids: LongTensor, features: dict[FeatureKey, Tensor] | None, count: int
) -> Tensor:
    """Compute logits `(B, count, V')` after whole texts of equal length.

    A guess that depends on the tokens before it stands after the most probable ones.

    Args:
        drafting: gives `GuessedLogits`, and has read nothing yet.
        ids: int64 `(B, n)`.
        features: by key, `(B, n - 1, …)`; None where none are read.
        count: K.

    Raises:
        ValueError: where features are read, none, or a text of one token.
    """
    if features:
        drafting.observe(
            [
                Observation(row, 0, {key: states[index] for key, states in features.items()})
                for index, row in enumerate(ids)
            ]
        )
    guesses: Any = drafting.propose([Prefix(row[None], count, 0) for row in ids])
    first = guesses[0]
    if not len(first.logits):
        raise ValueError(
            "Guesses are made from the target's hidden states: pass features, by key, of all "
            "tokens but the last, of a text of two tokens at least."
        )
    logits = torch.stack(
        [_most_probable(guess, row[-1:]) for guess, row in zip(guesses, ids, strict=True)]
    )
    while first.extend is not None and logits.shape[1] < count:
        token = to_target(logits[:, -1].max(-1).indices, first.vocabulary)
        parents = [[logits.shape[1] - 2]] * len(ids)
        logits = torch.cat(
            [logits, torch.stack(first.extend(list(token[:, None]), parents))], dim=1
        )
    return logits


def _most_probable(guess: GuessedLogits, token: LongTensor) -> Tensor:
    """Compute a guess's logits `(k, V')`, each biased by the most probable token before it.

    `token`, int64 `(1,)`, is the text's last one.
    """
    if guess.bias is None:
        return guess.logits
    rows, memories = [], [None]
    for depth, row in enumerate(guess.logits):
        bias, memories = guess.bias(torch.tensor([depth], device=token.device), token, memories)
        rows.append(row + bias[0].to(row))
        token = to_target(rows[-1].argmax()[None], guess.vocabulary)
    return torch.stack(rows)
