"""`AutoDrafter`: which drafter is in this folder or repository?"""

from pathlib import Path
from typing import Any

from .drafters.pard import PardDrafter
from .drafters.ppd.drafter import PpdDrafter
from .integration.files import local_folder


class AutoDrafter:
    """Loads any drafter by what its files say it is; it is never instantiated."""

    def __init__(self):
        raise OSError("AutoDrafter is used through AutoDrafter.from_pretrained(repo_or_dir).")

    @classmethod
    def from_pretrained(cls, repo_or_dir: str | Path, *args: Any, **kwargs: Any) -> PardDrafter | PpdDrafter:
        """Load the drafter in a folder or a Hub repository.

        Args:
            repo_or_dir: a folder, or a Hub id.
            args, kwargs: as for `AutoModelForCausalLM.from_pretrained` (`dtype`, `device_map`, `revision`, `token`, …).

        Raises:
            OSError: nothing loadable there.
            ValueError: it is no drafter, or of a kind that is not supported; the message says which.
        """
        folder = local_folder(repo_or_dir, kwargs)
        if (folder / "adapter_config.json").exists():
            return PpdDrafter.from_pretrained(folder, *args, **kwargs)
        drafter = PardDrafter.from_pretrained(folder, *args, **kwargs)
        drafter.name_or_path = drafter.config._name_or_path = str(repo_or_dir)
        return drafter
