"""The config of a ParallelSpec drafter, and of the target that it belongs to."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

import torch
from accelerate.utils import align_module_device
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ...decoding.features import layers_of
from ..formats.values import transformers_config

Style = Literal["medusa", "eagle"]

# keys of `layers` that no drafter obeys: transformers takes the attention that serves its masks
ATTENTION = "attn_implementation", "_attn_implementation"


class ParallelSpecConfig(PreTrainedConfig):
    """One decoder layer of the target's kind, and M masks.

    Args:
        layers: a target's text config, with as many layers as the drafter has.
        style: `medusa` reads only tokens, `eagle` the target's normed states too.
        num_masks: M; a forward guesses M + 1 tokens.
        draft_vocab_size: V', if fewer tokens than the target's are guessed.
        fingerprint, layer_fingerprint, target_layers: the target's, from `identity`; older drafters
            have only the first one.
        kwargs: further arguments of `PreTrainedConfig`.

    Raises:
        ValueError: an unknown style, no masks, or a head of an earlier version.
    """

    model_type = "parallelspec"

    layers: dict[str, Any] | None = None
    style: Style = "medusa"
    num_masks: int = 4
    draft_vocab_size: int | None = None
    fingerprint: str | None = None
    layer_fingerprint: str | None = None
    target_layers: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.style not in (styles := get_args(Style)):
            raise ValueError(f"style is {self.style!r}; it has to be one of {', '.join(styles)}.")
        if kwargs.pop("markov_rank", 0):
            raise ValueError(
                "This ParallelSpec drafter has a head on the token before, as versions up to 0.3 "
                "made them: train it again."
            )
        if self.num_masks < 1:
            raise ValueError(
                f"A ParallelSpec drafter needs a mask at least, but num_masks is {self.num_masks}."
            )
        self.layers = dict(self.layers or {})
        super().__post_init__(**kwargs)

    @property
    def layer_config(self) -> PreTrainedConfig:
        """Make the config of its layers, as transformers has it.

        Raises:
            ValueError: transformers makes no config of them.
        """
        layers = copy.deepcopy(self.layers)
        for name in ATTENTION:
            layers.pop(name, None)
        return transformers_config(AutoConfig.for_model, layers)

    @property
    def vocab_size(self) -> int:
        """V, the target's number of tokens."""
        return self.layer_config.vocab_size if self.layers else 0

    @property
    def hidden_size(self) -> int:
        """The width of the target, and of the drafter."""
        return self.layer_config.hidden_size


@torch.no_grad()
def identity(target: PreTrainedModel) -> dict[str, Any]:
    """Identify a target among others of its sizes, by its number of layers and two hashes.

    The hashes are made of some weights of the embedding and of the last layer, and are None if
    weights are packed. Layers before the last one are not looked at.
    """
    table, layers = target.get_input_embeddings(), layers_of(target)
    packed = getattr(target.config, "quantization_config", None) is not None
    with align_module_device(table):  # an offloaded target's are fetched
        embedding = _hash([table.weight])
    return {
        "fingerprint": embedding,
        "layer_fingerprint": None if packed else _hash(_weights(layers[-1])),
        "target_layers": len(layers),
    }


def _weights(layer: torch.nn.Module) -> Iterator[Tensor]:
    """List a layer's weights, each while it is on its device."""
    for part in layer.modules():
        with align_module_device(part):
            yield from part.parameters(recurse=False)


def _hash(weights: Iterable[Tensor]) -> str | None:
    """Hash some numbers of each weight; None: one of them is packed, or not there."""
    digest = hashlib.sha256()
    for weight in weights:
        if weight.is_meta or type(weight.data) is not Tensor or not weight.is_floating_point():
            return None
        sample = weight.detach().flatten()[:: max(1, weight.numel() // 4096)][:4096]
        digest.update(sample.to(torch.bfloat16).float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def differences(config: ParallelSpecConfig, target: PreTrainedModel) -> list[str]:
    """List in words how a target differs from the one that a drafter was made for.

    Only facts that are known of both are compared.
    """
    theirs = identity(target)
    words = {
        "target_layers": f"{config.target_layers} layers, not {theirs['target_layers']}",
        "fingerprint": "another embedding",
        "layer_fingerprint": "another last layer",
    }
    return [
        sentence
        for name, sentence in words.items()
        if getattr(config, name) not in (None, theirs[name]) and theirs[name] is not None
    ]
