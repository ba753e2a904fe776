"""Where a drafter's files are, and whether they are whole."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def local_folder(repo_or_dir: str | Path, kwargs: dict[str, Any], also: tuple[str, ...] = ()) -> Path:
    """The folder itself, or a downloaded copy of a Hub repository (safetensors only).

    Args:
        repo_or_dir: a folder, or a Hub id `user/name`.
        kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download` and `subfolder` are taken out of it.
        also: more files to download.

    Raises:
        OSError: neither is there.
    """
    hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
    subfolder = kwargs.pop("subfolder", "")
    if Path(repo_or_dir).is_dir():
        return Path(repo_or_dir) / subfolder
    patterns = [f"{subfolder}/{pattern}" if subfolder else pattern for pattern in (*FILES, *also)]
    try:
        return Path(snapshot_download(str(repo_or_dir), allow_patterns=patterns, **hub)) / subfolder
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise OSError(
            f"{repo_or_dir} is neither a folder here nor a model that could be fetched from the Hub: {error}"
        ) from error


def shipped(name: str) -> Path:
    """A folder that lies beside the package in a clone, and inside it where it is installed."""
    inside = Path(__file__).parents[1] / name
    return inside if inside.is_dir() else Path(__file__).parents[2] / name


def read_json(file: Path, kind: type = dict) -> Any:
    """What a JSON file holds.

    Raises:
        OSError: it is missing, not JSON, or JSON of another kind.
    """
    try:
        if not isinstance(found := json.loads(file.read_text(encoding="utf-8")), kind):
            raise ValueError(f"it holds a {type(found).__name__}, not a {kind.__name__}")
        return found
    except FileNotFoundError:
        raise OSError(f"{file.parent} has no {file.name}: it is not a saved model.") from None
    except ValueError as error:
        raise OSError(f"{file} is not valid JSON ({error}): download or save it again.") from None


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of `folder`.

    Raises:
        OSError: it is missing or not JSON.
    """
    return read_json(folder / "config.json")


def check_weights(folder: Path) -> None:
    """Read every safetensors header of `folder`.

    Raises:
        OSError: there are no safetensors, or a file is truncated or damaged.
        ValueError: the tensors belong to another kind of drafter.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise OSError(f"{folder} has no .safetensors file: convert the weights first; pickled weights are not loaded.")
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                names = list(tensors.keys())
        except SafetensorError as error:
            raise OSError(f"{file} is truncated or damaged ({error}): download or save it again.") from None
        if any(name.split(".")[-1] == "mask_hidden" for name in names):
            raise ValueError("This is a P-EAGLE drafter, which reads the target's features; load it in vLLM or SGLang.")
