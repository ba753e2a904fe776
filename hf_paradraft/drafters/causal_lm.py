"""Drafters whose folder is a plain causal LM beside its tokenizer: whether it is whole, and publishing it."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..files import read_json
from ..hub.card import CardFields
from ..hub.push import push_drafter


def check_files(folder: Path) -> None:
    """Refuse a folder that lacks weights or tokenizer.

    Raises:
        OSError: something is missing.
    """
    index = folder / "model.safetensors.index.json"
    files = read_json(index).get("weight_map", "") if index.exists() else {"": "model.safetensors"}
    if not isinstance(files, Mapping):
        raise OSError(f"{index} does not say in which file a weight lies (weight_map): save or download it again.")
    wanted = set(files.values())
    wanted.add("tokenizer_config.json")
    if not any(any(folder.glob(pattern)) for pattern in ("tokenizer.json", "tokenizer.model", "vocab.*")):
        wanted.add("tokenizer.json")
    if missing := sorted(name for name in wanted if not (folder / name).exists()):
        raise OSError(f"{folder} has no {', '.join(missing)}: save model and tokenizer there again.")


def push_with_tokenizer(
    drafter: Any,
    repo_id: str,
    tokenizer: PreTrainedTokenizerBase | None,
    check: Callable[[Path], None],
    card: Callable[[Path], CardFields],
    **kwargs: Any,
) -> CommitInfo:
    """Publish weights, configs, tokenizer and card in one commit.

    Args:
        drafter: a `Drafter` with `save_pretrained`.
        repo_id: `user/name`.
        tokenizer: default: the one that lies where the drafter was loaded from.
        check, card: of its kind.
        kwargs: for `push_drafter`.

    Raises:
        OSError: the Hub refused, or there is no tokenizer.
        ValueError: nothing says which tokenizer it is.
    """
    if tokenizer is None and not drafter.name_or_path:
        raise ValueError("This drafter was not loaded from anywhere, so its tokenizer is not known: pass tokenizer=….")
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(drafter.name_or_path, **drafter.found_under, trust_remote_code=False)
    with tempfile.TemporaryDirectory() as folder:
        drafter.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        check(Path(folder))
        return push_drafter(folder, repo_id, card(Path(folder)), **kwargs)
