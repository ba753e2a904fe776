"""A small model drafts by decoding ahead of the target, itself sped up by its prompt tokens (PPD, section 5.3)."""

from __future__ import annotations

from collections import deque
from statistics import mean, median
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import LongTensor, Tensor
from transformers import LogitsProcessorList

from ...decoding import Prefix
from ...decoding.accept import accept, greedy
from ...decoding.cost import round_cost
from ...decoding.pace import Pace
from ...decoding.verify import TreeVerifier
from ..pard.propose import PardDrafting
from .drafter import PpdDrafter

if TYPE_CHECKING:
    from .prompted import PromptedDrafter


class AheadDrafting(PardDrafting):
    """One call's drafts, longer than the prompts reach: the model verifies what they guessed, forward by forward.

    A draft's distributions are the model's own behind each token that it decoded, then the last prompts' guesses.

    Args:
        drafter: shared with other calls.
        max_length: tokens of a row at most.
    """

    def __init__(self, drafter: PromptedDrafter, max_length: int):
        super().__init__(drafter, max_length)
        self.compiled = False
        self.drafting = PpdDrafter.from_model(drafter.model).start_drafting(max_length)  # what the model guesses for itself
        self.decoded: list[list[int]] = []  # of each row, the model's own tokens that the cache holds behind the known ones
        self.room = 0  # tokens of a draft at most
        self.answers: list[list[Tensor]] = []  # of each row, logits behind the prefix and all its decoded tokens
        self.reach: list[list[float]] = []  # of each row, the chance that the target takes the first 0, 1, 2, … of its tokens
        self.verifier: TreeVerifier | None = None
        self.pace: Pace | None = None
        self.seconds: deque[float] = deque(maxlen=9)  # of forwards that verify
        self.gains: deque[float] = deque(maxlen=32)  # tokens of a row that they brought

    def _guess(self, rows: list[LongTensor], room: int, prefixes: list[Prefix]) -> list[Tensor]:
        """Logits `(at most K, V)` for what follows each row: as many as are worth their time."""
        begun, self.room = perf_counter(), room
        self._forget(rows)
        logits = super()._guess(rows, min(room, 1 + self.drafter.num_prompts), prefixes)
        self.decoded = [[] for _ in rows]
        self.answers, self.reach = [[] for _ in rows], [[1.0] for _ in rows]
        for index, row in enumerate(logits):
            self._take(index, row[:1])
        tokens = logits[:, 0].argmax(-1, keepdim=True).tolist()
        self.drafting.guesses = [row[1:].float() for row in logits]
        while any(self._open(prefixes)) and self._pays(prefixes, perf_counter() - begun):
            tokens = self._decode(tokens, prefixes)
        return [
            torch.cat([*known, known[0][:0] if guess is None else guess.to(known[0])])
            for known, guess in zip(self.answers, self.drafting.guesses, strict=True)
        ]

    def _take(self, index: int, logits: Tensor) -> None:
        """More of a row's answers, `(k, V)`, and the chance that the target's tokens are the same up to each."""
        self.answers[index].append(logits)
        reach = self.reach[index]
        for belief in logits.float().softmax(-1).amax(-1).tolist():
            reach.append(reach[-1] * belief)

    def _open(self, prefixes: list[Prefix]) -> list[bool]:
        """Which rows may have more tokens."""
        return [len(reach) - 1 < min(self.room, prefix.room) for reach, prefix in zip(self.reach, prefixes, strict=True)]

    def _forget(self, rows: list[LongTensor]) -> None:
        """Drop from the cache what the target has not accepted; each row's last token is read again, for its logits."""
        if self.cache is None or not self.decoded:
            return
        dropped = []
        for index, (ids, known, decoded) in enumerate(zip(rows, self.known, self.decoded, strict=True)):
            new = ids[known : known + len(decoded)].tolist()
            same = next(
                (place for place, (ours, theirs) in enumerate(zip(decoded, new, strict=False)) if ours != theirs), len(new)
            )
            self.known[index] = min(known + same, len(ids) - 1)
            dropped.append(known + len(decoded) - self.known[index])
        self.cache.forget(dropped)

    def _pays(self, prefixes: list[Prefix], spent: float) -> bool:
        """Whether one more forward is expected to bring tokens faster than the round has so far."""
        if not self.seconds:
            return True
        promised = sum(map(sum, self.reach))  # with the target's own token, which is certain
        gain = sum(reach[-1] for reach, more in zip(self.reach, self._open(prefixes), strict=True) if more)
        return prefixes[0].pace.goes_on(gain * mean(self.gains), median(self.seconds), promised, spent)

    def _decode(self, tokens: list[list[int]], prefixes: list[Prefix]) -> list[list[int]]:
        """One round of the model's own: its guesses verified, new ones made.

        Args:
            tokens: each row's last one `[[token], …]`, which the cache lacks.
            prefixes: the target's.

        Returns:
            The new last ones.
        """
        begun = perf_counter()
        if self.verifier is None or self.verifier.cache is not self.cache:
            model = self.drafter.model
            kwargs = {"past_key_values": self.cache.cache, "use_cache": True}
            self.verifier = TreeVerifier(model, kwargs, self.cache, self.attention, num_positions=self.context)
            auto = self.drafting.drafter.speculation_config.tree_size == "auto"
            cost = round_cost(model, len(prefixes)) if auto else None
            self.pace = Pace(self.drafter.num_prompts, False, cost, adaptive=False)
        lasts = torch.tensor(tokens, device=self.drafter.device)
        own = []
        for reach, prefix, last in zip(self.reach, prefixes, lasts, strict=True):
            room = min(self.drafter.num_prompts, max(0, min(self.room, prefix.room) - len(reach) + 1))
            own.append(
                Prefix(last[None], room, LogitsProcessorList(), False, self.drafting.drafter.config.vocab_size, True, self.pace)
            )
        drafts = self.drafting.propose(own)
        proposed = perf_counter()
        logits, outputs = self.verifier.verify(lasts, [1] * len(own), drafts)
        choices = logits.argmax(-1).tolist()
        verified = perf_counter()
        paths: list[list[int] | None] = []
        for index, (prefix, draft) in enumerate(zip(own, drafts, strict=True)):
            if prefix.room == 0:
                paths.append(None)
                continue
            buffer = prefix.ids.new_zeros((1, len(draft) + 2))
            emitted = list(accept(draft, logits[index], buffer, 1, prefix.logits_processor, greedy, choices[index]))
            path = [one.node for one in emitted[:-1]]
            self.decoded[index] += [*tokens[index], *(one.token for one in emitted[:-1])]
            self._take(index, torch.cat([one.logits for one in emitted]))
            tokens[index] = [emitted[-1].token]
            paths.append(path)
            self.gains.append(len(emitted))
        self.verifier.keep(paths)
        self.drafting.observe(outputs, paths)
        self.seconds.append(perf_counter() - begun)
        if self.drafting.trees is None:  # calibrated ones do not depend on what came true
            self.pace.observe(drafts, paths, proposed - begun, verified - proposed, self.seconds[-1])
        return tokens
