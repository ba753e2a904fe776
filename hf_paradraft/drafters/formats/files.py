"""Files of published drafters: safetensors, pickles read without running anything, tensors' names,
offset tables of vocabularies.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import LongTensor, Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

from ...files import (
    INDEX,
    WHOLE,
    read_json,
    refuse_missing,
    tensor_files,
    tensor_names,
    write_json,
)
from .values import check_dtype, read_config

LEFT_OUT = ("t2d", "d2t", "verifier_norm.weight", "verifier_lm_head.weight")
PICKLES = ("pytorch_model.bin", "warp_model.bin")
SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "top_h",
    "epsilon_cutoff",
    "eta_cutoff",
)


def names_in(folder: Path) -> list[str]:
    """List the names of all tensors of a folder; none where there are no weights."""
    if any(folder.glob("*.safetensors")):
        return tensor_names(folder)
    return list(unpickled(folder / PICKLES[0])) if (folder / PICKLES[0]).exists() else []


def weights_in(folder: Path) -> dict[str, Tensor]:
    """Load all tensors of a folder's safetensors, or of its pickle without running anything.

    Raises:
        OSError: there are none, or a file is damaged, or a pickle of more than tensors.
    """
    if any(folder.glob("*.safetensors")):
        held = tensor_files(folder)
        loaded = {file: load_file(file) for file in {*held.values()}}
        return {name: loaded[file][name] for name, file in held.items()}
    pickle = folder / PICKLES[0]
    if not pickle.exists():
        raise OSError(
            f"{folder} has neither a .safetensors file nor a {pickle.name}: download or save it "
            "again."
        )
    return unpickled(pickle)


def unpickled(file: Path) -> dict[str, Tensor]:
    """Load a pickle of tensors by name, without running anything.

    Raises:
        OSError: it is damaged, or one of something else.
    """
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(loaded, dict) or not all(
            isinstance(tensor, Tensor) for tensor in loaded.values()
        ):
            raise ValueError("it holds more than tensors")
    except Exception as error:  # a foreign pickle fails in many ways
        raise OSError(
            f"{file} holds no weights that can be read safely ({type(error).__name__}): ask its "
            "publisher for safetensors."
        ) from error
    return {str(name): tensor for name, tensor in loaded.items()}


def save_tensors(tensors: Mapping[str, Tensor], file: Path, **metadata: str) -> None:
    """Write tensors as safetensors, wherever they are and however they lie in memory."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(plain, file, metadata=metadata or None)


def pieces_in(index: Path) -> set[str]:
    """Read the names of a model's pieces from its index; a damaged one names none."""
    try:
        named = read_json(index).get("weight_map")
    except OSError:
        return set()
    names = map(str, named.values() if isinstance(named, dict) else ())
    return {name for name in names if re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name)}


def drop_pieces(folder: Path) -> None:
    """Remove an earlier save's index of weights, and the pieces that it names."""
    if (index := folder / INDEX).exists():
        for name in pieces_in(index):
            (folder / name).unlink(missing_ok=True)
        index.unlink()


def drop_older_weights(folder: Path) -> None:
    """Remove the older weights from a folder that has some in one piece and some in several.

    Each save in one piece removes the pieces of a save before, so these are newer if there are any.
    """
    if (whole := folder / WHOLE).exists() and (index := folder / INDEX).exists():
        newer = any((folder / name).exists() for name in pieces_in(index))
        (whole if newer else index).unlink()


def check_width(
    weights: dict[str, Tensor], num_features: int, target_hidden_size: int, title: str
) -> None:
    """Refuse a first matrix that reads another number of features than the config names.

    Raises:
        ValueError: it does.
    """
    width, fc = num_features * target_hidden_size, weights.get("fc.weight")
    if fc is not None and (fc.ndim != 2 or fc.shape[1] != width):
        raise ValueError(
            f"This {title}'s fc reads {fc.shape[-1]} numbers, and {num_features} layers of "
            f"{target_hidden_size} are {width}: its config belongs to another drafter, or names "
            "too few layers."
        )


def check_size(weights: dict[str, Tensor], layers: Any) -> None:
    """Refuse a config of far more weights than there are.

    That happens before a module of that size is made.

    Args:
        weights: all of them.
        layers: their config.

    Raises:
        ValueError: it does.
    """
    described = layers.to_dict()
    inner = described.get("intermediate_size") or 1  # a number, or one for each layer
    wide = max(inner) if isinstance(inner, list) else inner
    wanted = described["num_hidden_layers"] * described["hidden_size"] * wide
    if wanted > 2 * (have := sum(tensor.numel() for tensor in weights.values())):
        raise ValueError(
            f"The config speaks of layers of {wanted:,} weights at least, and the files hold "
            f"{have:,} in all."
        )


def load_strictly(module: nn.Module, tensors: dict[str, Tensor], what: str) -> None:
    """Put all of `tensors` into `module`, in the dtype in which they were saved.

    Raises:
        OSError: some are missing.
        ValueError: some have no place there, or another shape.
    """
    have = module.state_dict()
    if missing := sorted(have.keys() - tensors.keys()):
        raise OSError(
            f"{what} lacks {len(missing)} of its weights ({', '.join(missing[:3])}, …): download "
            "or convert it again."
        )
    if more := sorted(tensors.keys() - have.keys()):
        raise ValueError(
            f"{what} has {len(more)} tensors that have no place in it ({', '.join(more[:3])}, …): "
            "it is a variant."
        )
    for name, tensor in tensors.items():
        if tensor.shape != have[name].shape:
            raise ValueError(
                f"{what}: {name} is {tuple(tensor.shape)}, and its config asks for "
                f"{tuple(have[name].shape)}."
            )
    first = (tensors.get("fc.weight"), *tensors.values())
    module.to(
        next(
            (tensor.dtype for tensor in first if tensor is not None and tensor.is_floating_point()),
            None,
        )
    )
    module.load_state_dict(tensors)


def vocabulary_in(tensors: Mapping[str, Tensor], vocab_size: int) -> LongTensor | None:
    """Compute the target's id of each draft id, int64 `(V',)`; None where no table says it.

    Args:
        tensors: a folder's. Of `d2t`, int64 `(V',)`, draft id `j` is the target's `j + d2t[j]`;
            `t2d`, bool `(V,)`, marks the target's ids that are drafted, if it is there.
        vocab_size: V, if there is no `t2d`.

    Raises:
        ValueError: it is no table of offsets.
    """
    if not len(offsets := tensors.get("d2t", ())):
        return None
    ids, mask = torch.arange(len(offsets)) + offsets.long(), tensors.get("t2d")
    most = vocab_size if mask is None else len(mask)
    if not (ids[1:] > ids[:-1]).all() or ids.min() < 0 or ids.max() >= most:
        raise ValueError(
            "d2t is no table of offsets (the target's id minus the draft's own, rising ids): it "
            "may hold the ids themselves. Subtract arange(len(d2t)) from it."
        )
    if mask is not None and not torch.equal(mask.bool().nonzero()[:, 0], ids):
        raise ValueError(
            "d2t and t2d speak of different tokens: the conversion of this drafter went wrong."
        )
    return ids


def offset_tables(vocabulary: LongTensor, vocab_size: int) -> dict[str, Tensor]:
    """Make the tables `d2t` and `t2d` of a vocabulary, as `vocabulary_in` reads them."""
    ids = vocabulary.cpu()
    return {
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True),
    }


def renamed(tensors: Mapping[str, Any], table: Mapping[str, str]) -> dict[str, Any]:
    """Rename published weights to this library's names.

    Unknown names stay, so that strict loading reports them. Copies of the target's weights and
    tables of the vocabulary are left out.

    Args:
        tensors: the tensors as published.
        table: publishers' prefixes, and ours.
    """
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    return {
        _with_prefix(name, table): tensor for name, tensor in bare.items() if name not in LEFT_OUT
    }


def published(tensors: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    """Rename weights as a publisher does; arguments as for `renamed`."""
    back = {ours: theirs for theirs, ours in table.items()}
    return {_with_prefix(name, back): tensor for name, tensor in tensors.items()}


def _with_prefix(name: str, table: Mapping[str, str]) -> str:
    prefix = next((prefix for prefix in table if name.startswith(prefix)), None)
    return name if prefix is None else table[prefix] + name.removeprefix(prefix)


def neighbours_to_halves(tensors: Mapping[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """Reorder weights for a rotary embedding that turns halves instead of neighbours.

    Their scores stay the same.

    Args:
        tensors: the tensors of a drafter; the rows of each head's queries and keys, and of their
            norms, change places.
        head_dim: numbers of a head.
    """
    order = torch.cat([torch.arange(0, head_dim, 2), torch.arange(1, head_dim, 2)])
    turned = re.compile(r"self_attn\.(q|k)_(proj|norm)\.(weight|bias)$")
    return {
        name: tensor.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)
        if turned.search(name)
        else tensor
        for name, tensor in tensors.items()
    }


def check_tokenizer(folder: Path) -> None:
    """Refuse a folder without a tokenizer's files.

    Raises:
        OSError: the message names the missing ones.
    """
    wanted = ["tokenizer_config.json"]
    others = "tokenizer.json", "tokenizer.model", "vocab.*"
    if not any(any(folder.glob(pattern)) for pattern in others):
        wanted.insert(0, "tokenizer.json")
    if missing := [name for name in wanted if not (folder / name).exists()]:
        raise OSError(f"{folder} has no {', '.join(missing)}: save the tokenizer there again.")


def load_model(folder: Path, **kwargs: Any) -> Any:
    """Load a folder's model of transformers with all of its weights, from safetensors.

    Args:
        folder: the folder with its files.
        kwargs: arguments of `AutoModelForCausalLM.from_pretrained`.

    Raises:
        OSError: weights are missing or damaged.
    """
    tensor_names(folder)
    check_dtype(kwargs.get("dtype", kwargs.get("torch_dtype")))
    always = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
    model, info = AutoModelForCausalLM.from_pretrained(folder, **{**kwargs, **always})
    refuse_missing(info, type(model).__name__, folder)
    return model.eval()


def save_model(model: Any, folder: Path, section: dict[str, Any], **kwargs: Any) -> None:
    """Save a model of transformers, with a section `paradraft` in its config.

    Args:
        model: its own config stays as it is.
        folder: takes its files.
        section: the record of its use.
        kwargs: arguments of `save_pretrained`.
    """
    model.save_pretrained(folder, **kwargs)
    write_json(folder / "config.json", {**read_config(folder), "paradraft": section})


def mend_sampling(config: GenerationConfig) -> None:
    """Remove the sampling options from a greedy config.

    Many models come with some, and transformers does not save them again.
    """
    if not config.do_sample:
        for name in SAMPLING:
            setattr(config, name, None)
