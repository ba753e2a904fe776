"""Files: a folder or a copy of a Hub repository, its JSON, its rows, the headers of its weights;
writing whole or not at all.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from pathlib import Path
from shutil import copymode
from typing import Any, ParamSpec, TypeVar
from uuid import uuid4

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    StrictDataclassError,
)
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open

P = ParamSpec("P")
T = TypeVar("T")
HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
# The files that a user of a drafter needs; others in its folder are not published.
PUBLISHED = (
    "config.json", "generation_config.json", "adapter_config.json", "paradraft.json", "bench.json",
    "README.md", "LICENSE",
    "model.safetensors", "model-*.safetensors", "model.safetensors.index.json",
    "adapter_model.safetensors",
    "warp_model.safetensors", "shortlist.safetensors",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt",
)  # fmt: skip
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
# loaded with the weights where they lie next to them
EXTRAS = "warp_model.safetensors", "shortlist.safetensors"
DEEPEST = 64  # levels of JSON; writing it recurses
FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def local_folder(
    repo_or_dir: str | Path, kwargs: dict[str, Any], files: Iterable[str] = FILES
) -> Path:
    """Find the folder itself, or download a copy of a Hub repository (safetensors only).

    Args:
        repo_or_dir: a folder, or a Hub id `user/name`.
        kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download` and
            `subfolder` are taken out of it.
        files: patterns of the files to download.

    Raises:
        OSError: neither is there.
    """
    hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
    subfolder = kwargs.pop("subfolder", None) or ""
    if Path(repo_or_dir).is_dir():
        return Path(repo_or_dir) / subfolder
    patterns = [f"{subfolder}/{pattern}" if subfolder else pattern for pattern in files]
    nested = f"{subfolder}/*/*" if subfolder else "*/*"  # other checkpoints of the repository
    try:
        copied = snapshot_download(
            str(repo_or_dir), allow_patterns=patterns, ignore_patterns=nested, **hub
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise OSError(
            f"{repo_or_dir} is neither a folder here nor a model that could be fetched from the "
            f"Hub: {error}"
        ) from error
    return Path(copied) / subfolder


def names_folder(load: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function that loads, so that its errors name the folder or repository.

    A message that names it already stays as it is. Weights of other sizes than their config's, a
    config's numbers that are none, and unknown arguments are a ValueError then.

    Args:
        load: a function of a folder, or of a class and a folder.
    """

    @wraps(load)
    def loaded(*args: P.args, **kwargs: P.kwargs) -> T:
        given = [*(value for value in args if not isinstance(value, type)), *kwargs.values()]
        name = str(kwargs.get("repo_or_dir") or given[0])
        try:
            return load(*args, **kwargs)
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} has a file that is no text in UTF-8: {error}") from error
        except (OSError, ValueError) as error:
            # "drafter" is a word, too
            named = str(error).startswith(name) or (os.sep in name and name in str(error))
            if len(error.args) == 1 and not named:
                error.args = (f"{name}: {error}",)
            raise
        except (StrictDataclassError, AssertionError) as error:
            raise ValueError(f"{name}: {error}") from error
        except TypeError as error:
            _, unknown, argument = str(error).partition("unexpected keyword argument ")
            if not unknown:
                raise
            raise ValueError(f"{name}: from_pretrained does not know {argument}.") from error
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise ValueError(
                f"{name}: the weights have other sizes than the config says; one is another "
                "model's."
            ) from error

    return loaded


def hub_name(name: str | None) -> str | None:
    """Return `name` if it can be a repository on the Hub, else None.

    A folder's path gives None: it means nothing to anyone else.
    """
    if not isinstance(name, str) or "/" not in name or Path(name).exists():
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def shipped(name: str) -> Path:
    """Find a folder that comes with the package.

    It lies next to the package in a clone, and inside it where it is installed.
    """
    inside = Path(__file__).parent / name
    return inside if inside.is_dir() else Path(__file__).parents[1] / name


def share_weights(folder: Path) -> None:
    """Give a folder's weights the permissions of the config next to them.

    Otherwise only their owner may read them, as safetensors writes them.
    """
    if (config := next(folder.glob("*config.json"), None)) is not None:
        for file in folder.glob("*.safetensors"):
            copymode(config, file)


def parse_json(text: str) -> Any:
    """Parse JSON that came from elsewhere.

    Raises:
        ValueError: it is not JSON, or is nested too deeply.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Refuse JSON that is nested too deeply to be written again.

    Raises:
        ValueError: it is.
    """
    parts = [value]
    for _ in range(DEEPEST):
        held = [part for part in parts if isinstance(part, dict | list)]
        parts = [*chain(*(part.values() if isinstance(part, dict) else part for part in held))]
    if parts:
        raise ValueError(f"it is nested {DEEPEST} levels deep, or more")


def read_json(file: Path, kind: type = dict) -> Any:
    """Read a JSON file.

    Raises:
        OSError: it is missing, not JSON, or JSON of another kind.
    """
    try:
        if not isinstance(content := parse_json(file.read_text(encoding="utf-8-sig")), kind):
            raise ValueError(f"it holds a {type(content).__name__}, not a {kind.__name__}")
        return content
    except FileNotFoundError:
        raise OSError(f"{file.parent} has no {file.name}: it is not a saved model.") from None
    except ValueError as error:
        raise OSError(f"{file} is not valid JSON ({error}): download or save it again.") from None


def tensor_files(folder: Path) -> dict[str, Path]:
    """Find the file that holds each tensor of a folder, as transformers finds it.

    Of files in several pieces the index decides, and files that it does not name are not read: one
    of an older epoch may lie there. An index none of whose pieces is left says nothing:
    transformers leaves it if a whole file takes their place.

    Raises:
        OSError: there are no safetensors, a piece is missing, or a file is truncated or damaged.
    """
    files, indexed = {*folder.glob("*.safetensors")}, (index := folder / INDEX).exists()
    if indexed:
        if not isinstance(named := read_json(index).get("weight_map"), dict):
            raise OSError(
                f"{index} does not say in which file a weight lies (weight_map): save or download "
                "it again."
            )
        files = {folder / str(name) for name in named.values()}
    if (whole := folder / WHOLE).exists() and not (
        indexed and any(file.exists() for file in files)
    ):
        files = {whole}
    if not files:
        raise OSError(
            f"{folder} has no .safetensors file: convert the weights first; pickled weights are "
            "not loaded."
        )
    if missing := sorted(
        file.name for file in files if not file.is_file() or file.parent != folder
    ):
        raise OSError(
            f"{folder} lacks {', '.join(missing)}, which {INDEX} names: download or save it again."
        )
    return {name: file for file in sorted(files) for name in names_of(file)}


def names_of(file: Path) -> list[str]:
    """Read the names of a safetensors file's tensors from its header.

    Raises:
        OSError: it is missing, truncated or damaged.
    """
    if not file.exists():
        raise OSError(
            f"{file.parent} has no .safetensors file {file.name}: download or save it again."
        )
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except SafetensorError as error:
        raise OSError(
            f"{file} is truncated or damaged ({error}): download or save it again."
        ) from None


def check_whole(file: Path) -> None:
    """Refuse a file of weights or of a JSON object that is damaged.

    Raises:
        OSError: it is.
    """
    if file.suffix == ".safetensors":
        names_of(file)
    elif file.suffix == ".json" and file.name != "bench.json":  # which holds rows
        read_json(file)


def tensor_names(folder: Path) -> list[str]:
    """List the names of all tensors of a folder, from headers.

    Raises:
        OSError: as for `tensor_files`.
    """
    return list(tensor_files(folder))


def rows_of(source: str | Path, split: str) -> Iterator[dict[str, Any]]:
    """Read the rows of a JSON-lines file, or of a Hub dataset.

    A dataset is given as `ID`, `ID:CONFIG` or `ID:CONFIG:SPLIT`.

    Args:
        source: the file or dataset.
        split: the split of a dataset that names none.

    Raises:
        OSError: there is no such file or dataset.
        ValueError: a line that is no JSON object.
    """
    check_rows_there(source)
    name = str(source)
    if Path(source).exists() and not Path(source).is_dir():  # a pipe too
        return _lines(Path(source))
    from datasets import load_dataset  # an extra

    name, config, named = (*name.split(":"), "", "")[:3]
    try:
        return iter(load_dataset(name, config or None, split=named or split))
    except Exception as error:  # datasets raises errors of many kinds
        raise OSError(
            f"{source} is neither a file here nor a dataset that could be fetched: {error}"
        ) from error


def check_rows_there(source: str | Path | None) -> None:
    """Refuse a JSON-lines file that is not there, before anything is loaded.

    None means that no rows are wanted.

    Raises:
        OSError: it is not there.
    """
    if str(source).endswith((".json", ".jsonl")) and not Path(str(source)).exists():
        raise OSError(f"There is no file {source}.")


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    try:
        text = file.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not JSON lines: it is packed, or no text in UTF-8 ({error})."
        ) from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = parse_json(line)
            except ValueError as error:
                raise ValueError(f"{file} is not JSON lines: line {number}: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{file}, line {number}: wanted an object, but found {row!r:.60}.")
            yield row


def refuse_missing(info: dict[str, Any], name: str, folder: str | Path) -> None:
    """Refuse a model some of whose weights were not there: they would be random numbers.

    Args:
        info: from `from_pretrained(…, output_loading_info=True)`.
        name, folder: the name of its class, and its folder.

    Raises:
        OSError: weights are missing.
    """
    if missing := sorted(info["missing_keys"]):
        raise OSError(
            f"The {name} in {folder} lacks {len(missing)} of the model's weights "
            f"({', '.join(missing[:3])}, …): the download or the conversion is incomplete."
        )


def other_settings(made: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """List the settings in which a run differs from a stopped one, as a part of a sentence.

    It is "" if all are the same.

    Args:
        made: the settings of the stopped run.
        settings: the settings of the run that is to go on with it.
    """
    names = [name for name in sorted({*made, *settings}) if made.get(name) != settings.get(name)]
    return "; ".join(f"{name}: {made.get(name)} there, {settings.get(name)} now" for name in names)


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `file` after the block, whole or not at all."""
    temporary = file.with_name(f".{file.name}.{uuid4().hex}.new")
    try:
        yield temporary
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(file: Path, text: str) -> None:
    """Write a text file."""
    with whole(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(file: Path, value: Any) -> None:
    """Write a JSON file."""
    write_whole(file, json.dumps(value, indent=2) + "\n")
