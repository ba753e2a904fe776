"""Sample and match: the text that plain decoding has with the same seed, from drafts.

The noise of the target's random draws is made before a round, so that drafts can allow for it.
`torch.multinomial(p, 1)` is an exponential race: the generator gives noise `E` of `p`'s shape, and
the token is `argmax(p / E)`. Plain decoding draws one `E` for each new token, in order. A
draft of `argmax(q / E)`, with the same `E`, is right far more often than one of `argmax q`, and the
text stays the seed's (Daliri, Musco and Suresh, arXiv 2408.07978; Kobus and Gündüz, 2504.15475).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Sequence_
from contextlib import contextmanager
from functools import cache, partial
from threading import Lock, RLock
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ..decoding.accept import Rule, child_that_is
from ..decoding.sequence import Sequence
from ..protocol import Draft
from .race import Odds, Race

KEPT = 2**27  # bytes of noise kept for sequences that lag; beyond them it is drawn again
# by device: a lock, since torch's own generator serves one thread's calls at a time
_in_use: defaultdict[torch.device, RLock] = defaultdict(RLock)


def generator_of(device: torch.device) -> torch.Generator | None:
    """Look up the generator that `torch.multinomial` takes by default on a device.

    It is None on other kinds of device.
    """
    if device.type == "cuda":
        return torch.cuda.default_generators[
            torch.cuda.current_device() if device.index is None else device.index
        ]
    return torch.default_generator if device.type == "cpu" else None


@cache
def draws_by_race(device: torch.device) -> bool:
    """Tell whether `torch.multinomial` draws `argmax(p / E)` on a device.

    `E` is exponential noise.
    """
    generator = torch.Generator(device).manual_seed(0)
    p = torch.rand(2, 1000, generator=generator, dtype=torch.float32, device=device).softmax(-1)
    before = generator.get_state()
    tokens, after = torch.multinomial(p, 1, generator=generator)[:, 0], generator.get_state()
    generator.set_state(before)
    noise = torch.empty_like(p).exponential_(generator=generator)
    return torch.equal(tokens, (p / noise).argmax(-1)) and torch.equal(after, generator.get_state())


class SameSeed(Rule):
    """A rule that accepts a drafted child if it is the token that plain decoding draws.

    It is exact for every draft, even one that knows the draw.

    At each step plain decoding draws for all sequences at once. Here they go at their own pace, so
    the generator's state before each step is kept, and each sequence's noise, float32 `(V,)`, until
    it is used. Between draws the generator stands where plain decoding of one sequence has
    it. If something else has moved it, a processor say, all further draws are plain ones.
    """

    in_turn = True

    def begin(self, call: Any, vocab_size: int, generator: torch.Generator | None) -> None:
        """Choose the generator that noise is drawn from, and keep its state.

        That is the call's own, or torch's; if another thread's call uses torch's, a new one. If the
        device does not draw by race, no noise is drawn ahead.
        """
        self.sequences: list[Sequence] = call.sequences
        self.prompt_length, self.vocab_size, self.own = call.begin, vocab_size, generator
        self.device = call.sequences[0].ids.device
        self.generator: torch.Generator | None = None  # while noise is drawn ahead
        self.states: list[Tensor] = []  # of the generator, before each step
        self.state_index = 0  # index of the state that it is in
        # noise that is yet to be used, by step
        self.rows: list[dict[int, Tensor]] = [{} for _ in call.sequences]
        self.lock: RLock | None = None
        self.drawing = Lock()  # drafts may be made in a thread of their own
        default = generator_of(self.device)
        if default is None or not draws_by_race(self.device):
            return
        if generator is None and _in_use[self.device].acquire(blocking=False):
            generator, self.lock = default, _in_use[self.device]
        elif generator is None:  # another thread's call uses torch's own
            generator = torch.Generator(self.device)
            generator.seed()
        self.generator, self.states = generator, [generator.get_state()]

    def end(self) -> None:
        """Let the generator stand where plain decoding leaves it."""
        if self._is_ahead():
            step = max(map(self._step, self.sequences))
            if not all(sequence.finished for sequence in self.sequences):
                step = max(step, self.state_index)
            self.generator.set_state(self.states[step])
        self.generator = None
        if self.lock is not None:
            self.lock.release()
        self.lock = None

    def draw(self, index: int, p: Tensor) -> int:
        """Draw the next token of a sequence as plain decoding draws it from `p`, `(1, V)`."""
        with self.drawing:
            if not self._fits(p):
                return int(torch.multinomial(p, 1, generator=self.own))
            sequence = self.sequences[index]
            step = self._step(sequence)
            race = p[0] / self._noise(index, step)
            token = int(race.argmax())
            if race[token].isnan():
                torch.multinomial(p, 1, generator=self.own)  # says so
            del self.rows[index][step]
            self.state_index = min(
                self._step(other) + (other is sequence)
                for other in self.sequences
                if not other.finished
            )
            self.generator.set_state(self.states[self.state_index])
            return token

    def judge(self, draft: Draft, node: int, scores: Tensor, row: int) -> tuple[int, int | None]:
        """Implement `Rule.judge`."""
        return child_that_is(draft, node, self.draw(row, scores.softmax(-1)))

    def race(self, row: int, length: int, processors: LogitsProcessorList, budget: Any) -> Race:
        """Implement `Rule.race`; the learned odds are kept with the budget."""
        budget.odds = budget.odds or Odds()
        return Race(partial(self.log_noise, row, length), length, processors, budget.odds)

    def draw_together(self, scores: Tensor) -> list[int]:
        """Implement `Rule.draw_together`.

        If the sequences' noise is not known, all tokens are drawn at once, as plain decoding does.
        """
        p = scores.softmax(-1)
        if not self._fits(p):
            return torch.multinomial(p, 1, generator=self.own)[:, 0].tolist()
        tokens = [self.draw(index, row) for index, row in enumerate(p.split(1))]
        self.state_index = self._step(self.sequences[0]) + 1
        self.generator.set_state(self.states[self.state_index])
        return tokens

    def log_noise(self, index: int, length: int, distances: Sequence_[int]) -> Tensor | None:
        """Compute the log noise, float32 `(n, V)`, of a sequence's tokens after a prefix.

        Tokens stand at `distances`, which count from 0; `length` is the prefix's, padding included.
        The result is None where the noise is not known.
        """
        with self.drawing:
            if not distances or not self._is_ahead():
                return None
            steps = [length - self.prompt_length + distance for distance in distances]
            rows = [self._noise(index, step) for step in steps]
        return torch.stack(rows).log()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Implement `Rule.undisturbed`: restore the generator's state after the block."""
        ahead = self._is_ahead()
        yield
        if ahead:
            self.generator.set_state(self.states[self.state_index])

    def _step(self, sequence: Sequence) -> int:
        return sequence.length - self.prompt_length

    def _fits(self, p: Tensor) -> bool:
        """Tell whether draws from `p` take the known noise, and give up on it if not."""
        fits = p.dtype == torch.float32 and p.shape[1] == self.vocab_size and self._is_ahead()
        if not fits:
            self._give_up()
        return fits

    def _is_ahead(self) -> bool:
        """Tell whether noise is or can be known, and give up on it if not.

        It can be if nothing else has drawn from the generator.
        """
        if self.generator is not None and not torch.equal(
            self.generator.get_state(), self.states[self.state_index]
        ):
            self._give_up()
        return self.generator is not None

    def _give_up(self) -> None:
        """Draw plainly from here on.

        If some sequences have used noise ahead of others, these draws come after all noise.
        """
        if self.generator is not None and max(map(self._step, self.sequences)) > self.state_index:
            self.generator.set_state(self.states[-1])
        self.generator = None

    def _noise(self, index: int, step: int) -> Tensor:
        try:
            while step not in self.rows[index]:
                self._draw(min(step, len(self.states) - 1), index)
        finally:
            self.generator.set_state(self.states[self.state_index])
        return self.rows[index][step]

    def _draw(self, step: int, wanted: int) -> None:
        """Draw the noise of a step, for the first time or again.

        A sequence that is yet to use it keeps it.
        """
        self.generator.set_state(self.states[step])
        block = torch.empty(
            (len(self.sequences), self.vocab_size), dtype=torch.float32, device=self.device
        )
        block.exponential_(generator=self.generator)
        if step + 1 == len(self.states):
            self.states.append(self.generator.get_state())
        room = KEPT // (4 * self.vocab_size) - sum(map(len, self.rows))
        for index, sequence in enumerate(self.sequences):
            if sequence.finished:
                self.rows[index].clear()
            if index == wanted or (
                room > 0 and not sequence.finished and self._step(sequence) <= step
            ):
                room -= step not in self.rows[index]
                self.rows[index].setdefault(
                    step, block[index].clone() if len(block) > 1 else block[0]
                )
