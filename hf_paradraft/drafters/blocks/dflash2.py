"""DFlash2: DFlash with short convolutions around each part of a layer, and a selector among the
best tokens (z-lab, 2026).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import LongTensor, Tensor, nn

from ...protocol.draft import Bias
from ..formats.layout import DFLASH2
from .config import BlockConfig
from .model import DFlashDrafter


class GroupedConvolution(nn.Module):
    """Two causal convolutions over a block's rows, before and after a part of a layer.

    Their taps depend on the row. Tap `i` of channel `c` is
    `base[i, c] + change[i, c // group_size]`; all changes are projections of the part's input.

    Args:
        config: its drafter's config.
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        size, taps = config.layers.hidden_size, config.conv_kernel_size
        self.group_size = config.conv_group_size
        self.shape = (2, taps, size // self.group_size)
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = nn.Linear(size, math.prod(self.shape), bias=False)

    def forward(self, states: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """Run `part` of a layer between both convolutions.

        Args:
            states: `(B, M, d)`, the part's input; rows begin with their block.
            part: a function of as many rows.
        """
        changes = (
            self.kernel_projection(states)
            .unflatten(-1, self.shape)
            .repeat_interleave(self.group_size, -1)
        )
        before, after = (self.base_kernel + changes).unbind(-3)
        return _convolve(part(_convolve(states, before)), after)


def _convolve(states: Tensor, kernels: Tensor) -> Tensor:
    """Compute the sum over taps `i` of `kernels[…, i, :] · states[i rows before]`.

    States and sum are `(B, M, d)`, kernels `(B, M, taps, d)`.
    """
    taps, rows = kernels.shape[-2], states.shape[1]
    return sum(
        kernels[..., tap, :] * F.pad(states, (0, 0, tap, 0))[:, :rows] for tap in range(taps)
    )


class ConvolvedLayer(nn.Module):
    """A layer of Llama's or Qwen3's form with convolutions around attention and MLP.

    Args:
        layer: the layer whose parts it takes.
        config: its drafter's config.
    """

    def __init__(self, layer: Any, config: BlockConfig):
        super().__init__()
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp
        self.attention_conv, self.mlp_conv = GroupedConvolution(config), GroupedConvolution(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Run the layer on `(B, M, d)`; further arguments are those of its attention."""

        def attention(states: Tensor) -> Tensor:
            return self.self_attn(hidden_states=states, **kwargs)[0]

        states = hidden_states + self.attention_conv(self.input_layernorm(hidden_states), attention)
        return states + self.mlp_conv(self.post_attention_layernorm(states), self.mlp)


class CandidateSelector(nn.Module):
    """A head that scores each of the best tokens v after a token u, from a row's state h.

    The scores are `score(v | u, h) = Σ P[u] ⊙ W h ⊙ S[v]`, of rank `r`.

    Args:
        config: its drafter's config.
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        size, rank = config.vocab_size, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.randn(size, rank) * 0.02)
        self.successor_codebook = nn.Parameter(torch.randn(size, rank) * 0.02)
        self.hidden_projection = nn.Linear(config.layers.hidden_size, rank, bias=False)

    def forward(self, tokens: LongTensor, states: Tensor, candidates: LongTensor) -> Tensor:
        """Score candidates after tokens.

        Args:
            tokens: int64 `(n,)`.
            states: `(n, d)`, the states of the rows that guess the next tokens.
            candidates: int64 `(n, c)`.

        Returns:
            `(n, c)`.
        """
        before = self.predecessor_codebook[tokens] * self.hidden_projection(states)
        return torch.einsum("nr,ncr->nc", before, self.successor_codebook[candidates])


def among_best(
    logits: Tensor, count: int, score: Callable[[LongTensor, LongTensor, LongTensor], Tensor]
) -> Bias:
    """Make the bias of a head that scores each row's best tokens; all others are impossible.

    Args:
        logits: `(k, V)`, a block's logits before the head.
        count: the most tokens that are scored in each row.
        score: makes scores `(n, c)` of rows and of the tokens before them, int64 `(n,)`, and of
            their best tokens, int64 `(n, c)`.
    """
    best = logits.topk(min(count, logits.shape[-1]), dim=-1).indices

    def bias(
        depths: LongTensor, tokens: LongTensor, memories: list[Any]
    ) -> tuple[Tensor, list[Any]]:
        rows = depths.to(best.device)
        scores = score(rows, tokens.to(best.device), best[rows])
        nothing = scores.new_full((len(tokens), logits.shape[-1]), -torch.inf)
        return nothing.scatter(-1, best[rows], scores), [None] * len(tokens)

    return bias


class DFlash2Drafter(DFlashDrafter):
    """A DFlash2 drafter as `assistant_model`; arguments as for `DFlashDrafter`.

    Raises:
        ValueError: it guesses fewer tokens than the target has, or sizes do not fit each other.
    """

    kind = "dflash2"
    title = DFLASH2
    training_options = None

    def add_parts(self, config: BlockConfig) -> None:
        """Implement `DFlashDrafter.add_parts`."""
        taps, group_size = config.conv_kernel_size, config.conv_group_size
        if config.selector_rank < 1:
            raise ValueError(
                "This DFlash2 drafter's config names no selector_rank: save or download it again."
            )
        if self.vocabulary is not None:
            raise ValueError(
                "A DFlash2 drafter selects among all of its target's tokens, and this one guesses "
                "some of them."
            )
        if min(taps, group_size) < 1 or self.hidden_size % group_size:
            raise ValueError(
                f"This DFlash2 drafter's convolutions have {taps} taps and groups of {group_size} "
                f"channels, which do not fit {self.hidden_size} channels: save or download it "
                "again."
            )
        self.stack.layers = nn.ModuleList(
            ConvolvedLayer(layer, config) for layer in self.stack.layers
        )
        self.selector = CandidateSelector(config)

    def bias_after(self, text: LongTensor, states: Tensor, logits: Tensor) -> Bias:
        """Implement `DFlashDrafter.bias_after`: only each row's best tokens are guessed.

        The best are those of the highest logits.
        """
        states = self.guesses(states)

        def score(rows: LongTensor, tokens: LongTensor, candidates: LongTensor) -> Tensor:
            return self.selector(tokens, states[rows], candidates)

        return among_best(logits, self.config.selector_top_k, score)
