"""DFlash: a block of masks is filled in one forward, over keys and values made of the target's
hidden states (Chen et al., 2026).

Context features `c_j = norm(W · [h_1[j]; …; h_m[j]])` of every verified token go straight into the
keys and values of all layers: they pass no layer themselves. The block `[newest token, mask, …,
mask]` attends to them, and to itself in both directions.
"""

from __future__ import annotations

from typing import Any, Self

import numpy
import torch
from numpy import ndarray
from torch import LongTensor, Tensor
from transformers import Cache, PreTrainedModel, Qwen3Config

from ...decoding.cache import RaggedCache
from ...decoding.features import layers_of
from ...decoding.tree_attention import TreeAttention, attention_windows
from ...outer_names import apply_rotary_pos_emb
from ...protocol import GuessedLogits, Prefix, SpeculationConfig
from ...protocol.draft import Bias
from ...protocol.drafter import FeatureKey
from ..feature_drafter import FeatureDrafter
from ..formats.fields import BLOCK_LAYOUT
from ..formats.layout import DFLASH
from ..formats.publishers import BLOCK_LAYOUTS, spread
from ..layers import GEMMA4, LLAMA, sizes_of, turns
from ..reading.context import ContextDrafting
from ..reading.network import (
    Mask,
    compiled_method,
    make_room,
    plain_cache,
    ragged_masks,
    run,
    side_by_side,
)
from .config import BlockConfig


class BlockDrafting(ContextDrafting):
    """One call's drafting: a block after the part of each row that the target has read.

    Args:
        drafter: shared with other calls; nothing of it changes.
        config: the options of its use.
        max_length: the most tokens of a row.
    """

    def __init__(self, drafter: Any, config: SpeculationConfig, max_length: int):
        width = config.compiled_width
        super().__init__(drafter, width, width and max_length + width + drafter.config.block_size)

    def guesses(self, newest: LongTensor, prefixes: list[Prefix]) -> list[GuessedLogits]:
        """Implement `ContextDrafting.guesses`, by a block after each row."""
        states = self.model.fill(newest, self.masks, self.cache, self.compiled_width > 0)
        self.cache.keep([[]] * len(prefixes), states.shape[1])
        return [
            self.model.guess(rows, prefix.ids[0, -2:], prefix.room)
            for rows, prefix in zip(states, prefixes, strict=True)
        ]


class DFlashDrafter(FeatureDrafter):
    """A block drafter as `assistant_model`.

    Args:
        config: the drafter's config.
        vocabulary: int64 `(V',)`, the target's ids that it can guess; default: all.
        own_embedding, own_head: whether it has an embedding and a head of its own.
    """

    kind = "dflash"
    config_class = BlockConfig
    config: BlockConfig
    title = DFLASH
    drafts_by = BlockDrafting
    layouts = BLOCK_LAYOUTS
    saved_names = BLOCK_LAYOUT.tensors
    training_options = "DFlashTraining"

    def __init__(
        self,
        config: BlockConfig,
        vocabulary: LongTensor | None = None,
        own_embedding: bool = False,
        own_head: bool = False,
    ):
        self.begin_as(config, vocabulary, own_embedding, own_head)
        self.windows = attention_windows(self.stack)
        if len(self.windows) > 1 and config.layers.model_type == LLAMA:
            raise ValueError(
                f"This {self.title} has layers of Llama with and without windows, which are not "
                "served together."
            )
        self.most_drafts = config.num_drafts
        self.speculation_config = SpeculationConfig(self.most_drafts)
        self.add_parts(config)
        self.eval()

    def add_parts(self, config: BlockConfig) -> None:
        """Add the parts that a kind has in addition to DFlash's.

        Raises:
            ValueError: the config lacks something, or sizes do not fit each other.
        """

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        mask_token_id: int,
        num_layers: int = 2,
        block_size: int = 8,
        num_features: int = 5,
        vocabulary: LongTensor | None = None,
    ) -> Self:
        """Make an untrained drafter attached to `target`, whose masks guess their own places.

        Args:
            target: a decoder-only causal LM.
            mask_token_id: the id in the place of guessed tokens.
            num_layers: the number of its own layers, Qwen3's in the target's sizes.
            block_size: rows of a block, which guesses a token less.
            num_features: layers of the target that it reads, spread evenly.
            vocabulary: int64 `(V',)`, the ids that it guesses; default: all.

        Raises:
            ValueError: options that do not fit the target.
        """
        sizes = mask_token_id, num_layers, block_size, num_features
        return cls._untrained(target, *sizes, vocabulary, fill_in=True)

    @classmethod
    def _untrained(
        cls,
        target: PreTrainedModel,
        mask_token_id: int,
        num_layers: int,
        block_size: int,
        num_features: int,
        vocabulary: LongTensor | None,
        **heads: Any,
    ) -> Self:
        """Make an untrained drafter; `heads` are further fields of its config."""
        text, total = target.config.get_text_config(), len(layers_of(target))
        if not 1 <= num_features <= total:
            raise ValueError(
                f"The target has {total} layers: {num_features} of them cannot be read."
            )
        spread_out = total > 4 or num_features == 1
        chosen = spread(num_features, total) if spread_out else range(num_features)
        config = BlockConfig(
            layers=Qwen3Config(**sizes_of(target), num_hidden_layers=num_layers),
            features=tuple(dict.fromkeys(min(max(0, key), total - 1) for key in chosen)),
            target_hidden_size=text.hidden_size,
            target_layers=total,
            vocab_size=text.vocab_size,
            window_from_anchor=True,
            block_size=block_size,
            mask_token_id=mask_token_id,
            draft_vocab_size=None if vocabulary is None else len(vocabulary),
            **heads,
        )
        return cls(config, vocabulary).started_beside(target)

    @property
    def block(self) -> BlockConfig:
        """The config, by the name that it had up to version 0.3."""
        return self.config

    def empty_context(self, num_slots: int) -> Cache:
        """Make a cache for context features; a static one if `num_slots` are asked for."""
        return plain_cache(self.stack, num_slots)

    def fuse(self, features: dict[FeatureKey, Tensor]) -> Tensor:
        """Compute context features `(…, hidden)` of tokens from the target's hidden states."""
        return self.hidden_norm(self.fc(side_by_side(features, self.features, self)))

    def inject(self, context: Tensor, positions: LongTensor, cache: Cache) -> None:
        """Write keys and values of context features into the cache.

        Args:
            context: `(B, f, hidden)`.
            positions: int64 `(B, f)`.
            cache: grows by f.
        """
        cos, sin = turns(self.stack, context, positions)
        model_type = self.config.layers.model_type
        for index, layer in enumerate(self.stack.layers):
            attention = layer.self_attn
            shape = (*context.shape[:-1], -1, attention.head_dim)
            keys = attention.k_proj(context).view(shape)
            values = keys if attention.v_proj is None else attention.v_proj(context).view(shape)
            if model_type == GEMMA4:
                values = attention.v_norm(values)
            if model_type != LLAMA:
                keys = attention.k_norm(keys)
            keys = keys.transpose(1, 2)
            part = keys[..., : cos.shape[-1]]
            _, turned = apply_rotary_pos_emb(part, part, cos, sin)
            keys = torch.cat([turned, keys[..., cos.shape[-1] :]], dim=-1)
            cache.update(keys, values.transpose(1, 2), index)

    def masks(self, offsets: list[int]) -> dict[str, TreeAttention]:
        """Make the attention masks of each kind of layer.

        `offsets` are the positions that the rows' first cache slots hold.
        """
        windows = dict.fromkeys(self.windows) if self.config.window_from_anchor else self.windows
        return {
            kind: ragged_masks(self, offsets, {kind: window}) for kind, window in windows.items()
        }

    def fill(
        self,
        anchors: LongTensor,
        masks: dict[str, TreeAttention],
        cache: RaggedCache,
        compiled: bool = False,
    ) -> Tensor:
        """Compute states `(B, block size, hidden)` of blocks after their contexts.

        Blocks begin with the newest tokens and go on with masks. Their states are
        `forward_block`'s: normed, unless a kind of drafter says otherwise there.

        Args:
            anchors: int64 `(B,)`, the rows' newest tokens.
            masks: the rows' attention masks, from `masks`.
            cache: the cache of their contexts; grows by the block.
            compiled: whether the forward is, once there is a context.
        """
        size, lengths = self.config.block_size, cache.lengths
        make_room(cache, size)
        ids = torch.full((len(anchors), size), self.config.mask_token_id, device=self.device)
        ids[:, 0] = anchors.to(self.device)
        depths = numpy.arange(size)[None].repeat(len(anchors), axis=0)
        everything: ndarray = numpy.ones((len(anchors), size, size), dtype=bool)
        by_kind: dict[str, Tensor] = {}
        mask: Any
        for kind, attention in masks.items():
            sees = numpy.tril(everything) if kind in self.config.causal else everything
            mask, positions = attention.inputs(lengths, sees, depths, cache.num_slots)
            if self.config.window_from_anchor and (window := self.windows[kind]) is not None:
                begins = torch.tensor(lengths, device=self.device)[:, None] - window
                before = torch.arange(mask.shape[-1], device=self.device) < begins
                mask = mask.masked_fill(before[:, None, None], torch.finfo(self.dtype).min)
            by_kind[kind] = mask
        forward = compiled_method(self.forward_block, compiled and cache.end > 0)
        return forward(ids, mask if len(by_kind) == 1 else by_kind, positions, cache.cache)

    def forward_block(
        self, ids: LongTensor, mask: Mask, positions: LongTensor, cache: Cache
    ) -> Tensor:
        """Compute normed states `(B, block size, hidden)` of tokens; the rest as for `run`."""
        return run(
            self.stack, self.embed(ids) * self.config.embedding_scale, mask, positions, cache
        )

    def guesses(self, states: Tensor) -> Tensor:
        """Select the states of a block that guess, in their order: `(…, drafts, hidden)`."""
        return states[..., 1:, :] if self.config.fill_in else states

    def bias_after(self, text: LongTensor, states: Tensor, logits: Tensor) -> Bias | None:
        """Make the bias of a block's logits after known tokens; None: there is none.

        DFlash's blocks add nothing: kinds with a head that knows the token before do.

        Args:
            text: int64 `(n,)`, the newest tokens, two where there are as many.
            states: `(block size, d)`, the whole block's states.
            logits: `(k, V')`, its guesses' logits before the head.
        """
        return None

    def guess(self, states: Tensor, text: LongTensor, room: int) -> GuessedLogits:
        """Make the guess of one row's block, at most `room` tokens.

        Args:
            states: `(block size, d)`.
            text: int64 `(n,)`, the newest tokens before the block's guesses, two where there are as
                many.
            room: K.
        """
        logits = self.base_logits(self.guesses(states)[:room])
        bias = self.bias_after(text.to(self.device), states, logits)
        return GuessedLogits(logits, self.vocabulary, bias)

    def base_logits(self, states: Tensor) -> Tensor:
        """Compute logits `(…, V')` of states, before any head that looks at the token before."""
        return self.logits(states)[..., : self.num_guesses]
