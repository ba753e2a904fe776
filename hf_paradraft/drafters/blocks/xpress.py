"""XPress: DFlash with a refiner, which mixes a block's tokens up to each row and adds a bias to its
logits (2026).

Published engines run the refiner over a whole block a few times, from the best tokens without it
on, until nothing changes. Here each token is chosen before the next is asked for, which is where
those passes end.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import LongTensor, Tensor, nn

from ...protocol.draft import Bias
from ..formats.layout import XPRESS
from .config import BlockConfig
from .model import DFlashDrafter


class Refiner(nn.Module):
    """A head on a block's states and the tokens before them, whose logits are added.

    It computes `a_k = W [D h_k; G mean(h); e(u_k)]` of rank `r`,
    `c_k = a_k + Σ_{j ≤ k} L[k, j] ⊙ a_j`, and a SwiGLU after that.

    Args:
        config: its drafter's config.
        num_guesses: V'.
    """

    def __init__(self, config: BlockConfig, num_guesses: int):
        super().__init__()
        hidden_size, block_size = config.layers.hidden_size, config.block_size
        rank, inner_size = config.refiner_rank, config.refiner_size
        self.token_embed = nn.Embedding(config.vocab_size, rank)
        self.down_h, self.down_g = (nn.Linear(hidden_size, rank, bias=False) for _ in range(2))
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, block_size, block_size))
        self.mlp_gate, self.mlp_up = (nn.Linear(rank, inner_size, bias=False) for _ in range(2))
        self.mlp_down = nn.Linear(inner_size, rank, bias=False)
        self.readout = nn.Linear(rank, num_guesses, bias=False)

    def rows(self, states: Tensor) -> Tensor:
        """Compute the part `[D h; G mean(h)]` of a block's `a` that depends on no tokens.

        It is `(B, 2r)`, of the block's states `(B, d)`.
        """
        mean = states.mean(0, keepdim=True).expand_as(states)
        return torch.cat([self.down_h(states), self.down_g(mean)], dim=-1)

    def enter(self, rows: Tensor, tokens: LongTensor) -> Tensor:
        """Compute `a`, `(n, r)`, from `rows` `(n, 2r)` and the tokens before them.

        Tokens are int64 `(n,)`, in the target's ids.
        """
        inside = tokens.where(tokens < self.token_embed.num_embeddings, 0)
        return self.in_proj(torch.cat([rows, self.token_embed(inside)], dim=-1))

    def forward(self, block: Tensor, places: LongTensor) -> Tensor:
        """Compute the logits `(n, V')` that are added at one place of each block.

        `places` are int64 `(n,)`. Blocks of `a` are `(n, B, r)`, and 0 after these places.
        """
        mixed = torch.einsum("rnj,njr->nr", self.mix_l[:, places], block)
        states = block[torch.arange(len(block), device=block.device), places] + mixed
        return self.readout(
            states + self.mlp_down(F.silu(self.mlp_gate(states)) * self.mlp_up(states))
        )


class XPressDrafter(DFlashDrafter):
    """An XPress drafter as `assistant_model`; arguments as for `DFlashDrafter`.

    Raises:
        ValueError: its config names no refiner.
    """

    kind = "xpress"
    title = XPRESS
    training_options = None

    def add_parts(self, config: BlockConfig) -> None:
        """Implement `DFlashDrafter.add_parts`."""
        if config.refiner_rank < 1:
            raise ValueError(
                "This XPress drafter's config names no xpress_rank: save or download it again."
            )
        self.refiner = Refiner(config, self.num_guesses)

    def bias_after(self, text: LongTensor, states: Tensor, logits: Tensor) -> Bias:
        """Implement `DFlashDrafter.bias_after`: a node's memory is its block's `a` so far."""
        refiner, rows = self.refiner, self.refiner.rows(states)
        first = rows.new_zeros(len(rows), refiner.mix_l.shape[0])
        # the newest token's own row stands after the token before it
        if skipped := int(self.config.fill_in):
            first[0] = refiner.enter(rows[:1], text[:1])[0]

        def bias(
            depths: LongTensor, tokens: LongTensor, memories: list[Any]
        ) -> tuple[Tensor, list[Any]]:
            places = depths.to(rows.device) + skipped
            blocks = torch.stack([first if memory is None else memory for memory in memories])
            blocks[torch.arange(len(blocks), device=blocks.device), places] = refiner.enter(
                rows[places], tokens.to(rows.device)
            )
            return refiner(blocks, places), list(blocks)

        return bias
