"""MTP layers among a target's own tensors, of any publisher, and in speculators' folders: found by
names, not by config.
"""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from torch import Tensor

from ...files import INDEX, WHOLE, names_of, read_json, tensor_files

PARTS = {
    "enorm": ("enorm", "pre_fc_norm_embedding", "token_layernorm", "mtp_emb_norm"),
    "hnorm": ("hnorm", "pre_fc_norm_hidden", "hidden_layernorm", "mtp_hidden_norm"),
    "eh_proj": ("eh_proj", "fc", "input_proj", "mtp_linear_proj"),
    "norm": ("shared_head.norm", "norm", "final_layernorm"),
}
SHARED = ("embed_tokens.", "shared_head.head.")  # copies of the target's own
SCALE = "_scale_inv"


@dataclass(frozen=True)
class Naming:
    """A publisher's naming scheme for the tensors of MTP layers.

    Attributes:
        name: the publisher's name.
        prefix: a regular expression of the text before a part; its group is the layer's number.
        hidden_first: the projection reads the state before the embedding.
        numbered_on: layers are numbered on from the target's.
        bare: the layer has no experts, whatever the target has, and no norm stands after it.
    """

    name: str
    prefix: str
    hidden_first: bool = False
    numbered_on: bool = False
    bare: bool = False


NAMINGS = (
    Naming("speculators", r"mtp_layers\.(\d+)\."),
    Naming("MiMo", r"model\.mtp_layers\.(\d+)\.", hidden_first=True),
    Naming(
        "ERNIE", r"model\.(?=mtp_(?:block|emb_norm|hidden_norm|linear_proj)\.(\d+)\.)", bare=True
    ),
    Naming("Qwen", r"(?:model\.)?mtp\.(?:layers\.(\d+)\.)?"),
    Naming(
        "DeepSeek",
        r"(?:language_model\.)?(?:model\.)?(?:language_model\.)?layers\.(\d+)\.",
        numbered_on=True,
    ),
)


@dataclass
class MtpTensors:
    """The MTP layers of a checkpoint.

    Attributes:
        layout: the scheme of their names.
        layers: for each, its tensors' names in the checkpoint by ours: `enorm.weight`,
            `hnorm.weight`, `eh_proj.weight`, `norm.weight`, and `layers.0.…` as transformers names
            a layer's.
    """

    layout: Naming
    layers: list[dict[str, str]]


def mtp_tensors(names: Collection[str], num_layers: int) -> MtpTensors | None:
    """Find the MTP layers among a checkpoint's tensors; None where there are none.

    Args:
        names: the names of all tensors.
        num_layers: L of the target.

    Raises:
        ValueError: there are some in a layout that is not served.
    """
    for layout in NAMINGS:
        layers: dict[int, dict[str, str]] = {}
        for name in names:
            if (match := re.match(layout.prefix, name)) is None:
                continue
            number = int(match[1] or 0) - (num_layers if layout.numbered_on else 0)
            part = name[match.end() :]
            if number >= 0 and not part.startswith(SHARED):
                layers.setdefault(number, {})[_ours(part)] = name
        whole = [layers[number] for number in sorted(layers)]
        parts = {f"{part}.weight" for part in PARTS} - ({"norm.weight"} if layout.bare else set())
        if whole and all(parts <= layer.keys() for layer in whole):
            return MtpTensors(layout, whole)
    if others := [name for name in names if re.search(r"(^|[._])mtp", name)]:
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
        weights: the weights by names as `MtpTensors` has them; the blocks of `X` are multiplied by
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
    name: str, num_layers: int, revision: str | None = None, token: str | bool | None = None
) -> tuple[MtpTensors, dict[str, Tensor]] | None:
    """Load the MTP layers that a model's safetensors bring; None: they bring none.

    Only the files that hold them are fetched.

    Args:
        name: a folder, or a Hub id.
        num_layers: L of the model.
        revision, token: the Hub's, for an id.

    Raises:
        OSError: there are no safetensors, or a file is missing.
        ValueError: they bring layers in a layout that is not served.
    """
    folder = _with_file(name, INDEX, revision, token)
    if (folder / INDEX).exists():
        files = read_json(folder / INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(at, str) for at in files.values()):
            raise ValueError(f"{folder / INDEX} does not say which file holds which tensor.")
    else:
        folder = _with_file(name, WHOLE, revision, token)
        if not (folder / WHOLE).exists():
            raise OSError(f"{name} has no safetensors, in which MTP layers would be looked for.")
        files = dict.fromkeys(names_of(folder / WHOLE), WHOLE)
    if (brought := mtp_tensors(files, num_layers)) is None:
        return None
    wanted = [theirs for layer in brought.layers for theirs in layer.values()]
    tensors: dict[str, Tensor] = {}
    for file in sorted({files[tensor] for tensor in wanted}):
        path = _with_file(name, file, revision, token) / file
        names_of(path)  # a damaged file is refused
        with safe_open(path, framework="pt") as opened:
            tensors |= {
                tensor: opened.get_tensor(tensor) for tensor in wanted if files[tensor] == file
            }
    return brought, tensors


def _with_file(name: str, file: str, revision: str | None, token: str | bool | None) -> Path:
    """Find a folder, or fetch one file of a Hub repository; it may be missing in either."""
    if Path(name).is_dir():
        return Path(name)
    try:
        found = snapshot_download(name, revision=revision, token=token, allow_patterns=file)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise OSError(f"{name} is neither a folder here nor a model on the Hub: {error}") from error
    return Path(found)
