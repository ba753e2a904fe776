"""One forward of the target over each sequence's uncached tokens and its draft."""

from __future__ import annotations

from sys import maxsize
from typing import Any

import numpy
import torch
from torch import LongTensor, Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicLayer, PreTrainedModel

from ..names import with_cache
from ..protocol import Draft
from .cache import RaggedCache, replace_layers, stop_recording
from .checks import Refused, context_of
from .compiled import compiled_forward
from .features import Features
from .sequence import Sequence
from .tree_attention import TreeAttention, grouped_heads, tree_shape

# the most tokens that a recurrent state may lack, which are read again with every draft; beyond it
# a round without a draft reads them into the state
MOST_UNREAD = 32
PER_TOKEN = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


def extend_to(length: int, model_kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Extend the per-token inputs to the length of the whole call.

    This is done once, so that a round only slices them.

    New tokens are seen (mask 1), stand at the next positions, and have the last token's type, or
    none of the multimodal ones.

    Args:
        length: the most tokens, the prompt's included.
        model_kwargs: the call's inputs; tensors `(…, prompt length)` among them.
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


class Verifier:
    """The target, which reads each sequence's uncached tokens and then its draft.

    A prompt is read as transformers itself reads it, with a chain after it. Later forwards have
    explicit masks and positions: trees, and sequences of different lengths. If `attention` is
    None, these too are as transformers makes them, for any kind of input, and only one sequence is
    served, with chains.

    Over recurrent states sequences have equally many rows, since a state cannot pass over padding
    within a text: tokens that it lacks, a chain, and padding, after which the state is restored as
    after a rejection.

    Args:
        model: the target.
        model_kwargs: the call's inputs, with the cache.
        per_token: the extended inputs from `extend_to`.
        cache: that cache, row by row.
        begin: the number of the prompt's tokens.
        attention: the maker of masks and positions; None: transformers makes them.
        features: the hidden states that the drafter reads, outputs of a compiled forward.
        row_counts: the numbers of rows that a later forward may have, if it is compiled for these;
            None for as few as are needed.

    Attributes:
        prefix_rows: the number of the last forward's rows that were tokens of a sequence's prefix,
            by sequence; node `i` of its draft is row `prefix_rows + i`.
        reads_prompt: whether the forward that ends the prompt is still to come.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        per_token: dict[str, Tensor],
        cache: RaggedCache,
        begin: int,
        attention: TreeAttention | None,
        features: Features,
        row_counts: list[int] | None = None,
    ):
        self.model, self.model_kwargs, self.per_token = model, model_kwargs, per_token
        self.cache, self.begin = cache, begin
        self.attention, self.row_counts = attention, row_counts
        self.forward = model if row_counts is None else compiled_forward(model, features)
        self.reads_features = bool(features.keys)
        self.last_position = context_of(model) - 1
        self.reads_prompt, self.is_first, self.written = True, True, 0
        self.prefix_rows: list[int] = []
        self.extra: dict[str, Any] | None = None

    @property
    def branches(self) -> bool:
        """Whether drafts may be trees."""
        return self.attention is not None and not self.cache.linear

    def may_draft(self, sequences: list[Sequence]) -> bool:
        """Tell whether drafts of all sequences can be verified now.

        Over recurrent states they are verified neither with the prompt nor with more than
        `MOST_UNREAD` tokens that are read again.
        """
        return not self.cache.linear or (
            not self.reads_prompt and max(self._unread(sequences)) <= MOST_UNREAD
        )

    @property
    def unread(self) -> int:
        """The number of the prompt's tokens that the cache lacks, until it is read."""
        return self.begin - self.cache.lengths[0]

    def _unread(self, sequences: list[Sequence]) -> list[int]:
        """Count the tokens of each sequence that the cache lacks; 0 for an ended one."""
        if not self.cache.linear:  # an accepted path is kept, so that only the newest one is unread
            return [int(not sequence.finished) for sequence in sequences]
        pairs = zip(sequences, self.cache.lengths, strict=True)
        return [0 if sequence.finished else sequence.length - length for sequence, length in pairs]

    def read(self, texts: LongTensor, count: int) -> None:
        """Read the next `count` tokens of texts `(B, n)` of one length, as transformers does."""
        self._run_as_transformers(texts[:, : self.cache.lengths[0] + count], count, 1)
        self.cache.keep([[*range(count)]] * len(texts), count)

    def verify(self, sequences: list[Sequence]) -> Tensor:
        """Run the target over the uncached end of each prefix, and over the drafts.

        Args:
            sequences: the sequences, by their place; their drafts are chains for the forward that
                reads the prompt, or where there are no `branches`.

        Returns:
            Logits `(B, at least N + 1, V)` in the target's dtype, on the ids' device, N being the
            largest draft's nodes: row 0 follows the last known token, row `i + 1` node `i`.
        """
        if self.attention is None or self.reads_prompt:
            logits = self._verify_as_transformers(sequences)
            self.reads_prompt = False
        else:
            logits = self._verify(sequences)
        return logits.to(sequences[0].ids.device)

    def _verify_as_transformers(self, sequences: list[Sequence]) -> Tensor:
        length = sequences[0].length
        texts = [
            torch.cat([sequence.ids[0, :length], sequence.draft.tokens]) for sequence in sequences
        ]
        ids = pad_sequence(texts, batch_first=True)
        size, unread = ids.shape[1] - length, length - self.cache.lengths[0]
        if size:
            self.cache.copy_states()
        logits = self._run_as_transformers(ids, unread + size, size + 1)
        layers = self.cache.cache.layers
        # of an image it is less
        held = [layer.get_seq_length() for layer in layers if type(layer) is DynamicLayer]
        if held and max(held) < ids.shape[1]:
            if unread == length:  # as it was
                replace_layers(self.cache.cache, DynamicLayer)
            raise Refused(
                "Something drops keys from the target's cache (a hook, say), which drafts count "
                "on: generate without."
            )
        self.prefix_rows, self.written = [unread] * len(sequences), unread + size
        return logits[:, -size - 1 :]

    def _run_as_transformers(self, ids: LongTensor, count: int, logits_to_keep: int) -> Tensor:
        """Run the target over the last `count` of `ids` `(B, n)`, and return its logits."""
        length = ids.shape[1]
        inputs = self.model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=None if self.is_first and count == length else count,
            is_first_iteration=self.is_first,
            **{
                **self.model_kwargs,
                **{name: tensor[..., :length] for name, tensor in self.per_token.items()},
            },
        )
        inputs |= with_cache(self.model, self.cache.cache)  # Phi-3's drops an empty one
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = logits_to_keep
            # given an int, Gemma 4's last layers compute only those rows
            if self.reads_features and not self.cache.linear:
                inputs["logits_to_keep"] = torch.arange(
                    count - logits_to_keep, count, device=ids.device
                )
        self.is_first = False
        with grouped_heads(count):
            return self.model(**inputs, return_dict=True).logits

    def _verify(self, sequences: list[Sequence]) -> Tensor:
        drafts, counts = [sequence.draft for sequence in sequences], self._unread(sequences)
        # the forward reads only the newest token, as in plain decoding
        if self.cache.linear and not any(map(len, drafts)):
            self.read_on([sequence.ids[0] for sequence in sequences], [n - 1 for n in counts])
            counts = self._unread(sequences)
        prefixes = [
            sequence.ids[0, sequence.length - count : sequence.length]
            for sequence, count in zip(sequences, counts, strict=True)
        ]
        logits = self._run(prefixes, drafts)
        if not self.cache.linear:
            return logits
        pairs = zip(logits, counts, strict=True)
        return pad_sequence([rows[max(0, count - 1) :] for rows, count in pairs], batch_first=True)

    def _run(self, prefixes: list[LongTensor], drafts: list[Draft], **more: Tensor) -> Tensor:
        """Run the target over each sequence's end of its prefix, its draft, and padding.

        Ends are int64 `(u,)`, of `u` tokens each. `more` are further inputs.

        Returns:
            The target's logits.
        """
        counts = [len(prefix) for prefix in prefixes]
        size = max(
            count + len(draft.row_parents) for count, draft in zip(counts, drafts, strict=True)
        )
        if self.row_counts is not None:
            size = next(count for count in self.row_counts if count >= size)
        ids = torch.zeros((len(prefixes), size), dtype=torch.long, device=prefixes[0].device)
        shapes = []
        for row, (prefix, draft, count) in enumerate(zip(prefixes, drafts, counts, strict=True)):
            ids[row, : count + len(draft)] = torch.cat([prefix, draft.tokens])
            shapes.append(
                tree_shape(
                    [*range(-1, count - 2), *(parent + count - 1 for parent in draft.row_parents)],
                    size,
                )
            )
        if size > 1 or 0 in counts:
            self.cache.copy_states()
        last = numpy.full((len(counts), size), self.last_position)
        # a prefix may go beyond, as in plain decoding
        for row, count in enumerate(counts):
            last[row, :count] = maxsize
        sees, depths = map(numpy.stack, zip(*shapes, strict=True))
        mask, positions = self.attention.inputs(
            self.cache.lengths, sees, depths, self.cache.num_slots, last
        )
        if self.extra is None:
            self.extra = self.model.prepare_inputs_for_generation(
                ids,
                next_sequence_length=size,
                is_first_iteration=False,
                **{**self.model_kwargs, "attention_mask": None},
            )
            for name in ("logits_to_keep", "input_ids", *PER_TOKEN):
                self.extra.pop(name, None)
            self.extra |= with_cache(self.model, self.cache.cache)
        inputs = {**self.extra, "input_ids": ids, "attention_mask": mask, **more}
        inputs |= {"position_ids": positions, "return_dict": True}
        if any(draft.prompt_rows is not None for draft in drafts):
            inputs |= {"input_ids": None, "inputs_embeds": self._embed(ids, counts, drafts)}
        with grouped_heads(size):
            outputs = self.forward(**inputs)
        self.written, self.prefix_rows = size, counts
        return outputs.logits

    def _embed(self, ids: LongTensor, counts: list[int], drafts: list[Draft]) -> Tensor:
        """Embed ids `(B, M)`, with prompt rows' own embeddings in their places.

        Prompt rows stand after the rows of a prefix and the nodes.
        """
        embeddings = self.model.get_input_embeddings()(ids).clone()
        for row, (count, draft) in enumerate(zip(counts, drafts, strict=True)):
            if draft.prompt_rows is not None:
                embeddings[row, count + len(draft) : count + len(draft.row_parents)] = (
                    draft.prompt_rows.embeddings.to(embeddings)
                )
        return embeddings

    def keep(self, paths: list[list[int]]) -> None:
        """Keep the accepted nodes' entries, and drop the rejected ones'.

        Args:
            paths: the accepted nodes to keep of each sequence, from the root down.
        """
        pairs = zip(paths, self.prefix_rows, strict=True)
        entries = [[*range(rows), *(node + rows for node in path)] for path, rows in pairs]
        self.cache.keep(entries, self.written)

    def read_on(self, texts: list[LongTensor], counts: list[int]) -> None:
        """Read the given number of further tokens of each text `(n,)`, in one forward.

        Over recurrent states, texts that lack equally many are read at a time.
        """
        nothing = [Draft.chain(text[:0]) for text in texts]
        runs = [counts]
        if self.cache.linear:
            different = sorted({count for count in counts if count > 0})
            runs = [[count * (lacks == count) for lacks in counts] for count in different]
        for wanted in runs:
            triples = zip(texts, self.cache.lengths, wanted, strict=True)
            new = [text[length : length + some] for text, length, some in triples]
            last = torch.tensor([max(wanted) - 1], device="cpu")
            # their logits are not used
            few = {"logits_to_keep": last} if "logits_to_keep" in self.model_kwargs else {}
            self._run(new, nothing, **few)
            self.cache.keep([[*range(some)] for some in wanted], self.written)

    def finish(self, ids: LongTensor) -> None:
        """Leave the cache as plain decoding does, without the last token of `ids` `(B, n)`.

        It holds all others, and its layers record nothing more.

        After sequences that ended early, it holds the padding that plain decoding reads.
        """
        end = ids.shape[1] - 1
        self.cache.forget([max(0, length - end) for length in self.cache.lengths])
        # a compiled forward or a static cache has no room to spare
        slots = self.cache.num_slots
        if slots is not None:
            self.forward, self.row_counts = self.model, None
        while any(missing := [end - length for length in self.cache.lengths]):
            if self.attention is None:
                self.read(ids, missing[0])
            else:
                most = max(missing) if slots is None else slots - self.cache.end
                self.read_on(list(ids), [min(count, most) for count in missing])
        stop_recording(self.cache.cache)
