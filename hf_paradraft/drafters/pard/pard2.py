"""PARD-2: a PARD drafter whose input embeddings carry the target's state at the token before
(PARD-2, AMD, 2026).

Token `t` is read as `embed(x_t) + scale · proj(h_{t-1})`, with zeros before the first; the masks
carry the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import LongTensor, Tensor
from transformers import PreTrainedModel

from ...decoding.features import layers_of
from ...protocol.drafter import FeatureKey
from ..causal import CausalRows
from ..formats.files import save_tensors, unpickled
from ..reading.network import side_by_side

FILE, PICKLE = "warp_model.safetensors", "warp_model.bin"


@dataclass
class Projection:
    """The projection of the target's hidden states to additions to the drafter's embeddings.

    Attributes:
        weight: `(hidden, m · d_t)`.
        bias: `(hidden,)` or None.
        scale: the factor of the additions.
        layers: entries of transformers' tuple of hidden states, in order, as the config has them;
            -1 is the normed last state.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    layers: list[int]

    @classmethod
    def read(cls, folder: Path, config: dict[str, Any]) -> Projection:
        """Read the projection of a folder.

        Raises:
            OSError: the file is damaged.
            ValueError: it is missing, and not replaced by anything; or config and weights do not
                fit.
        """
        if (folder / FILE).exists():
            tensors = load_file(folder / FILE)
        elif (folder / PICKLE).exists():
            tensors = unpickled(folder / PICKLE)
        else:
            raise ValueError(
                f"{folder} is a PARD-2 drafter without its projection ({PICKLE}): get that file, "
                "or ask for a drafter that does without the target's hidden states with "
                "target_independent=True."
            )
        layers = config.get("pard2_target_layers", config.get("pard_target_layers"))
        scales = (config.get(name) for name in ("pard2_scale", "pard_scale", "feat_scale"))
        scale = next((value for value in scales if value is not None), 0.02)
        weight = tensors.get("target_proj.weight")
        if not isinstance(layers, list) or not layers or weight is None:
            raise ValueError(
                f"{folder} is a PARD-2 drafter that does not say which layers it reads, or has no "
                "target_proj.weight."
            )
        width = config.get("pard2_target_dim", weight.shape[1])
        if (
            weight.shape[1] != width
            or width % len(layers)
            or set(tensors) - {"target_proj.weight", "target_proj.bias"}
        ):
            raise ValueError(
                f"{folder}: the projection reads {weight.shape[1]} numbers of {len(layers)} "
                f"layers, and the config speaks of {width}."
            )
        return cls(weight, tensors.get("target_proj.bias"), float(scale), layers)

    def save(self, folder: Path) -> None:
        """Write it next to the model, as safetensors."""
        tensors = {"target_proj.weight": self.weight} | (
            {} if self.bias is None else {"target_proj.bias": self.bias}
        )
        save_tensors(tensors, folder / FILE)

    def keys(self, target: PreTrainedModel) -> tuple[FeatureKey, ...]:
        """List the features that it reads of a target.

        Raises:
            ValueError: layers that the target does not have, or hidden states of another size.
        """
        num_layers = len(layers_of(target))
        indices = [index if index >= 0 else num_layers + 1 + index for index in self.layers]
        if not all(0 <= index <= num_layers for index in indices):
            raise ValueError(
                f"This PARD-2 drafter reads hidden states {self.layers}, and the target has "
                f"{num_layers} layers."
            )
        size = self.weight.shape[1] // len(self.layers)
        if (theirs := target.config.get_text_config().hidden_size) != size:
            raise ValueError(
                f"This PARD-2 drafter reads hidden states of {size} numbers, and the target's have "
                f"{theirs}: it was made for another target. "
                "from_pretrained(…, target_independent=True) drafts without them."
            )
        return tuple("normed" if index == num_layers else index - 1 for index in indices)


class ProjectedFeatures(CausalRows):
    """A PARD drafter's texts, with features.

    Args:
        drafter: the causal LM, with its projection.
        target: the model whose features they are.
    """

    reads_features = True

    def __init__(self, drafter: Any, target: PreTrainedModel):
        super().__init__(drafter, [drafter.mask_token_id], drafter.mask_token_id)
        self.projection, self.keys = drafter.projection, drafter.projection.keys(target)
        self.context = None

    def fuse(self, features: dict[FeatureKey, Tensor]) -> Tensor:
        """Compute the additions to embeddings, `(…, hidden)`."""
        projection = self.projection
        states = side_by_side(features, self.keys, self.stack)
        bias = None if projection.bias is None else projection.bias.to(states)
        return projection.scale * torch.nn.functional.linear(
            states, projection.weight.to(states), bias
        )

    def nothing(self, size: int) -> Tensor:
        """Implement `RowModel.nothing`: zeros `(size, hidden)`."""
        shape = size, len(self.projection.weight)
        return torch.zeros(shape, device=self.stack.device, dtype=self.stack.dtype)

    def text(self, ids: LongTensor, fused: Tensor) -> Tensor:
        """Implement `RowModel.text`: embeddings with the projected features added.

        An id without an embedding counts as a mask.
        """
        return self.stack.get_input_embeddings()(super().text(ids, fused)) + fused

    def masks(self, fused: Tensor, count: int) -> Tensor:
        """Implement `RowModel.masks`: mask tokens, which carry the last token's features."""
        ids = torch.full((len(fused), count), self.unknown, device=self.stack.device)
        return self.text(ids, fused[:, None])
