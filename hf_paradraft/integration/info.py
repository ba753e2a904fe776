"""A description of a folder or repository, from its configs and its tensors' names; weights are not
touched.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HFValidationError, HTTPError
from safetensors.torch import save_file

from ..drafters import kind_of
from ..drafters.drafter import SavedDrafter
from ..drafters.formats.folder import DrafterFolder
from ..drafters.formats.identify import identify
from ..drafters.formats.values import provenance_of
from ..drafters.mtp.model import MtpDrafter
from ..files import names_folder, read_json

WEIGHTS = {"model.safetensors", "model.safetensors.index.json"}


@contextmanager
def _outline(repo_id: str) -> Iterator[Path]:
    """Yield a temporary folder with a repository's config, and its tensors by name alone.

    The names are those that the Hub lists.

    Raises:
        OSError: nothing readable there.
    """
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "outline"
        folder.mkdir()
        try:
            files = HfApi().list_repo_files(repo_id)
            name = next(name for name in ("adapter_config.json", "config.json") if name in files)
            shutil.copy(hf_hub_download(repo_id, name), folder)
            # what was made with this library says itself what it is
            ours = "paradraft" in read_json(folder / name)
            if WEIGHTS & set(files) and not ours:
                weights = HfApi().get_safetensors_metadata(repo_id).files_metadata.values()
                sizes = {
                    name: str(info.parameter_count)
                    for file in weights
                    for name, info in file.tensors.items()
                }
                save_file(
                    {name: torch.empty(0) for name in sizes},
                    folder / "model.safetensors",
                    metadata=sizes,
                )
        except StopIteration:
            raise OSError(
                f"{repo_id} holds no drafter: it has no config.json and no adapter_config.json."
            ) from None
        except (
            HTTPError,
            HFValidationError,
            OSError,
        ) as error:  # no network, no such repository, no such name
            raise OSError(
                f"{repo_id} is neither a folder here nor a drafter that could be fetched from the "
                f"Hub. {error}"
            ) from None
        yield folder


@names_folder
def describe(repo_or_dir: str) -> list[tuple[str, Any]]:
    """Describe a drafter, as (name, value) pairs.

    Args:
        repo_or_dir: a folder, or a Hub id; of a drafter, or of a target that brings MTP layers.

    Raises:
        OSError: nothing readable there.
        ValueError: it is no drafter, or of a kind that is not supported.
    """
    if Path(repo_or_dir).is_dir():
        return _described(DrafterFolder(Path(repo_or_dir)))
    with _outline(repo_or_dir) as folder:
        return _described(DrafterFolder(folder))


def _described(folder: DrafterFolder) -> list[tuple[str, Any]]:
    """Describe a drafter's folder, or that of a target with MTP layers.

    The description is (name, value) pairs.
    """
    try:
        kind = kind_of(folder)
    except ValueError:
        if not (brought := MtpDrafter.describe_target(folder)):
            raise
        return brought
    return describe_kind(kind, folder)


def describe_kind(kind: type[SavedDrafter], folder: DrafterFolder) -> list[tuple[str, Any]]:
    """Describe the folder of a drafter of this kind, as (name, value) pairs.

    The folder's config is enough.
    """
    config = kind.read_description(folder)
    made_for = provenance_of(config)["training"].get("target") or config.get(
        "base_model_name_or_path"
    )
    return [
        ("kind", identify(config, folder.names) or kind.title),
        *kind.details(config, folder.names),
        ("trained for", made_for or "not recorded"),
        ("fits", kind.fits),
    ]
