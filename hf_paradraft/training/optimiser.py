"""The optimiser of layers after a frozen target: Muon for their projections, AdamW for everything
else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import AdamW, Muon


class MuonAdamW(torch.optim.Optimizer):
    """An optimiser that joins Muon and AdamW, with one learning rate.

    Muon's steps are scaled to AdamW's (arXiv 2502.16982, section 2.2). Projections are matrices
    whose names end in `proj`, as most of transformers' layers have it. Tables, heads, norms and
    what mixes states keep AdamW.

    Args:
        module: what is trained.
        lr: peak learning rate.
        betas, eps: AdamW's.
        weight_decay: of projections.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ):
        projections: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, weight in module.named_parameters():
            if weight.requires_grad:
                (
                    projections if name.endswith("proj.weight") and weight.ndim == 2 else others
                ).append(weight)
        self.parts: list[torch.optim.Optimizer] = []
        if projections:
            self.parts.append(
                Muon(projections, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            )
        if others:
            self.parts.append(AdamW(others, lr=lr, betas=betas, eps=eps, weight_decay=0.0))
        super().__init__([group for part in self.parts for group in part.param_groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step with each optimiser, on the groups and states of this object.

        Schedules and checkpoints know these groups and states.
        """
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
            part.step(closure)
