"""`AutoDrafter`: which drafter is in this folder or repository?"""

from pathlib import Path
from typing import Any

from .drafters import kind_named, kind_of
from .drafters.drafter import load_drafter
from .files import names_folder
from .protocol import Drafter


class AutoDrafter:
    """A loader of any drafter, by what its files say it is; it is never instantiated."""

    def __init__(self):
        raise OSError("AutoDrafter is used through AutoDrafter.from_pretrained(repo_or_dir).")

    @classmethod
    @names_folder
    def from_pretrained(cls, repo_or_dir: str | Path, kind: str | None = None, **kwargs: Any) -> Drafter:
        """Load the drafter in a folder or a Hub repository.

        Args:
            repo_or_dir: a folder, or a Hub id.
            kind: which one it is; default: what its files say. `mtp` takes the layers that a target brings.
            kwargs: as for `AutoModelForCausalLM.from_pretrained` (`dtype`, `device_map`, `revision`, `token`, …).

        Raises:
            OSError: nothing loadable there.
            ValueError: it is no drafter, or of a kind that is not supported; the message says which.
        """
        if kind is not None:
            return kind_named(kind).from_pretrained(repo_or_dir, **kwargs)
        return load_drafter(kind_of, repo_or_dir, kwargs)
