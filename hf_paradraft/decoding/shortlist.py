"""A head in two steps: a low-rank map chooses a few tokens, and only their logits are computed."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..files import names_of

FILE = "shortlist.safetensors"
RANK, COUNT = 128, 512  # the first step's rank; the number of tokens that it chooses
ROWS = 4  # with more the whole head is faster: its weights are read once for all of them
LEAST = 4096  # the fewest tokens of a head for which it pays


class Shortlist:
    """A low-rank map of a drafter's states by which its likely tokens are chosen.

    Args:
        down, up: `(r, hidden)` and `(hidden, r)`: for `up @ down @ h` a head has nearly the logits
            that it has for a state `h`.
    """

    def __init__(self, down: Tensor, up: Tensor):
        self.down, self.up = down, up

    @classmethod
    def fit(cls, states: Tensor, rows: Tensor) -> Shortlist:
        """Find the map of rank `RANK` with the least squared error of logits.

        The error is taken over a drafter's own states.

        Args:
            states: `(n, hidden)`, normed, as the head reads them.
            rows: `(V', hidden)`, the head's weight.
        """
        states, rows = states.double(), rows.double()
        sizes, axes = torch.linalg.eigh(states.T @ states / len(states))
        least = 1e-3 * float(sizes.mean())  # unseen directions are not blown up
        sizes = sizes.clamp(min=least).sqrt()
        root, inverse = axes * sizes @ axes.T, axes / sizes @ axes.T
        main = torch.linalg.eigh(root @ (rows.T @ rows) @ root).eigenvectors[:, -RANK:]
        return cls((main.T @ inverse).float(), (root @ main).float())

    @classmethod
    def read(cls, folder: Path, hidden_size: int) -> Shortlist | None:
        """Read the shortlist next to a drafter's weights; None: there is none.

        Raises:
            OSError: the file is damaged.
            ValueError: it does not fit the drafter, or has values that are not finite.
        """
        if not (folder / FILE).exists():
            return None
        names_of(folder / FILE)
        tensors = load_file(folder / FILE)
        down, up = tensors.get("down"), tensors.get("up")
        if (
            down is None
            or up is None
            or down.shape != up.T.shape
            or down.ndim != 2
            or down.shape[1] != hidden_size
            or not (down.isfinite().all() and up.isfinite().all())
        ):
            raise ValueError(
                f"{folder / FILE} does not fit states of {hidden_size} finite numbers: remove it, "
                "or save the drafter again."
            )
        return cls(down, up)

    def save(self, folder: Path) -> None:
        """Write the shortlist next to a drafter's weights."""
        save_file({"down": self.down.contiguous(), "up": self.up.contiguous()}, folder / FILE)

    def serves(self, states: Tensor) -> bool:
        """Tell whether the shortlist is faster than the whole head.

        That is so for a few rows on a CPU, and not in a compiled forward.
        """
        few = states.numel() <= ROWS * states.shape[-1]
        return few and states.device.type == "cpu" and not torch.compiler.is_compiling()

    def steps(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Make the first step's two matrices for a head, `(r, hidden)` and `(V', r)`.

        They have the head's dtype.
        """
        return self.down.to(rows), (rows.float() @ self.up.float()).to(rows)


def chosen(
    states: Tensor, steps: tuple[Tensor, Tensor], rows: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Choose each state's `COUNT` most likely tokens, int64 `(n, COUNT)`, and compute their logits.

    Args:
        states: the drafter's states, `(n, hidden)`.
        steps: the matrices from `Shortlist.steps`.
        rows, bias: the head's weight and bias.
    """
    down, up = steps
    near = torch.nn.functional.linear(torch.nn.functional.linear(states, down), up, bias)
    ids = near.topk(min(COUNT, len(rows)), sorted=False).indices
    logits = torch.bmm(rows[ids], states[..., None])[..., 0]
    return ids, logits if bias is None else logits + bias[ids]
