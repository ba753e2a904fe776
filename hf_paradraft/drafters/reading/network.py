"""A network that drafts over a cache of its own: the interface of those that read texts token by
token, their masks, their caches and their compiled forwards.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import LongTensor, Tensor
from torch.utils._pytree import tree_map_only
from transformers import Cache, DynamicCache, PreTrainedModel, StaticLayer

from ...decoding.cache import (
    SLOTS,
    RaggedCache,
    replace_layers,
    static_cache,
    use_plain_layers,
)
from ...decoding.compiled import compiled_on
from ...decoding.tree_attention import TreeAttention
from ...names import with_cache
from ...protocol.drafter import FeatureKey

# an additive mask of all layers, or one for each kind of layer; None: every row sees everything
Mask: TypeAlias = Tensor | dict[str, Tensor] | None


class RowModel(ABC):
    """A network that reads texts token by token, as a `Reader` runs it.

    Attributes:
        stack: the transformer.
        shift: places of a row before its token: 0 where the text's first token is read,
            with nothing before it; 1 where rows begin with the second one.
        reads_features: whether it needs any; if not, a guessed token that became text has been read
            for good.
        extends: whether it goes on from tokens that the engine chose, instead of reading masks.
        vocabulary: int64 `(V',)`, the target's id of each of its own; None: they are the same.
        context: tokens that it has positions for, of which it reads the newer half where a text is
            longer; None: no end is known.
    """

    stack: PreTrainedModel
    shift: int = 0
    reads_features: bool = True
    extends: bool = False
    vocabulary: LongTensor | None = None
    context: int | None = None

    def fuse(self, features: dict[FeatureKey, Tensor]) -> Tensor:
        """Fuse tokens' features to `(f, F)`; by default the normed last state."""
        return features["normed"].to(self.stack.device, self.stack.dtype)

    @abstractmethod
    def text(self, ids: LongTensor, fused: Tensor) -> Tensor:
        """Make inputs `(B, M, hidden)` of tokens `(B, M)`, or ids `(B, M)`.

        `fused`, `(B, M, F)`, holds the features of the tokens before.
        """

    def masks(self, fused: Tensor, count: int) -> Tensor:
        """Make inputs of `count` masks after a text, or of all masks that the model has.

        The text's last row had `fused`, `(B, F)`. The inputs are as those of `text`.
        """
        raise NotImplementedError(f"{type(self).__name__} guesses one token at a time.")

    def logits(self, states: Tensor) -> Tensor:
        """Compute logits `(…, V')` of normed states."""
        raise NotImplementedError(
            f"{type(self).__name__} has no logits(states), and no forward_rows that does without."
        )

    def run(
        self,
        inputs: Tensor,
        mask: Mask,
        positions: LongTensor,
        cache: Cache,
    ) -> tuple[Tensor, Tensor]:
        """Compute the head's input and the next rows' features; the cache grows by M.

        Both are `(B, M, hidden)`; by default the layers' normed output.
        """
        states = run(self.stack, inputs, mask, positions, cache)
        return states, states

    def forward_rows(
        self,
        inputs: Tensor,
        mask: Mask,
        positions: LongTensor,
        cache: Cache,
        count: int,
    ) -> tuple[Tensor, Tensor]:
        """Compute logits `(B, count, V')` of the last `count` rows, and states for nodes.

        The states are `(B, m, hidden)`, of these rows or more.
        """
        normed, fed = self.run(inputs, mask, positions, cache)
        return self.logits(normed[:, -count:]), fed

    def nothing(self, size: int) -> Tensor:
        """Make the features before the first token: zeros `(size, F)`.

        F is 0 if no features are read.
        """
        width = self.stack.config.hidden_size if self.reads_features else 0
        return torch.zeros((size, width), device=self.stack.device, dtype=self.stack.dtype)


def run(
    stack: PreTrainedModel,
    inputs: Tensor,
    mask: Mask,
    positions: LongTensor,
    cache: Cache,
) -> Tensor:
    """Compute normed states `(B, M, hidden)` of `inputs`; `cache` gets their keys and values.

    Args:
        stack: layers from `decoder_stack`.
        inputs: `(B, M, hidden)`.
        mask: a mask from `ragged_masks`.
        positions: int64 `(B, M)`.
        cache: grows by M.
    """
    given = with_cache(stack, cache)
    outputs: Any = stack(
        inputs_embeds=inputs, attention_mask=mask, position_ids=positions, use_cache=True, **given
    )
    return outputs.last_hidden_state


def side_by_side(
    features: Mapping[FeatureKey, Tensor], keys: Iterable[FeatureKey], model: PreTrainedModel
) -> Tensor:
    """Put features by these keys side by side, `(…, width)`, as `model` reads them."""
    return torch.cat([features[key].to(model.device, model.dtype) for key in keys], dim=-1)


def ragged_masks(
    model: PreTrainedModel, offsets: list[int], windows: Mapping[str, int | None]
) -> TreeAttention:
    """Make the masks of rows over a ragged cache whose slot `s` holds position `offsets[row] + s`.

    Args:
        model: the network that attends.
        offsets: the offsets of the rows.
        windows: the window by the kind of layer, as from `attention_windows`.
    """
    nothing = torch.ones((len(offsets), 0), device="cpu")
    lasts = torch.tensor(offsets, device="cpu") - 1
    return TreeAttention(dict(windows), nothing, lasts, model.dtype, model.device)


def last_position(stack: PreTrainedModel) -> int:
    """Find the last position of a stack; positions that turn have no end."""
    turns = any(name.endswith("rotary_emb") for name, _ in stack.named_modules())
    size = getattr(stack.config.get_text_config(), "max_position_embeddings", None)
    return sys.maxsize if turns or size is None else size - 1


def plain_cache(model: PreTrainedModel, num_slots: int = 0) -> Cache:
    """Make an empty cache for a drafter whose layers all keep every token.

    It is a static one where `num_slots` are asked for.
    """
    if num_slots:
        return static_cache(model, num_slots)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    use_plain_layers(cache, 0)
    return cache


def make_room(cache: RaggedCache, count: int) -> None:
    """Make room for `count` entries after the longest row's end in a static cache.

    Longer layers take the place of its own if they have to. Other caches stay as they are.
    """
    if cache.num_slots is None or cache.end + count <= (old_slots := cache.num_slots):
        return
    num_slots = -(-(cache.end + count) // SLOTS) * SLOTS
    old = cache.cache.layers
    replace_layers(cache.cache, partial(StaticLayer, num_slots))
    for layer, longer in zip(old, cache.cache.layers, strict=True):
        if longer is not layer and layer.is_initialized:
            longer.lazy_initialization(layer.keys, layer.values)
            longer.keys[:, :, :old_slots] = layer.keys
            longer.values[:, :, :old_slots] = layer.values
            longer.cumulative_length.copy_(layer.cumulative_length)


def compiled_method(method: Any, compiled: bool) -> Any:
    """Compile a drafter's method as the target's forward is, if `compiled`.

    The method's first argument is a tensor. Its output is copied.
    """
    if not compiled:
        return method

    def forward(*inputs: Any) -> Any:
        outputs = compiled_on(inputs[0].device.type, method.__func__)(method.__self__, *inputs)
        return tree_map_only(Tensor, Tensor.clone, outputs)

    return forward
