"""Targets with linear-attention or state-space layers: chains, by putting back a copy of their state.

A recurrent state cannot drop its last tokens. So it is copied before a draft is read; after a rejection the copy comes back, and
the next forward reads the accepted tokens again, in front of its own draft. A few more rows cost little; when too many have
piled up, one round goes without a draft.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import LongTensor, Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin, StaticLayer

from ..hardware import input_device
from ..protocol import Draft
from .states import MOST_UNREAD, copy_states, end_windows, put_back, record_windows
from .verify import ChainVerifier

_continues: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def check_roll_back(cache: Cache) -> None:
    """Refuse caches whose layers cannot be put back.

    Raises:
        ValueError: a static one, or one that has read something already.
    """
    if any(isinstance(layer, StaticLayer) for layer in cache.layers):
        raise ValueError("Static caches beside recurrent layers cannot roll back: leave cache_implementation unset.")
    linear = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    if any(any(layer.has_previous_state.values()) for layer in linear):
        raise ValueError("A recurrent state cannot be continued with a drafter: leave past_key_values unset.")


@torch.no_grad()
def check_continues(model: PreTrainedModel, name: str) -> None:
    """Try once whether `model` reads several tokens behind a state as it reads them one after the other; not all can.

    Args:
        model: a target or a drafter.
        name: of the argument that takes its cache.

    Raises:
        ValueError: it does not.
    """
    if model not in _continues:
        training = model.training
        model.eval()
        try:
            together, alone = (_read_in_parts(model, name, sizes) for sizes in ((4, 4), (4, 1, 1, 1, 1)))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever a model raises that was not written for it
            _continues[model] = False
        else:
            tolerance = 1e-3 if model.dtype == torch.float32 else 0.3  # a forgotten state makes logits that have little in common
            _continues[model] = bool((together - alone).abs().max() < tolerance * together.std())
        finally:
            model.train(training)
    if not _continues[model]:
        raise ValueError(
            f"{type(model).__name__} does not read several tokens behind its recurrent state as it does one by one, so it can "
            "neither verify drafts nor make them: generate without a drafter, or use another one."
        )


def _read_in_parts(model: PreTrainedModel, name: str, sizes: tuple[int, ...]) -> Tensor:
    """Logits `(1, n, V)` float32 of some tokens, read in so large parts."""
    cache = DynamicCache(config=model.config.get_text_config())
    parts = []
    for part in torch.arange(sum(sizes), device=input_device(model))[None].split(sizes, dim=1):
        positions = {"position_ids": part} if name == "past_key_values" else {}
        ids = (part + 1) % model.config.get_text_config().vocab_size
        parts.append(model(ids, use_cache=True, **{name: cache}, **positions).logits.float())
    return torch.cat(parts, dim=1)


class RecurrentVerifier(ChainVerifier):
    """`ChainVerifier` for targets with recurrent layers. The prompt is read without a draft."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.states: list[list[Tensor | None]] = []
        self.reread = 0
        record_windows(self.cache)

    @property
    def may_draft(self) -> bool:
        """Not over the prompt, and not when many accepted tokens wait to be read again."""
        return not self.first and self.unread <= MOST_UNREAD

    def read(self, buffer: LongTensor, count: int) -> None:
        """As `ChainVerifier.read`; nothing of the prompt is taken back."""
        super().read(buffer, count)
        end_windows(self.cache)

    def verify(self, buffer: LongTensor, lengths: list[int], drafts: list[Draft]) -> Tensor:
        """As `ChainVerifier.verify`; the state is copied first."""
        self.reread = self.unread
        if len(drafts[0]):
            self.states = copy_states(self.cache)
        return super().verify(buffer, lengths, drafts)

    def keep(self, paths: list[list[int] | None]) -> None:
        """Keep everything, or put the state back to before this round."""
        accepted = len(paths[0] or [])
        if accepted == self.written:
            end_windows(self.cache)
            return
        put_back(self.cache, self.states, self.reread + self.written)
        self.unread = self.reread + accepted + 1
