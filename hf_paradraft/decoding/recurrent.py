"""Targets with linear-attention or state-space layers: a recurrent state cannot drop its last tokens.

So it is copied before a draft is read; after a rejection the copy comes back, and the next forward reads the accepted tokens
again, in front of its own draft. A few more rows cost little; when too many have piled up, one round goes without a draft.
"""

from typing import Any

import torch
from torch import LongTensor, Tensor

from ..protocol import Draft
from .cache import MOST_UNREAD, copy_states, end_windows, put_back, record_windows, restore_states, select_states
from .sequence import Sequence
from .verify import ChainVerifier, TreeVerifier


class RecurrentVerifier(ChainVerifier):
    """A `ChainVerifier` for targets with recurrent layers. The prompt is read without a draft."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.states: list[list[Tensor | None]] = []
        record_windows(self.cache)

    @property
    def may_draft(self) -> bool:
        """Tell whether this round may draft: not over the prompt, and not when many accepted tokens wait to be read again."""
        return not self.first and self.unread <= MOST_UNREAD

    def read(self, buffer: LongTensor, count: int) -> None:
        """Implement `ChainVerifier.read`; nothing of the prompt is taken back."""
        super().read(buffer, count)
        end_windows(self.cache)

    def verify(self, sequences: list[Sequence], drafts: list[Draft]) -> Tensor:
        """Implement `ChainVerifier.verify`; the state is copied first."""
        if len(drafts[0]):
            self.states = copy_states(self.cache)
        return super().verify(sequences, drafts)

    def keep(self, paths: list[list[int] | None]) -> None:
        """Keep everything, or put the state back to before this round."""
        accepted = len(paths[0] or [])
        if accepted == self.written:
            end_windows(self.cache)
            return
        put_back(self.cache, self.states, self.prefix_rows[0] + self.written)
        self.unread, self.written = self.prefix_rows[0] + accepted + 1, 0

    def finish(self, ids: LongTensor) -> None:
        """Implement `ChainVerifier.finish`; accepted tokens that were taken back with rejected ones are read again."""
        if self.unread > 1:
            self._run(ids[:, :-1], self.unread - 1, 1)
            self.unread = 1
        end_windows(self.cache)
        super().finish(ids)


class RecurrentBatchVerifier(TreeVerifier):
    """Chains over the states of several sequences. The prompts are read without a draft.

    A recurrent layer cannot pass over padding within a text, so all sequences have equally many rows of a forward: tokens that a
    state lacks, the draft, and tokens that are not meant, behind which the sequence's state comes back as behind a rejection.
    """

    branches = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.states: list[list[Tensor | None]] = []
        self.sequences: list[Sequence] = []
        self.whole: list[int] = []  # accepted nodes of each sequence behind which its state may stay

    @property
    def may_draft(self) -> bool:  # type: ignore[override]
        """Implement `RecurrentVerifier.may_draft`."""
        return self.first is None and max(self._missing(), default=1) <= MOST_UNREAD

    def _missing(self) -> list[int]:
        """Count the tokens that the state of each sequence lacks; 0 for one that has ended."""
        pairs = zip(self.sequences, self.cache.lengths, strict=False)
        return [0 if sequence.finished else sequence.length - length for sequence, length in pairs]

    def verify(self, sequences: list[Sequence], drafts: list[Draft]) -> Tensor:
        """Implement `ChainVerifier.verify`, for sequences of different lengths."""
        self.sequences, self.ended = sequences, [sequence.finished for sequence in sequences]
        if self.first is not None:
            return super().verify(sequences, drafts)
        if not any(map(len, drafts)):  # plain decoding goes on with the newest token alone
            self._read(torch.cat([sequence.ids for sequence in sequences]), [count - 1 for count in self._missing()])
        missing = self._missing()
        size = max(count + len(draft) for count, draft in zip(missing, drafts, strict=True))
        ids = torch.zeros((len(sequences), size), dtype=torch.long, device=sequences[0].ids.device)
        for row, (sequence, count, draft) in enumerate(zip(sequences, missing, drafts, strict=True)):
            ids[row, :count] = sequence.ids[0, sequence.length - count : sequence.length]
            ids[row, count : count + len(draft)] = draft.tokens
        if size > 1 or 0 in missing:
            self.states = copy_states(self.cache.cache)
        logits = self._run(ids, [Draft.chain(row[1:]) for row in ids])
        self.prefix_rows, self.roots = missing, 0
        self.whole = [size - count for count in missing]
        behind = torch.arange(1 + max(map(len, drafts)), device=logits.device)
        last = torch.tensor(missing, device=logits.device).clamp(min=1)[:, None] - 1
        return logits[torch.arange(len(ids), device=logits.device)[:, None], (last + behind).clamp(max=size - 1)]

    def keep(self, paths: list[list[int] | None]) -> None:
        """Keep all that a sequence has read, or nothing of it."""
        if not self.whole:
            return super().keep(paths)
        back = [row for row, (path, whole) in enumerate(zip(paths, self.whole, strict=True)) if path is None or len(path) < whole]
        self._keep(set(back))

    def _keep(self, back: set[int]) -> None:
        if back:
            restore_states(self.cache.cache, self.states, sorted(back))
        entries = [[] if row in back else [*range(self.written)] for row in range(len(self.cache.lengths))]
        self.cache.keep(entries, self.written)
        self.written = 0

    def _read(self, texts: LongTensor, counts: list[int]) -> None:
        """Read so many tokens more of each text, int64 `(B, n)`: sequences that lack equally many at a time."""
        for count in sorted({count for count in counts if count > 0}):
            rows = [row for row, lacks in enumerate(counts) if lacks == count]
            ids = texts.new_zeros((len(texts), count))
            for row in rows:
                ids[row] = texts[row, self.cache.lengths[row] :][:count]
            self.states = copy_states(self.cache.cache)
            self._run(ids, [Draft.chain(row[1:]) for row in ids])
            self._keep({*range(len(texts))} - {*rows})

    def finish(self, ids: LongTensor) -> None:
        """Implement `TreeVerifier.finish`."""
        self.ended = [False] * len(ids)
        self._read(ids, [ids.shape[1] - 1 - length for length in self.cache.lengths])

    def join(self, other: TreeVerifier) -> None:
        """Refuse another verifier's sequences: recurrent layers are served one call at a time.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{type(self.model).__name__} has recurrent layers and is served one call at a time.")

    def select(self, rows: list[int]) -> None:
        """Implement `TreeVerifier.select`."""
        super().select(rows)
        select_states(self.cache.cache, rows)
