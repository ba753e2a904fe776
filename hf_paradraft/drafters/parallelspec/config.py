"""The config of a ParallelSpec drafter, and of the target that it belongs to."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from accelerate.utils import align_module_device
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ...decoding.features import layers_of
from ..formats.values import transformers_config
from ..layers import describe_layers

STYLES = ("medusa", "eagle")
# Of a layer, what makes its states other ones; some models have no such thing.
SIZES = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "rope_parameters",
)
Style = Literal["medusa", "eagle"]


class ParallelSpecConfig(PreTrainedConfig):
    """One decoder layer of the target's kind, and M masks.

    Args:
        layers: of a target's text config, with as many layers as the drafter has.
        style: `medusa` reads tokens alone, `eagle` the target's normed states too.
        num_masks: M; a forward guesses M + 1 tokens.
        draft_vocab_size: V', where fewer tokens than the target's are guessed.
        fingerprint, layer_fingerprint, target_layers: of the target, from `identity`; older
            drafters have the first one alone.
        kwargs: as for `PreTrainedConfig`.

    Raises:
        ValueError: an unknown style, no masks, or a head of an earlier version.
    """

    model_type = "parallelspec"

    def __init__(
        self,
        layers: dict[str, Any] | None = None,
        style: Style = "medusa",
        num_masks: int = 4,
        draft_vocab_size: int | None = None,
        fingerprint: str | None = None,
        layer_fingerprint: str | None = None,
        target_layers: int | None = None,
        **kwargs: Any,
    ):
        if style not in STYLES:
            raise ValueError(f"style is {style!r}; it has to be one of {', '.join(STYLES)}.")
        if kwargs.pop("markov_rank", 0):
            raise ValueError(
                "This ParallelSpec drafter has a head on the token before, as versions up to 0.3 "
                "made them: train it again."
            )
        if num_masks < 1:
            raise ValueError(
                f"A ParallelSpec drafter needs a mask at least, but num_masks is {num_masks}."
            )
        self.layers, self.style, self.num_masks = dict(layers or {}), style, num_masks
        self.draft_vocab_size, self.fingerprint = draft_vocab_size, fingerprint
        self.layer_fingerprint, self.target_layers = layer_fingerprint, target_layers
        super().__init__(**kwargs)

    @property
    def layer_config(self) -> PreTrainedConfig:
        """Make the config of its layers, as transformers has it.

        Raises:
            ValueError: it has none of them.
        """
        return transformers_config(AutoConfig.for_model, copy.deepcopy(self.layers))

    @property
    def vocab_size(self) -> int:
        """V, of the target."""
        return int(self.layer_config.vocab_size) if self.layers else 0

    @property
    def hidden_size(self) -> int:
        """The width of the target, and of the drafter."""
        return int(self.layer_config.hidden_size)


@torch.no_grad()
def identity(target: PreTrainedModel) -> dict[str, Any]:
    """Identify a target among others of its sizes, by its number of layers and two hashes.

    The hashes are of some weights of the embedding and of the last layer. The hashes are None where
    weights are packed. Layers before the last one are not looked at.
    """
    table, last = target.get_input_embeddings(), layers_of(target)[-1]
    packed = getattr(target.config, "quantization_config", None) is not None
    with align_module_device(table):  # an offloaded target's are fetched
        embedding = _hashed([_numbers(table.weight)])
    return {
        "fingerprint": embedding,
        "layer_fingerprint": None
        if packed
        else _hashed([numbers for part in last.modules() for numbers in _own_numbers(part)]),
        "target_layers": len(layers_of(target)),
    }


def _own_numbers(part: torch.nn.Module) -> list[bytes | None]:
    with align_module_device(part):
        return [_numbers(weight) for weight in part.parameters(recurse=False)]


def _numbers(weight: Tensor) -> bytes | None:
    if weight.is_meta or type(weight.data) is not Tensor or not weight.is_floating_point():
        return None
    sample = weight.detach().flatten()[:: max(1, weight.numel() // 4096)][:4096]
    return sample.to(torch.bfloat16).float().cpu().numpy().tobytes()


def _hashed(numbers: list[bytes | None]) -> str | None:
    present = [number for number in numbers if number is not None]
    return (
        hashlib.sha256(b"".join(present)).hexdigest()[:16] if len(present) == len(numbers) else None
    )


def differences(config: ParallelSpecConfig, target: PreTrainedModel) -> list[str]:
    """List in words how a target differs from the one that a drafter was made for.

    Only facts that are known of both are compared.
    """
    ours, theirs = (
        config.layers,
        describe_layers(
            target.config.get_text_config(decoder=True), config.layer_config.num_hidden_layers
        ),
    )
    differing = [
        f"{name} {ours[name]}, not {theirs[name]}"
        for name in SIZES
        if not _alike(ours.get(name), theirs.get(name))
    ]
    target_identity = identity(target)
    if not _alike(config.target_layers, target_identity["target_layers"]):
        differing.append(f"{config.target_layers} layers, not {target_identity['target_layers']}")
    if not _alike(config.fingerprint, target_identity["fingerprint"]):
        differing.append("another embedding")
    if not _alike(config.layer_fingerprint, target_identity["layer_fingerprint"]):
        differing.append("another last layer")
    return differing


def _alike(value: Any, other: Any) -> bool:
    """Tell whether two values are the same as far as both say something; numbers may be rounded."""
    if value is None or other is None:
        return True
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return all(_alike(value[name], other[name]) for name in value.keys() & other.keys())
    if isinstance(value, int | float) and isinstance(other, int | float):
        return math.isclose(value, other, rel_tol=1e-4)
    return bool(value == other)
