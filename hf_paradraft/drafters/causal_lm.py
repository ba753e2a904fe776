"""Drafters whose folder is a plain causal LM beside its tokenizer: whether it is whole, loading and publishing it."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from ..files import read_json
from ..hub.card import CardFields
from ..hub.push import push_drafter


def check_files(folder: Path) -> None:
    """Refuse a folder that lacks weights or tokenizer.

    Raises:
        OSError: something is missing.
    """
    index = folder / "model.safetensors.index.json"
    wanted = set(read_json(index)["weight_map"].values()) if index.exists() else {"model.safetensors"}
    wanted.add("tokenizer_config.json")
    if missing := sorted(name for name in wanted if not (folder / name).exists()):
        raise OSError(f"{folder} has no {', '.join(missing)}: save model and tokenizer there again.")


def load_whole(load: Callable[..., Any], name: str, folder: Path, config: PreTrainedConfig, args: tuple, kwargs: dict) -> Any:
    """A model with exactly the weights that lie in a folder, of safetensors alone: pickles may lie beside them.

    Args:
        load: `from_pretrained` of its class.
        name: of that class in transformers.
        folder, config: of the drafter.
        args, kwargs: for `load`.

    Raises:
        OSError: weights are missing.
        ValueError: the config is another class's, or there are weights that the class has no place for.
    """
    if (wanted := config.architectures or []) and wanted[0] != name:
        raise ValueError(
            f"{folder} holds a {wanted[0]}, and its config is that of a {name}: it is no PARD drafter, which is a plain "
            "causal LM."
        )
    drafter, info = load(folder, *args, config=config, output_loading_info=True, **{**kwargs, "use_safetensors": True})
    first = f"The {name} in {folder}"
    if missing := sorted(info["missing_keys"]):
        raise OSError(
            f"{first} lacks {len(missing)} of the model's weights ({', '.join(missing[:3])}, …): the download or the "
            "conversion is incomplete."
        )
    if more := sorted(info["unexpected_keys"]):
        raise ValueError(
            f"{first} has no place for {len(more)} of the model's weights ({', '.join(more[:3])}, …): it is no PARD drafter, or "
            "another kind."
        )
    return drafter


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
