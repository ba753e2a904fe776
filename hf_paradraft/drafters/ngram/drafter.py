"""Guesses copied from the text itself: no model, no files."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ...protocol import Drafter, Drafting, GuessedTokens, Observation, Prefix, SpeculationConfig


class NgramDrafter(Drafter):
    """Copies what followed the longest earlier occurrence of the text's last tokens, the latest one of that length.

    Args:
        longest: tokens of a match at most.
        shortest: at least.
        speculation_config: default: chains of 10.

    Raises:
        ValueError: lengths that are none.
    """

    def __init__(self, longest: int = 4, shortest: int = 1, speculation_config: SpeculationConfig | None = None):
        if not 1 <= shortest <= longest:
            raise ValueError(f"Matches have 1 token at least: shortest={shortest} and longest={longest} do not go together.")
        self.longest, self.shortest = longest, shortest
        self.speculation_config = speculation_config or SpeculationConfig(10)

    def start_drafting(self, target: PreTrainedModel, max_length: int) -> NgramDrafting:
        """Begin a `generate` call; its state is its own."""
        return NgramDrafting(self.longest, self.shortest)


class NgramDrafting(Drafting):
    """One call's copying: where each run of tokens stood last, and how often a match of each length held.

    Args:
        longest, shortest: tokens of a match.
    """

    def __init__(self, longest: int, shortest: int):
        self.longest, self.shortest = longest, shortest
        self.texts: list[list[int]] = []
        self.places: list[dict[tuple[int, ...], int]] = []  # of each row, where what followed a run begins
        self.matched: list[tuple[int, int]] = []  # of each row, the length of its last match, and the token that followed
        self.held = {length: [1.0, 2.0] for length in range(shortest, longest + 1)}  # hits and tries

    def propose(self, prefixes: list[Prefix]) -> list[GuessedTokens]:
        """For each row a chain, with the chance that it holds; none where nothing like it was there before."""
        self.texts = self.texts or [[] for _ in prefixes]
        self.places = self.places or [{} for _ in prefixes]
        self.matched = [(0, -1)] * len(prefixes)
        return [self._copy(row, prefix) for row, prefix in enumerate(prefixes)]

    def observe(self, observations: list[Observation | None]) -> None:
        """Count whether the first token of each match was right."""
        for (length, token), seen in zip(self.matched, observations, strict=False):
            if length and seen is not None and len(seen.tokens):
                self.held[length][0] += int(seen.tokens[0]) == token
                self.held[length][1] += 1
        self.matched = []

    def _copy(self, row: int, prefix: Prefix) -> GuessedTokens:
        text, places = self.texts[row], self.places[row]
        if prefix.kept < len(text):  # something was taken back
            text.clear()
            places.clear()
        for token in prefix.ids[0, len(text) :].tolist():
            for length in range(self.shortest, min(self.longest, len(text)) + 1):
                places[tuple(text[-length:])] = len(text)
            text.append(token)
        for length in range(min(self.longest, len(text)), self.shortest - 1, -1):
            begin = places.get(tuple(text[-length:]))
            if begin is not None and prefix.room:
                copied = text[begin : begin + prefix.room]
                self.matched[row] = (length, copied[0])
                hits, tries = self.held[length]
                return GuessedTokens(torch.tensor(copied), beliefs=[hits / tries] + [0.9] * (len(copied) - 1))
        return GuessedTokens(torch.zeros(0, dtype=torch.long))
