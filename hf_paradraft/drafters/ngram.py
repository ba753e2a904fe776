"""Guesses copied from the text itself (prompt lookup; RASD): no model, no files."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..decoding.lookup import PromptLookup
from ..protocol import Drafting, GuessedTokens, Prefix, SpeculationConfig
from .drafter import NamedDrafter


class NgramDrafter(NamedDrafter):
    """Copies what followed the longest earlier occurrence of the text's last tokens, the latest one of that length.

    Args:
        longest: tokens of a match at most.
        shortest: at least.
        speculation_config: default: chains of 10.

    Raises:
        ValueError: lengths that are none.
    """

    kind = "ngram"
    title = "n-gram drafter"

    def __init__(self, longest: int = 4, shortest: int = 1, speculation_config: SpeculationConfig | None = None):
        if not 1 <= shortest <= longest:
            raise ValueError(f"Matches have 1 token at least: shortest={shortest} and longest={longest} do not go together.")
        self.longest, self.shortest = longest, shortest
        self.speculation_config = speculation_config or SpeculationConfig(10, None)

    def start_drafting(self, target: PreTrainedModel, max_length: int) -> NgramDrafting:
        """Begin a `generate` call; its state is its own."""
        return NgramDrafting(self.longest, self.shortest)


class NgramDrafting(Drafting):
    """One call's copying.

    Args:
        longest, shortest: tokens of a match.
    """

    def __init__(self, longest: int, shortest: int):
        self.longest, self.shortest = longest, shortest
        self.lookup: PromptLookup | None = None

    def propose(self, prefixes: list[Prefix]) -> list[GuessedTokens]:
        """For each sequence a chain, with the chance that it holds; none where nothing like it was there before."""
        self.lookup = self.lookup or PromptLookup(len(prefixes), self.longest, self.shortest)
        guesses = []
        for index, prefix in enumerate(prefixes):
            self.lookup.read(index, prefix.ids[0], prefix.kept)
            tokens, acceptance = self.lookup.following(index, prefix.room)
            guesses.append(GuessedTokens(torch.tensor(tokens, dtype=torch.long), acceptance=acceptance))
        return guesses
