"""MTP layers in files: among a target's own tensors, of any publisher, found by names and not by
config; and in speculators' folders.
"""

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from ...files import INDEX, WHOLE, local_folder, names_of, read_json, tensor_files
from ...outer_names import experts_of
from ..formats.fields import VERSION, layer_config, layer_values
from ..formats.keys import check_described
from ..formats.layout import OwnFields, proposed_tokens
from ..formats.values import transformers_config
from ..layers import describe_layers

T = TypeVar("T")

PARTS = {
    "enorm": ("enorm", "pre_fc_norm_embedding", "token_layernorm", "mtp_emb_norm"),
    "hnorm": ("hnorm", "pre_fc_norm_hidden", "hidden_layernorm", "mtp_hidden_norm"),
    "eh_proj": ("eh_proj", "fc", "input_proj", "mtp_linear_proj"),
    "norm": ("shared_head.norm", "norm", "final_layernorm"),
}
SAVED = {  # of the speculators layout, and ours
    "mtp_layers.0.token_layernorm.": "layers.0.enorm.",
    "mtp_layers.0.hidden_layernorm.": "layers.0.hnorm.",
    "mtp_layers.0.input_proj.": "layers.0.eh_proj.",
    "mtp_layers.0.final_layernorm.": "layers.0.stack.norm.",
    "mtp_layers.0.": "layers.0.stack.layers.0.",
}
SHARED = ("embed_tokens.", "shared_head.head.")  # copies of the target's own
SCALE = "_scale_inv"


@dataclass(frozen=True)
class Naming:
    """A publisher's naming scheme for the tensors of MTP layers.

    Attributes:
        prefix: a regular expression of the text before a part; its group is the layer's number.
        hidden_first: the projection reads the state before the embedding.
        numbered_on: layers are numbered on from the target's.
        bare: the layer has no experts, whatever the target has, and no norm stands after it.
    """

    prefix: str
    hidden_first: bool = False
    numbered_on: bool = False
    bare: bool = False


NAMINGS = {  # by publisher
    "speculators": Naming(r"mtp_layers\.(\d+)\."),
    "MiMo": Naming(r"model\.mtp_layers\.(\d+)\.", hidden_first=True),
    "ERNIE": Naming(
        r"model\.(?=mtp_(?:block|emb_norm|hidden_norm|linear_proj)\.(\d+)\.)", bare=True
    ),
    "Qwen": Naming(r"(?:model\.)?mtp\.(?:layers\.(\d+)\.)?"),
    "DeepSeek": Naming(
        r"(?:language_model\.)?(?:model\.)?(?:language_model\.)?layers\.(\d+)\.",
        numbered_on=True,
    ),
}


class MtpConfig(OwnFields):
    """MTP layers of their target's own class.

    One layer guesses at every step; of several, each at its own.

    Attributes:
        target: the text config of the target that they belong to.
        num_draft_tokens: K as trained, if it is written.
        layout: the publisher whose names the tensors had, of `NAMINGS`.
    """

    target: PreTrainedConfig
    num_draft_tokens: int | None = None
    layout: str = "speculators"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.layout not in NAMINGS:
            raise ValueError(f"layout is {self.layout!r}; one of {', '.join(NAMINGS)} is wanted.")
        super().__post_init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        """V, of the target."""
        return self.target.vocab_size

    @property
    def naming(self) -> Naming:
        """The scheme of the tensors' names, and what it says of the layers."""
        return NAMINGS[self.layout]

    @property
    def layer(self) -> PreTrainedConfig:
        """Make the config of one layer, as transformers has it.

        Raises:
            ValueError: the target has no layers of ordinary attention.
        """
        described = describe_layers(self.target, 1, dense=self.naming.bare)
        experts = experts_of(self.target)  # by which kernel the target runs its own
        return transformers_config(
            AutoConfig.for_model, {**described, "experts_implementation": experts}
        )

    @classmethod
    def from_saved(cls, config: Mapping[str, Any]) -> Self:
        """Read the `config.json` of a layer in speculators' layout.

        Raises:
            ValueError: it describes no layers, or several, or has a key that nothing obeys.
        """
        described = layer_config(config)
        check_described(config, {"num_nextn_predict_layers", "draft_vocab_size"})
        if (count := config.get("num_nextn_predict_layers", 1)) != 1:
            raise ValueError(f"An MTP folder has one layer, and this one speaks of {count}.")
        values = copy.deepcopy(dict(described))
        return cls(
            target=transformers_config(AutoConfig.for_model, values),
            num_draft_tokens=proposed_tokens(config),
        )

    def saved(self, drafter: Any) -> dict[str, Any]:
        """Make the `config.json` of a layer in speculators' layout, which describes the target.

        Raises:
            ValueError: that layout has no place for the layers.
        """
        if self.naming.bare:
            raise ValueError(
                f"Speculators' layout has a norm after the layer, {self.layout}'s none: keep its "
                "own files."
            )
        if len(drafter.layers) > 1:
            raise ValueError(
                f"Speculators' layout has one MTP layer, and this drafter {len(drafter.layers)}: "
                "keep its own files."
            )
        return {
            "speculators_model_type": "mtp",
            "architectures": ["MTPDraftModel"],
            "transformer_layer_config": layer_values(self.target),
            "num_nextn_predict_layers": 1,
            "speculators_version": VERSION,
        }


def mtp_layers(tensors: Mapping[str, T], num_layers: int) -> tuple[str, list[dict[str, T]]] | None:
    """Find the MTP layers among a checkpoint's tensors; None where there are none.

    Args:
        tensors: anything by the names of all tensors.
        num_layers: L of the target.

    Returns:
        The publisher of `NAMINGS`; and for each layer the values of its tensors by our names:
        `enorm.weight`, `hnorm.weight`, `eh_proj.weight`, `norm.weight`, and `layers.0.…` as
        transformers names a layer's.

    Raises:
        ValueError: there are some in a layout that is not served.
    """
    for publisher, naming in NAMINGS.items():
        layers: dict[int, dict[str, T]] = {}
        for name, value in tensors.items():
            if (match := re.match(naming.prefix, name)) is None:
                continue
            number = int(match[1] or 0) - (num_layers if naming.numbered_on else 0)
            part = name[match.end() :]
            if number >= 0 and not part.startswith(SHARED):
                layers.setdefault(number, {})[_ours(part)] = value
        whole = [layers[number] for number in sorted(layers)]
        parts = {f"{part}.weight" for part in PARTS} - ({"norm.weight"} if naming.bare else set())
        if whole and all(parts <= layer.keys() for layer in whole):
            return publisher, whole
    if others := [name for name in tensors if re.search(r"(^|[._])mtp", name)]:
        raise ValueError(
            f"This model's MTP layers have names ({others[0]}, …) of a layout that is not served."
        )
    return None


def _ours(part: str) -> str:
    part = re.sub(r"^(mtp_\w+)\.\d+\.", r"\1.", part)  # ERNIE's layers are numbered there
    for ours, theirs in PARTS.items():
        for name in theirs:
            if part.startswith(f"{name}."):
                return ours + part.removeprefix(name)
    return f"layers.0.{part.removeprefix('mtp_block.')}"


def unscaled(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Dequantise a layer's float8 weights, block by block (DeepSeek-V3, section 3.3).

    They come with a scale for each square block.

    Args:
        weights: the weights by names as `mtp_layers` has them; the blocks of `X` are multiplied by
            `X_scale_inv`.
    """
    plain = {name: weight for name, weight in weights.items() if not name.endswith(SCALE)}
    for name, scales in weights.items():
        if name.endswith(SCALE) and (packed := weights.get(name.removesuffix(SCALE))) is not None:
            weight = packed.float()
            for dim, (size, count) in enumerate(zip(weight.shape, scales.shape, strict=True)):
                block = 2 ** math.ceil(math.log2(size / count))  # 128, the last one cut off
                scales = scales.repeat_interleave(block, dim).narrow(dim, 0, size)
            plain[name.removesuffix(SCALE)] = (weight * scales).to(weights["enorm.weight"].dtype)
    return plain


def parameter_counts(folder: Path) -> dict[str, int]:
    """Count the parameters of each tensor of a folder, from the files' headers."""
    counts: dict[str, int] = {}
    held = tensor_files(folder)
    for file in sorted({*held.values()}):
        with safe_open(file, framework="pt") as opened:
            for name in (name for name in held if held[name] == file):
                counts[name] = math.prod(opened.get_slice(name).get_shape())
    return counts


def brought_layers(
    name: str,
    target: PreTrainedConfig,
    revision: str | None = None,
    token: str | bool | None = None,
) -> tuple[MtpConfig, list[dict[str, Tensor]]] | None:
    """Load the MTP layers that a model's safetensors bring; None: they bring none.

    Only the files that hold them are fetched.

    Args:
        name: a folder, or a Hub id.
        target: the config of the model's text.
        revision, token: the Hub's, for an id.

    Returns:
        The layers' config, and their weights by names as `mtp_layers` has them.

    Raises:
        OSError: there are no safetensors, or a file is missing.
        ValueError: they bring layers in a layout that is not served.
    """

    def with_file(file: str) -> Path:
        return local_folder(name, {"revision": revision, "token": token}, [file]) / file

    if (index := with_file(INDEX)).exists():
        files = read_json(index).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(at, str) for at in files.values()):
            raise ValueError(f"{index} does not say which file holds which tensor.")
    else:
        if not (whole := with_file(WHOLE)).exists():
            raise OSError(f"{name} has no safetensors, in which MTP layers would be looked for.")
        files = dict.fromkeys(names_of(whole), WHOLE)
    brought = mtp_layers({name: name for name in files}, target.num_hidden_layers)
    if brought is None:
        return None
    publisher, layers = brought
    wanted = [theirs for layer in layers for theirs in layer.values()]
    tensors: dict[str, Tensor] = {}
    for file in sorted({files[tensor] for tensor in wanted}):
        names_of(path := with_file(file))  # a damaged file is refused
        with safe_open(path, framework="pt") as opened:
            tensors |= {
                tensor: opened.get_tensor(tensor) for tensor in wanted if files[tensor] == file
            }
    weights = [{ours: tensors[theirs] for ours, theirs in layer.items()} for layer in layers]
    return MtpConfig(target=target, layout=publisher), weights
