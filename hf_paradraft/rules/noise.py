"""The noise of the target's random draws, made before a round, so that drafts can allow for it.

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
from functools import cache
from threading import Lock, RLock

import torch
from torch import Tensor

from ..decoding.sequence import Sequence

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


class Noise:
    """The noise of one call's draws, between `start` and `stop`.

    At each step plain decoding draws for all sequences at once. Here they go at their own pace, so
    the generator's state before each step is kept, and each sequence's noise, float32 `(V,)`, until
    it is used. Between draws the generator stands where plain decoding of one sequence has
    it. If something else has moved it, a processor say, all further draws are plain ones.

    Args:
        sequences: the call's sequences.
        begin: the length of the prompts, padding included.
        vocab_size: V, the number of the target's logits.
        own: the generator of only this call; default: torch's.
    """

    def __init__(
        self,
        sequences: list[Sequence],
        begin: int,
        vocab_size: int,
        own: torch.Generator | None = None,
    ):
        self.sequences, self.begin, self.vocab_size = sequences, begin, vocab_size
        self.device = sequences[0].ids.device
        self.generator: torch.Generator | None = None  # while noise is drawn ahead
        self.own = own
        self.states: list[Tensor] = []  # of the generator, before each step
        self.state_index = 0  # index of the state that it is in
        # noise that is yet to be used, by step
        self.rows: list[dict[int, Tensor]] = [{} for _ in sequences]
        self.lock: RLock | None = None
        self.drawing = Lock()  # drafts may be made in a thread of their own

    def start(self) -> None:
        """Choose the generator that noise is drawn from, and keep its state.

        That is the call's own, or torch's; if another thread's call uses torch's, a new one. If the
        device does not draw by race, no noise is drawn ahead.
        """
        generator = generator_of(self.device)
        if generator is None or not draws_by_race(self.device):
            return
        if self.own is not None:
            generator = self.own
        elif _in_use[self.device].acquire(blocking=False):
            self.lock = _in_use[self.device]
        else:  # another thread's call uses torch's own
            generator = torch.Generator(self.device)
            generator.seed()
        self.generator, self.states = generator, [generator.get_state()]

    def stop(self) -> None:
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
            if bool(race[token].isnan()):
                torch.multinomial(p, 1, generator=self.own)  # says so
            del self.rows[index][step]
            self.state_index = min(
                self._step(other) + (other is sequence)
                for other in self.sequences
                if not other.finished
            )
            self.generator.set_state(self.states[self.state_index])
            return token

    def draw_together(self, p: Tensor) -> list[int]:
        """Draw the next tokens of all sequences, which stand at one length, from `p`, `(B, V)`.

        If their noise is not known, they are drawn at once, as plain decoding does.
        """
        if not self._fits(p):
            return torch.multinomial(p, 1, generator=self.own)[:, 0].tolist()
        tokens = [self.draw(index, row) for index, row in enumerate(p.split(1))]
        self.state_index = self._step(self.sequences[0]) + 1
        self.generator.set_state(self.states[self.state_index])
        return tokens

    def log(self, index: int, length: int, distances: Sequence_[int]) -> Tensor | None:
        """Compute the log noise, float32 `(n, V)`, of a sequence's tokens after a prefix.

        Tokens stand at `distances`, which count from 0; `length` is the prefix's, padding included.
        The result is None where the noise is not known.
        """
        with self.drawing:
            if not distances or not self._is_ahead():
                return None
            rows = [self._noise(index, length - self.begin + distance) for distance in distances]
        return torch.stack(rows).log()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the generator's state after a block in which a drafter may draw."""
        ahead = self._is_ahead()
        yield
        if ahead:
            self.generator.set_state(self.states[self.state_index])

    def _step(self, sequence: Sequence) -> int:
        return sequence.length - self.begin

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
