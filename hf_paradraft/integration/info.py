"""What is in this folder or repository? Read from its configs; weights are not touched."""

from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HFValidationError, HTTPError

from ..drafters.kinds import kind_of_folder


def describe(repo_or_dir: str) -> list[tuple[str, Any]]:
    """What there is to say of a drafter, as (name, value) pairs.

    Args:
        repo_or_dir: a folder, or a Hub id.

    Raises:
        OSError: nothing readable there.
        ValueError: it is no drafter, or of a kind that is not supported.
    """
    folder = Path(repo_or_dir)
    if not folder.is_dir():
        try:
            files = HfApi().list_repo_files(repo_or_dir)
            name = next(name for name in ("adapter_config.json", "config.json") if name in files)
            folder = Path(hf_hub_download(repo_or_dir, name)).parent
        except StopIteration:
            raise OSError(f"{repo_or_dir} holds no drafter: it has no config.json and no adapter_config.json.") from None
        except (HTTPError, HFValidationError, OSError) as error:  # no network, no such repository, no such name
            raise OSError(
                f"{repo_or_dir} is neither a folder here nor a drafter that could be fetched from the Hub. {error}"
            ) from None
    return kind_of_folder(folder).describe(folder)
