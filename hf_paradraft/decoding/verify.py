"""One target forward over the drafts of all rows."""

from typing import Any

import numpy
import torch
from torch import LongTensor, Tensor
from transformers import Cache, PreTrainedModel

from ..protocol import Draft
from .cache import RaggedCache, cache_of_call
from .compiled import compiled_forward
from .features import Features
from .tree_attention import TreeAttention, tree_shape

PER_TOKEN = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


def extend_to(length: int, model_kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The per-token inputs of the whole call, once, so that a round only slices them.

    New tokens are seen (mask 1), stand at the next positions, and have the last token's type, or none of the multimodal ones.

    Args:
        length: tokens at most, prompt included.
        model_kwargs: the call's; tensors `(…, prompt length)` among them.
    """
    extended = {}
    for name in PER_TOKEN:
        if (known := model_kwargs.get(name)) is None:
            continue
        new = known[..., -1:].repeat(*[1] * (known.ndim - 1), length - known.shape[-1])
        if name == "attention_mask":
            new.fill_(1)
        elif name == "position_ids":
            new += torch.arange(1, new.shape[-1] + 1, device=new.device)
        elif name == "mm_token_type_ids":
            new.zero_()
        extended[name] = torch.cat([known, new], dim=-1)
    return extended


def stack(drafts: list[Draft], size: int, device: torch.device) -> LongTensor:
    """Tokens of all drafts, int64 `(B, size)`, padded with 0."""
    tokens = torch.zeros((len(drafts), size), dtype=torch.long, device=device)
    for row, draft in enumerate(drafts):
        tokens[row, : len(draft)] = draft.tokens
    return tokens


class ChainVerifier:
    """The target as transformers itself would call it: any kind of input, but only chains, and after the prompt one row.

    Args:
        model: the target.
        model_kwargs: the call's, with the cache.
        per_token: from `extend_to`.
        begin: tokens of the prompt.
        unread: those of them that the cache lacks.

    Attributes:
        known: rows of the last forward that were known tokens; node `i` of its draft follows as row `known + i`.
    """

    branches = False

    def __init__(
        self, model: PreTrainedModel, model_kwargs: dict[str, Any], per_token: dict[str, Tensor], begin: int, unread: int
    ):
        self.model, self.model_kwargs, self.per_token = model, model_kwargs, per_token
        self.cache: Cache = cache_of_call(model_kwargs)
        self.begin, self.unread, self.first, self.written, self.known = begin, unread, True, 0, 0

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
        """The target over the last `count` of `ids`; its logits."""
        length = ids.shape[1]
        inputs = self.model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=None if self.first and count == length else count,
            is_first_iteration=self.first,
            **{**self.model_kwargs, **{name: tensor[..., :length] for name, tensor in self.per_token.items()}},
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = logits_to_keep
        self.first = False
        return self.model(**inputs, return_dict=True).logits

    def verify(self, buffer: LongTensor, lengths: list[int], drafts: list[Draft]) -> Tensor:
        """Run the target over what its cache lacks: the end of the prefix, and the drafts.

        Args:
            buffer: int64 `(B, …)`, the tokens so far.
            lengths: of the rows; after the first round only one row is served.
            drafts: a chain for each row.

        Returns:
            Logits `(B, N + 1, V)` in the target's dtype, on the buffer's device, N being the longest draft's length.
        """
        size = max(map(len, drafts))
        ids = torch.cat([buffer[:, : lengths[0]], stack(drafts, size, buffer.device)], dim=1)
        logits = self._run(ids, self.unread + size, size + 1)
        self.known, self.unread, self.written = self.unread, 1, size
        return logits[:, -size - 1 :].to(buffer.device)

    def keep(self, paths: list[list[int] | None]) -> None:
        """Drop the rejected tokens' entries.

        Args:
            paths: for each row the accepted nodes to keep: a chain's first ones.
        """
        self.cache.crop(len(paths[0] or []) - self.written)  # also by 0: sliding windows shrink back to their size here


class TreeVerifier:
    """The target with explicit masks and positions: trees, and rows of different lengths.

    Args:
        model: the target.
        model_kwargs: the call's, with the cache.
        cache: that cache, row by row.
        attention: masks.
        features: what the drafter reads, which a compiled forward gives as an output.
        first: does the first forward, over the prompt, in transformers' own way and with chains; None where the prompt is read.
        num_positions: that the model has, if it says; riders behind the last one stand on it, for nobody reads what they guess.
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
        self.written, self.known, self.roots = 0, 0, 0  # roots: known tokens that the cache is yet to keep
        self.extra: dict[str, Any] | None = None

    @property
    def unread(self) -> int:
        """Tokens of the prompt that the cache lacks; 1 behind it: the newest token."""
        return 1 if self.first is None else self.first.unread

    def read(self, buffer: LongTensor, count: int) -> None:
        """As `ChainVerifier.read`."""
        self.first.read(buffer, count)

    def verify(self, buffer: LongTensor, lengths: list[int], drafts: list[Draft]) -> Tensor:
        """As `ChainVerifier.verify`, for trees and ragged rows: row 0 follows the last known token, row `i + 1` node `i`."""
        if self.first is not None:
            logits = self.first.verify(buffer, lengths, drafts)
            self.written, self.known, self.first = self.first.written, self.first.known, None
            return logits
        size = 1 + max(draft.num_rows for draft in drafts)
        if self.row_counts is not None:
            size = next(count for count in self.row_counts if count >= size)
        ids = torch.empty((len(drafts), size), dtype=torch.long, device=buffer.device)
        ids[:, 1:] = stack(drafts, size - 1, buffer.device)
        ids[:, :1] = torch.stack([row[length - 1 : length] for row, length in zip(buffer, lengths, strict=True)])
        shapes = [tree_shape([*draft.parents, *draft.rider_parents], size) for draft in drafts]
        sees, depths = (torch.from_numpy(numpy.stack(part)) for part in zip(*shapes, strict=True))
        mask, positions = self.attention.inputs(self.cache.lengths, sees, depths, self.cache.num_slots)
        if self.num_positions is not None:
            for row, draft in enumerate(drafts):
                positions[row, 1 + len(draft) :].clamp_(max=self.num_positions - 1)
        if self.extra is None:
            self.extra = self.model.prepare_inputs_for_generation(
                ids, next_sequence_length=size, is_first_iteration=False, **{**self.model_kwargs, "attention_mask": None}
            )
            for name in ("logits_to_keep", "input_ids", *PER_TOKEN):
                self.extra.pop(name, None)
        inputs = {"input_ids": ids} if not any(draft.rider_parents for draft in drafts) else self._embed(ids, drafts)
        outputs = self.forward(**{**self.extra, **inputs, "attention_mask": mask, "position_ids": positions, "return_dict": True})
        self.written, self.known, self.roots = size, 1, 1
        return outputs.logits.to(buffer.device)

    def _embed(self, ids: LongTensor, drafts: list[Draft]) -> dict[str, Tensor]:
        """Inputs with the riders' embeddings behind the nodes'."""
        embeddings = self.model.get_input_embeddings()(ids).clone()
        for row, draft in enumerate(drafts):
            if draft.rider_embeddings is not None:
                embeddings[row, 1 + len(draft) : 1 + draft.num_rows] = draft.rider_embeddings.to(embeddings)
        return {"input_ids": None, "inputs_embeds": embeddings}

    def keep(self, paths: list[list[int] | None]) -> None:
        """Keep the accepted nodes' entries, and drop the rejected ones'.

        Args:
            paths: for each row the accepted nodes to keep, from the root down; None for a row that is finished.
        """
        root = range(self.roots)
        kept = [[] if path is None else [*root, *(node + self.roots for node in path)] for path in paths]
        self.cache.keep(kept, self.written)
