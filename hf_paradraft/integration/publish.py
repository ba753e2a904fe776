"""Folders and repositories of drafters: described from configs and tensors' names, published."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitInfo, HfApi, hf_hub_download
from huggingface_hub.errors import HFValidationError, HTTPError

from ..drafters import kind_of
from ..drafters.drafter import SavedDrafter
from ..drafters.formats.folder import DrafterFolder, identify
from ..drafters.formats.values import provenance_of
from ..drafters.mtp.config import parameter_counts
from ..drafters.mtp.model import MtpDrafter
from ..files import INDEX, WHOLE, names_folder, read_json
from ..hub.push import push_drafter

WEIGHTS = {WHOLE, INDEX}


def _fetched(repo_id: str, place: Path) -> tuple[DrafterFolder, dict[str, int]]:
    """Fetch a repository's config into a folder, and look up its tensors.

    Returns:
        The folder with the config and the tensors' names, as the Hub lists them, and the number of
        parameters of each.

    Raises:
        OSError: nothing readable there.
    """
    try:
        files = HfApi().list_repo_files(repo_id)
        name = "adapter_config.json" if "adapter_config.json" in files else "config.json"
        shutil.copy(hf_hub_download(repo_id, name), place)
        # the config of a drafter made with this library says its kind
        ours = "paradraft" in read_json(place / name)
        sizes: dict[str, int] = {}
        if WEIGHTS & set(files) and not ours:
            for file in HfApi().get_safetensors_metadata(repo_id).files_metadata.values():
                sizes |= {name: info.parameter_count for name, info in file.tensors.items()}
    except (
        HTTPError,
        HFValidationError,
        OSError,
    ) as error:  # no network, no such repository, no such name
        raise OSError(
            f"{repo_id} is neither a folder here nor a drafter that could be fetched from the "
            f"Hub. {error}"
        ) from None
    folder = DrafterFolder(place)
    folder.names = list(sizes)
    return folder, sizes


@names_folder
def describe(repo_or_dir: str) -> list[tuple[str, Any]]:
    """Describe a drafter, as (name, value) pairs.

    Args:
        repo_or_dir: a folder, or a Hub id; of a drafter, or of a target that brings MTP layers.

    Raises:
        OSError: nothing readable there.
        ValueError: it is no drafter, or of a kind that is not supported.
    """
    with TemporaryDirectory() as temporary:
        if Path(repo_or_dir).is_dir():
            folder, sizes = DrafterFolder(Path(repo_or_dir)), None
        else:
            folder, sizes = _fetched(repo_or_dir, Path(temporary))
        try:
            kind = kind_of(folder)
        except ValueError:
            sizes = parameter_counts(folder.path) if sizes is None else sizes
            if not (brought := MtpDrafter.describe_target(folder.config, sizes)):
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


@names_folder
def push_folder(folder: str | Path, repo_id: str, **kwargs: Any) -> CommitInfo:
    """Publish the drafter in `folder` with its card, in one commit.

    Args:
        folder: as `save_pretrained` or `paradraft train` wrote it.
        repo_id: `user/name`; made if it does not exist.
        kwargs: `private`, `revision`, `create_pr`, `token`, `commit_message`, `license`, as for
            `push_drafter`.

    Raises:
        OSError: the folder lacks something, or the Hub refused; nothing has been published.
        ValueError: the folder holds no drafter.
    """
    saved = DrafterFolder(Path(folder))
    kind = kind_of(saved)
    kind.check_folder(saved)
    return push_drafter(saved.path, repo_id, kind.card_fields(saved), **kwargs)
