"""A drafter's folder: its configs and the names of its tensors, each read once, say which kind it
holds.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

from ...files import local_folder, read_json
from .files import PICKLES, names_in
from .identify import identify
from .layout import PARD2
from .values import provenance_of, read_config

# the record lies next to PEFT's own configs
CONFIG, ADAPTER, RECORD = (
    "config.json",
    "adapter_config.json",
    "paradraft.json",
)


class DrafterFolder:
    """A folder with a drafter's files, read when they are asked for, and not again.

    Attributes:
        path: the folder's path.
    """

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def holds(self, name: str) -> bool:
        """Tell whether a file of that name is there."""
        return (self.path / name).exists()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The `config.json`, with checked values; an error where it is missing or damaged."""
        return read_config(self.path)

    @cached_property
    def adapter(self) -> dict[str, Any]:
        """The config that PEFT gives an adapter; an error where it is missing or damaged."""
        return read_json(self.path / ADAPTER)

    @cached_property
    def record(self) -> dict[str, Any]:
        """The record of an adapter, in its folder; empty where there is none."""
        return read_json(self.path / RECORD) if self.holds(RECORD) else {}

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """How it was made, and how to use it, as `config.json` says that."""
        return provenance_of(self.config)

    @cached_property
    def names(self) -> list[str]:
        """The names of all tensors; none where there are no weights."""
        return names_in(self.path)

    @cached_property
    def identified(self) -> str | None:
        """The kind of a published drafter, as `identify` says it."""
        return identify(self.config, self.names) if self.holds(CONFIG) else None


def find_folder(repo_or_dir: str | Path, kwargs: dict[str, Any]) -> DrafterFolder:
    """Find or fetch a drafter's folder, with pickles only where they are needed.

    From the Hub, they are fetched for a drafter without safetensors, as some published ones are,
    and for a PARD-2 drafter's projection.

    Args:
        repo_or_dir: a folder, or a Hub id.
        kwargs: arguments of `local_folder`, which takes its own out.
    """
    hub = dict(kwargs)
    folder = DrafterFolder(local_folder(repo_or_dir, kwargs))
    if Path(repo_or_dir).is_dir() or not folder.holds(CONFIG):
        return folder
    if any(folder.path.glob("*.safetensors")) and identify(folder.config, ()) != PARD2:
        return folder
    return DrafterFolder(local_folder(repo_or_dir, hub, PICKLES))
