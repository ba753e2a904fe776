"""Muon: momentum whose steps are orthogonalised, for the embedded target's short training (Jordan et al., 2024)."""

import torch
from torch import Tensor


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Push every singular value of `(batch, rows, columns)` matrices towards 1 by a quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon for matrices of the hidden layers; every parameter must be two-dimensional.

    Args:
        params: the matrices; those of one shape are orthogonalised together.
        lr: step size, in units of spectral norm.
        momentum: of the Nesterov average.
        weight_decay: decoupled.
    """

    def __init__(self, params, lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                updates = []
                for parameter in parameters:
                    average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                    average.lerp_(parameter.grad, 1 - group["momentum"])
                    updates.append(parameter.grad.lerp(average, group["momentum"]))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, orthogonalise(torch.stack(updates)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)
