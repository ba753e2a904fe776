"""Guesses ordered by their odds to win the target's draw, with odds learned from the winners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy
import torch
from numpy import ndarray
from torch import LongTensor, Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from ..decoding.trees import to_target

IMPOSSIBLE = -1e4  # the log-probability of an id that the target does not have
NEAR, RIVALS = 6, 16  # distances, and tokens at each, of which the odds are learned
PRIOR = 20.0  # weight of the first odds
DECAY = 0.995  # factor by which each later token lowers the weight of earlier ones


class Odds:
    """The odds of tokens to win the draw, by log-probabilities and noise.

    They are a softmax over `α log q - λ log E`, with the drafter's `q` and the noise `E` of its
    tokens.

    If the target is sure, noise decides nothing and λ is 0; if it is as unsure as the drafter, both
    are 1; if the drafter knows little of the text, only noise decides, and α is small. So α and λ
    are learned from the winners, by Newton steps on the likelihood, and follow the text; they
    depend on how sure `q` is.
    """

    def __init__(self) -> None:
        # α = w0 + w1 h, λ = w2 + w3 h, where h = -max log q
        self.weights = numpy.array([0.9, -0.1, 0.2, 0.15])
        self.precision = PRIOR * numpy.eye(4)

    def __call__(self, q: Tensor, noise: Tensor) -> Tensor:
        """Compute logits `(n, V')` of the token that wins the draw.

        They come from log-probabilities `q` and the log noise, both `(n, V')`.
        """
        unsure = -q.amax(-1, keepdim=True)
        alpha, alpha_unsure, noisy, noisy_unsure = self.weights.tolist()
        return (alpha + alpha_unsure * unsure).clamp(min=0.01) * q - (
            noisy + noisy_unsure * unsure
        ).clamp(min=0) * noise

    def learn(self, features: ndarray, winners: list[int]) -> None:
        """Update the weights from the winners, by one Newton step.

        Args:
            features: `(m, n, 4)`, the weights' features, for m new tokens and the n that could have
                won each.
            winners: `(m,)`, the index of the one that won.
        """
        scores = features @ self.weights
        chances = numpy.exp(scores - scores.max(1, keepdims=True))
        chances = (chances / chances.sum(1, keepdims=True))[..., None]
        apart = features - (features * chances).sum(1, keepdims=True)
        prior = PRIOR * numpy.eye(4)  # below it the precision never falls
        self.precision = (
            prior
            + DECAY ** len(features) * (self.precision - prior)
            + numpy.einsum("mni,mnj->ij", apart, apart * chances)
        )
        self.weights = self.weights + numpy.linalg.solve(
            self.precision, apart[range(len(winners)), winners].sum(0)
        )


@dataclass
class Race:
    """A scorer of one sequence's guesses, by their chance to win the target's draw.

    It scores them when the draw's noise is known, and otherwise leaves them as they are.

    Args:
        log_noise: the function that computes the log noise, float32 `(n, V)`, of tokens at given
            distances from the draft's begin; None if it is not known.
        length: the number of tokens before the draft, padding included.
        processors: the target's logits processors, whose temperature is applied to `q` too.
        odds: the pair's odds.
        seen: the distance, path, rivals and their features of each row that was scored.
    """

    log_noise: Callable[[Sequence[int]], Tensor | None]
    length: int
    processors: LogitsProcessorList
    odds: Odds
    seen: list[tuple[int, list[int] | None, list[int], ndarray]] = field(default_factory=list)

    def __call__(
        self,
        logits: Tensor,
        paths: list[list[int]] | None = None,
        vocabulary: LongTensor | None = None,
    ) -> Tensor:
        """Compute logits `(n, V')` of the token that wins the draw.

        The drafter's own are returned if the noise is not known.

        Args:
            logits: the drafter's logits `(n, V')`.
            paths: the drafted tokens before each row; default: row `d` is for distance `d`, after
                any tokens.
            vocabulary: int64 `(V',)`, the target's id of each of the drafter's.
        """
        distances = [*range(len(logits))] if paths is None else [*map(len, paths)]
        noise = self.log_noise(distances)
        if noise is None or not logits.amax(-1).isfinite().all():
            return logits
        ids = (
            slice(logits.shape[1])
            if vocabulary is None
            else vocabulary.clamp(0, noise.shape[1] - 1).to(noise.device)
        )
        noise = noise[:, ids]
        logits = logits.to(noise.device, torch.float32)
        for processor in self.processors:  # others may cut tokens that the drafter underrates
            if type(processor) is TemperatureLogitsWarper:
                logits = processor(None, logits)
        q = logits.log_softmax(-1)
        rows = [row for row, distance in enumerate(distances) if distance < NEAR]
        top = (q[rows] - noise[rows]).topk(min(RIVALS, q.shape[1])).indices
        near, drawn = (part[rows].gather(1, top).clamp(min=IMPOSSIBLE) for part in (q, noise))
        unsure = -q[rows].amax(-1, keepdim=True)
        features = (
            torch.stack([near, unsure * near, -drawn, -unsure * drawn], -1).cpu().double().numpy()
        )
        for row, ids, of_row in zip(
            rows, to_target(top, vocabulary).tolist(), features, strict=True
        ):
            self.seen.append((distances[row], None if paths is None else paths[row], ids, of_row))
        return self.odds(q, noise)

    def learn(self, tokens: list[int]) -> None:
        """Update the odds from the round's new tokens."""
        came = [
            (features, ids.index(tokens[distance]))
            for distance, path, ids, features in self.seen
            if distance < len(tokens)
            and path in (None, tokens[:distance])
            and tokens[distance] in ids
        ]
        if came:
            features, winners = zip(*came, strict=True)
            self.odds.learn(numpy.stack(features), list(winners))

    def chances(
        self, tokens: list[int], believed: list[float], distances: list[int] | None = None
    ) -> list[float]:
        """Compute the chances of tokens given the noise of the target's draw.

        With noise `E` a chance π becomes `exp(-E (1 - π) / π)`; if the noise is unknown, it is
        returned as it is.
        """
        distances = distances or list(range(len(tokens)))
        noise = self.log_noise(range(1 + max(distances, default=-1)))
        if noise is None:
            return believed
        chances = torch.tensor(believed, device="cpu").clamp(1e-6, 1)
        drawn = noise[distances, tokens].exp().cpu()
        return (-drawn * (1 - chances) / chances).exp().tolist()
