"""The target's states of texts, caught in the forwards that write them: a training need not run it
for those again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..protocol import Drafter, Drafting, Guess, Observation, Prefix
from ..protocol.drafter import FeatureKey


class Catching(Drafter):
    """A drafter that drafts as another does, and keeps the target's states of every text.

    States are taken from the target's forwards.

    Args:
        drafter: the drafter that guesses.
        keys: the states that are kept.

    Attributes:
        texts: the states of each text so far, `(f, hidden)` in pieces, by its number in the order
            in which texts begin.
        begun: the count of texts that have begun.
    """

    def __init__(self, drafter: Drafter, keys: Sequence[FeatureKey]):
        vars(self).update({name: getattr(drafter, name) for name in Drafter.__annotations__})
        self.drafter, self.keys = drafter, tuple(keys)
        self.texts: dict[int, dict[FeatureKey, list[Tensor]]] = {}
        self.begun = 0

    @property
    def max_rows(self) -> int:
        """Implement `Drafter.max_rows`."""
        return self.drafter.max_rows

    def attach(self, target: PreTrainedModel) -> None:
        """Implement `Drafter.attach`."""
        self.drafter.attach(target)

    def needs(self, target: PreTrainedModel) -> tuple[FeatureKey, ...]:
        """List the features that the drafter reads or that are kept."""
        return tuple(dict.fromkeys((*self.drafter.needs(target), *self.keys)))

    def start_drafting(self, target: PreTrainedModel, max_length: int) -> Drafting:
        """Implement `Drafter.start_drafting`."""
        return CatchingDrafting(
            self, self.drafter.start_drafting(target, max_length), self.drafter.needs(target)
        )

    def begin(self, count: int) -> list[int]:
        """Give numbers to texts that begin."""
        numbers = [*range(self.begun, self.begun + count)]
        self.texts.update({number: defaultdict(list) for number in numbers})
        self.begun += count
        return numbers

    def take(self, number: int) -> dict[FeatureKey, Tensor]:
        """Remove and return the states of a text that has ended, `(n, hidden)`.

        The states are of all tokens of the text but the newest.
        """
        return {key: torch.cat(pieces) for key, pieces in self.texts.pop(number).items()}


class CatchingDrafting(Drafting):
    """One call of a `Catching` drafter.

    Args:
        catching: the drafter that keeps the states.
        drafting: the call of the drafter that guesses.
        read: the features that it reads, in its order.
    """

    def __init__(self, catching: Catching, drafting: Drafting, read: tuple[FeatureKey, ...]):
        self.catching, self.drafting, self.read = catching, drafting, read
        self.numbers: list[int] = []  # of the texts

    def propose(self, prefixes: list[Prefix]) -> Sequence[Guess]:
        """Implement `Drafting.propose`."""
        return self.drafting.propose(prefixes)

    def check_texts(self, count: int) -> None:
        """Implement `Drafting.check_texts`; the texts begin here."""
        self.drafting.check_texts(count)
        self.numbers = self.catching.begin(count)

    def observe(self, observations: list[Observation | None]) -> None:
        """Keep the wanted states, and show the drafter the features that it reads."""
        for number, observation in zip(self.numbers, observations, strict=True):
            for key in self.catching.keys if observation is not None else ():
                self.catching.texts[number][key].append(observation.features[key])
        self.drafting.observe(
            [
                seen and replace(seen, features={key: seen.features[key] for key in self.read})
                for seen in observations
            ]
        )

    def join(self, other: Drafting) -> bool:
        """Implement `Drafting.join`."""
        if isinstance(other, CatchingDrafting) and self.drafting.join(other.drafting):
            self.numbers += other.numbers
            return True
        return False

    def select(self, rows: list[int]) -> None:
        """Implement `Drafting.select`."""
        self.drafting.select(rows)
        self.numbers = [self.numbers[row] for row in rows]
