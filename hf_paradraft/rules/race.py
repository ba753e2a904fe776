"""Guesses in the order in which they win the target's draw, and what is learned from who won."""

from __future__ import annotations

import numpy
import torch
from numpy import ndarray
from torch import LongTensor, Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from ..decoding.trees import to_target
from .draws import are_numbers
from .noise import Noise

IMPOSSIBLE = -1e4  # the log-probability of what the target does not have
NEAR, RIVALS = 6, 16  # distances, and tokens at each, of which the odds are learned
# how much the first odds weigh, and what was learned before a token with each later one
PRIOR, DECAY = (
    20.0,
    0.995,
)


class Odds:
    """The odds of tokens to win the draw, by log-probabilities and noise.

    They are a softmax over `α log q - λ log E`, with the drafter's `q` and the noise `E` of its
    tokens.

    With a target that is sure of itself, noise decides nothing and λ is 0; with one that is as
    unsure as the drafter, both are 1; after a drafter that knows little of the text, noise is all
    there is, and α is small. So α and λ are learned from who won, by Newton steps on the
    likelihood, and follow the text: they depend on how sure `q` is.
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
        """Learn who won, by one Newton step.

        Args:
            features: `(m, n, 4)`, of m tokens that came and the n that could win each, what the
                weights are for.
            winners: `(m,)`, which of the n it was.
        """
        scores = features @ self.weights
        chances = numpy.exp(scores - scores.max(1, keepdims=True))
        chances = (chances / chances.sum(1, keepdims=True))[..., None]
        apart = features - (features * chances).sum(1, keepdims=True)
        prior = PRIOR * numpy.eye(4)
        self.precision = (
            prior
            + DECAY ** len(features) * (self.precision - prior)
            + numpy.einsum("mni,mnj->ij", apart, apart * chances)
        )
        self.weights = self.weights + numpy.linalg.solve(
            self.precision, apart[range(len(winners)), winners].sum(0)
        )


class Race:
    """A scorer of one sequence's guesses, by how likely they win the target's draw.

    It scores them when the draw's noise is known, and otherwise leaves them as they are.

    Args:
        noise: of the call.
        index: of the sequence.
        length: tokens that the draft stands after, padding included.
        processors: the target's, whose temperature is `q`'s too.
        odds: of the pair.
    """

    def __init__(
        self, noise: Noise, index: int, length: int, processors: LogitsProcessorList, odds: Odds
    ):
        self.noise, self.index, self.length, self.processors = noise, index, length, processors
        self.odds = odds
        self.seen: list[
            tuple[int, list[int] | None, list[int], ndarray]
        ] = []  # who could win, and where

    def __call__(
        self,
        logits: Tensor,
        paths: list[list[int]] | None = None,
        vocabulary: LongTensor | None = None,
    ) -> Tensor:
        """Compute logits `(n, V')` of the token that wins the draw.

        The drafter's own are returned where the noise is not known.

        Args:
            logits: `(n, V')`, the drafter's.
            paths: drafted tokens before each row; default: rows are one distance after the other,
                after whatever comes.
            vocabulary: int64 `(V',)`, the target's id of each of the drafter's.
        """
        distances = [*range(len(logits))] if paths is None else [*map(len, paths)]
        noise = self.noise.log(self.index, self.length, distances)
        if noise is None or not are_numbers(logits):
            return logits
        ids = (
            slice(logits.shape[1])
            if vocabulary is None
            else vocabulary.clamp(0, noise.shape[1] - 1).to(noise.device)
        )
        noise = noise[:, ids]
        logits = logits.to(noise.device, torch.float32)
        for (
            processor
        ) in self.processors:  # what cuts is left out: it would cut what the drafter underrates
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
        """Learn from the tokens that came."""
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

        With noise `E` a chance π becomes `exp(-E (1 - π) / π)`; where the noise is unknown it is
        returned as it is.
        """
        distances = distances or list(range(len(tokens)))
        noise = self.noise.log(self.index, self.length, range(1 + max(distances, default=-1)))
        if noise is None:
            return believed
        chances = torch.tensor(believed, device="cpu").clamp(1e-6, 1)
        drawn = noise[distances, tokens].exp().cpu()
        return (-drawn * (1 - chances) / chances).exp().tolist()
