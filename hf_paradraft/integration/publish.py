"""Publish whatever drafter a folder holds."""

from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo

from ..drafters import kind_of
from ..drafters.card import card_fields
from ..drafters.formats.folder import DrafterFolder
from ..files import names_folder
from ..hub.push import push_drafter


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
    return push_drafter(saved.path, repo_id, card_fields(kind, saved), **kwargs)
