"""One target forward over the drafts of all sequences."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import LongTensor, Tensor
from transformers import Cache, PreTrainedModel

from ..names import CACHE_NAMES, DynamicLayer, with_cache
from ..protocol import Draft
from .cache import RaggedCache, cache_of_call, replace_layers, stop_recording
from .checks import Refused, holds_something
from .compiled import compiled_forward
from .features import Features
from .sequence import Sequence
from .tree_attention import TreeAttention, tree_shape

PER_TOKEN = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


def extend_to(length: int, model_kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Extend the per-token inputs to the length of the whole call, once, so that a round only slices them.

    New tokens are seen (mask 1), stand at the next positions, and have the last token's type, or none of the multimodal ones.

    Args:
        length: tokens at most, prompt included.
        model_kwargs: the call's; tensors `(…, prompt length)` among them.
    """
    extended = {}
    for name in PER_TOKEN:
        if (given := model_kwargs.get(name)) is None:
            continue
        new = given[..., -1:].repeat(*[1] * (given.ndim - 1), length - given.shape[-1])
        if name == "attention_mask":
            new.fill_(1)
        elif name == "position_ids":
            new += torch.arange(1, new.shape[-1] + 1, device=new.device)
        elif name == "mm_token_type_ids":
            new.zero_()
        extended[name] = torch.cat([given, new], dim=-1)
    return extended


def stack(drafts: list[Draft], size: int, device: torch.device) -> LongTensor:
    """Stack the tokens of all drafts, int64 `(B, size)`, padded with 0."""
    tokens = torch.zeros((len(drafts), size), dtype=torch.long, device=device)
    for row, draft in enumerate(drafts):
        tokens[row, : len(draft)] = draft.tokens
    return tokens


class ChainVerifier:
    """The target as transformers itself would call it: any kind of input, but only chains, and after the prompt one sequence.

    Args:
        model: the target.
        model_kwargs: the call's, with the cache.
        per_token: from `extend_to`.
        begin: tokens of the prompt.
        unread: those of them that the cache lacks.
        reads_rows: whether somebody reads what the layers give for each row.

    Attributes:
        prefix_rows: of each sequence, rows of the last forward that were tokens of its prefix; node `i` of its draft is row
            `prefix_rows + i`.
    """

    branches = False
    row_counts: list[int] | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        per_token: dict[str, Tensor],
        begin: int,
        unread: int,
        reads_rows: bool = False,
    ):
        self.model, self.model_kwargs, self.per_token = model, model_kwargs, per_token
        self.cache: Cache = cache_of_call(model_kwargs)
        self.begin, self.unread, self.first, self.written = begin, unread, True, 0
        self.reads_rows = reads_rows
        self.prefix_rows: list[int] = []

    @property
    def may_draft(self) -> bool:
        """Whether a draft can be verified now."""
        return True

    def read(self, buffer: LongTensor, count: int) -> None:
        """Read the next `count` tokens of the prompt, and no further."""
        length = self.begin - self.unread + count
        self._run(buffer[:, :length], count, 1)
        self.unread -= count

    def _run(self, ids: LongTensor, count: int, logits_to_keep: int) -> Tensor:
        """Run the target over the last `count` of `ids`, and return its logits."""
        length = ids.shape[1]
        inputs = self.model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=None if self.first and count == length else count,
            is_first_iteration=self.first,
            **{**self.model_kwargs, **{name: tensor[..., :length] for name, tensor in self.per_token.items()}},
        )
        inputs |= with_cache(self.model, self.cache)  # Phi-3's drops an empty one
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = logits_to_keep
            if self.reads_rows:  # of an int Gemma 4's last layers make a few rows alone
                inputs["logits_to_keep"] = torch.arange(count - logits_to_keep, count, device=ids.device)
        self.first = False
        return self.model(**inputs, return_dict=True).logits

    def verify(self, sequences: list[Sequence], drafts: list[Draft]) -> Tensor:
        """Run the target over what its cache lacks: the end of the prefix, and the drafts.

        Args:
            sequences: of one length; after the first round only one sequence is served.
            drafts: a chain for each.

        Returns:
            Logits `(B, N + 1, V)` in the target's dtype, on the ids' device, N being the longest draft's length.
        """
        size, length, device = max(map(len, drafts)), sequences[0].length, sequences[0].ids.device
        ids = torch.cat([torch.cat([sequence.ids[:, :length] for sequence in sequences]), stack(drafts, size, device)], dim=1)
        logits = self._run(ids, self.unread + size, size + 1)
        held = [layer.get_seq_length() for layer in self.cache.layers if type(layer) is DynamicLayer]  # of an image it is less
        if held and max(held) < ids.shape[1]:
            if self.unread == self.begin == length:  # as it was
                replace_layers(self.cache, DynamicLayer)
            raise Refused("Something drops keys from the target's cache (a hook, say), which drafts count on: generate without.")
        self.prefix_rows, self.unread, self.written = [self.unread] * len(sequences), 1, size
        return logits[:, -size - 1 :].to(device)

    def keep(self, paths: list[list[int] | None]) -> None:
        """Drop the rejected tokens' entries.

        Args:
            paths: for each sequence the accepted nodes to keep: a chain's first ones.
        """
        self.cache.crop(len(paths[0] or []) - self.written)  # also by 0: sliding windows shrink back to their size here
        self.written = 0

    def finish(self, ids: LongTensor) -> None:
        """Leave the cache as plain decoding does: it holds all of `ids` `(B, n)` but the last tokens, and records nothing."""
        stop_recording(self.cache)


class TreeVerifier:
    """The target with explicit masks and positions: trees, and sequences of different lengths.

    Args:
        model: the target.
        model_kwargs: the call's, with the cache.
        cache: that cache, sequence by sequence.
        attention: masks.
        features: what the drafter reads, which a compiled forward gives as an output.
        first: does the first forward, over the prompt, in transformers' own way and with chains; None where the prompt is read.
        num_positions: that the model has, if it says; prompt rows behind the last one stand on it: nobody reads their guesses.
        row_counts: how many rows a later forward may have, if it is compiled for these; None for as few as are needed.
    """

    branches = True
    may_draft = True

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        cache: RaggedCache,
        attention: TreeAttention,
        features: Features | None = None,
        first: ChainVerifier | None = None,
        num_positions: int | None = None,
        row_counts: list[int] | None = None,
    ):
        self.model, self.model_kwargs, self.cache, self.attention = model, model_kwargs, cache, attention
        self.first, self.num_positions, self.row_counts = first, num_positions, row_counts
        self.begin = 0 if first is None else first.begin
        self.forward = model if row_counts is None else compiled_forward(model, features)
        self.written, self.roots = 0, 0  # roots: known tokens that the cache is yet to keep
        self.ended: list[bool] = []  # of each sequence of the last forward
        self.prefix_rows: list[int] = []
        self.extra: dict[str, Any] | None = None

    @property
    def unread(self) -> int:
        """Tokens of the prompt that the cache lacks; 1 behind it: the newest token."""
        return 1 if self.first is None else self.first.unread

    def read(self, buffer: LongTensor, count: int) -> None:
        """Implement `ChainVerifier.read`."""
        self.first.read(buffer, count)

    def verify(self, sequences: list[Sequence], drafts: list[Draft]) -> Tensor:
        """Implement `ChainVerifier.verify` for trees: row 0 follows the last known token, row `i + 1` node `i`."""
        if self.first is not None:
            logits = self.first.verify(sequences, drafts)
            self.written, self.prefix_rows, self.first = self.first.written, self.first.prefix_rows, None
            return logits
        self.ended = [sequence.finished for sequence in sequences]
        size, device = 1 + max(len(draft.row_parents) for draft in drafts), sequences[0].ids.device
        if self.row_counts is not None:
            size = next(count for count in self.row_counts if count >= size)
        roots = [sequence.ids[0, sequence.length - 1 : sequence.length] for sequence in sequences]
        ids = torch.cat([torch.stack(roots), stack(drafts, size - 1, device)], dim=1)
        return self._run(ids, drafts).to(device)

    def _run(self, ids: LongTensor, drafts: list[Draft]) -> Tensor:
        """Run the target over each sequence's last known token, its draft and padding, int64 `(B, M)`, and return its logits."""
        size = ids.shape[1]
        shapes = [tree_shape(draft.row_parents, size) for draft in drafts]
        sees, depths = (torch.from_numpy(numpy.stack(part)) for part in zip(*shapes, strict=True))
        mask, positions = self.attention.inputs(self.cache.lengths, sees, depths, self.cache.num_slots)
        if self.num_positions is not None:  # padding and prompt rows, and all rows of a sequence that has ended, are not read
            for row, draft in enumerate(drafts):
                positions[row, 0 if self.ended[row] else 1 + len(draft) :].clamp_(max=self.num_positions - 1)
        if self.extra is None:
            self.extra = self.model.prepare_inputs_for_generation(
                ids, next_sequence_length=size, is_first_iteration=False, **{**self.model_kwargs, "attention_mask": None}
            )
            for name in ("logits_to_keep", "input_ids", *PER_TOKEN):
                self.extra.pop(name, None)
            self.extra |= with_cache(self.model, self.cache.cache)
        inputs = {"input_ids": ids} if all(draft.prompt_rows is None for draft in drafts) else self._embed(ids, drafts)
        outputs = self.forward(**{**self.extra, **inputs, "attention_mask": mask, "position_ids": positions, "return_dict": True})
        self.written, self.prefix_rows, self.roots = size, [1] * len(drafts), 1
        return outputs.logits

    def _embed(self, ids: LongTensor, drafts: list[Draft]) -> dict[str, Tensor]:
        """Make the inputs for drafts with prompt rows: the ids' embeddings, with the prompt rows' own behind the nodes."""
        embeddings = self.model.get_input_embeddings()(ids).clone()
        for row, draft in enumerate(drafts):
            if draft.prompt_rows is not None:
                embeddings[row, 1 + len(draft) : 1 + len(draft.row_parents)] = draft.prompt_rows.embeddings.to(embeddings)
        return {"input_ids": None, "inputs_embeds": embeddings}

    def keep(self, paths: list[list[int] | None]) -> None:
        """Keep the accepted nodes' entries, and drop the rejected ones'.

        Args:
            paths: for each sequence the accepted nodes to keep, from the root down; None for one that is finished.
        """
        root = range(self.roots)
        entries = [[] if path is None else [*root, *(node + self.roots for node in path)] for path in paths]
        self.cache.keep(entries, self.written)
        self.written = 0

    def finish(self, ids: LongTensor) -> None:
        """Implement `ChainVerifier.finish`; after sequences that ended early stands the padding that plain decoding reads."""
        end = ids.shape[1] - 1
        self.cache.forget([max(0, length - end) for length in self.cache.lengths])
        missing = [end - length for length in self.cache.lengths]
        if not any(missing):
            return
        size = max(missing)
        if self.cache.num_slots is not None:  # a compiled forward or a static cache has no room to spare
            self.forward = self.model
        rest = torch.zeros((len(ids), size), dtype=torch.long, device=ids.device)
        self.ended = [False] * len(ids)
        drafts = []
        for row, count in enumerate(missing):
            rest[row, :count] = ids[row, end - count : end]
            drafts.append(Draft.chain(rest[row, 1 : max(1, count)]))
        self._run(rest, drafts)
        self.cache.keep([list(range(count)) for count in missing], size)
        self.written = 0

    def join(self, other: TreeVerifier) -> None:
        """Verify another one's sequences too, behind its own.

        Raises:
            ValueError: one has not read its prompt yet, has a static cache, or inputs beyond ids.
        """
        for verifier in (self, other):
            given = {name for name, value in verifier.model_kwargs.items() if holds_something(value)}
            more = given - {*CACHE_NAMES, "attention_mask", "position_ids", "use_cache", "logits_to_keep"}
            if verifier.first is not None or verifier.row_counts is not None or verifier.cache.num_slots is not None or more:
                raise ValueError(
                    "Sequences join others behind their prompts, in dynamic caches, and with nothing but ids: this call has to "
                    "be served by itself."
                )
        self.cache.join(other.cache)
        self.attention.join(other.attention)

    def select(self, rows: list[int]) -> None:
        """Go on with some of the sequences, in this order; columns that are padding for all of them go."""
        self.cache.select(rows)
        self.cache.crop_left(self.attention.select(rows))
