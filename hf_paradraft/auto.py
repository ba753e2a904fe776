"""`AutoDrafter`: which drafter is in this folder or repository, and which one fits this target?"""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import PreTrainedModel
from transformers.utils import logging

from .drafters import kind_named, kind_of
from .drafters.drafter import load_drafter
from .drafters.mtp.model import MtpDrafter
from .drafters.ngram import NgramDrafter
from .files import names_folder
from .protocol import Drafter

logger = logging.get_logger(__name__)
# of a target's drafters the best guessers first
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
GENERATIONS = 3  # from a model to the one it was finetuned or quantised from, at most


class AutoDrafter:
    """A loader of any drafter, chosen by its files or by its target.

    It is never instantiated.
    """

    def __init__(self):
        raise OSError(
            "AutoDrafter is used through AutoDrafter.from_pretrained(repo_or_dir), or "
            "AutoDrafter.for_target(target)."
        )

    @classmethod
    @names_folder
    def from_pretrained(
        cls, repo_or_dir: str | Path, kind: str | None = None, **kwargs: Any
    ) -> Drafter:
        """Load the drafter in a folder or a Hub repository.

        Args:
            repo_or_dir: a folder, or a Hub id.
            kind: the kind of drafter; default: the one that its files say. `mtp` takes the layers
                that a target brings.
            kwargs: as for `AutoModelForCausalLM.from_pretrained` (`dtype`, `device_map`,
                `revision`, `token`, …).

        Raises:
            OSError: nothing loadable there.
            ValueError: it is no drafter, or of a kind that is not supported; the message says
                which.
        """
        if kind is not None:
            return kind_named(kind).from_pretrained(repo_or_dir, **kwargs)
        return load_drafter(kind_of, repo_or_dir, kwargs)

    @classmethod
    def for_target(cls, target: PreTrainedModel | str | Path, **kwargs: Any) -> Drafter:
        """Load a drafter for a target: a published one, else the target's MTP layers, else copies.

        Published are those that docs/reference/published-drafters.md lists, for the target or for a
        model that it was made of, as cards say (`base_model`). A drafter that cannot be fetched is
        passed over. One line names the drafter that was taken.

        Args:
            target: the model, or its folder or Hub id.
            kwargs: as for `from_pretrained`; default: the model's `dtype` and device, or
                `dtype="auto"`.
        """
        drafter, why = fitting(target, **kwargs)
        logger.warning(why)
        return drafter


def fitting(target: PreTrainedModel | str | Path, **kwargs: Any) -> tuple[Drafter, str]:
    """Find a drafter that fits a target, and a sentence that says which one and why.

    Arguments are as for `AutoDrafter.for_target`.
    """
    model = target if isinstance(target, PreTrainedModel) else None
    name = str(target) if model is None else model.name_or_path
    if model is None:
        kwargs = {"dtype": "auto", **kwargs}
    elif "dtype" not in kwargs:
        kwargs["dtype"] = model.dtype
        if model.device.type != "cpu":
            kwargs.setdefault("device_map", model.device)
    for ancestor in _ancestors(name):
        for published in (row["drafter"] for row in PUBLISHED if ancestor in row["targets"]):
            try:
                drafter = AutoDrafter.from_pretrained(published, **kwargs)
                if model is not None:
                    drafter.attach(model)
            except Exception as error:  # whatever a foreign repository or a missing network raises
                logger.info(f"{published} is passed over: {error}")
            else:
                return drafter, f"Drafting with {published}, which is published for {ancestor}."
    try:
        drafter = (
            MtpDrafter.from_pretrained(name, **kwargs)
            if model is None
            else MtpDrafter.from_target(model)
        )
    except Exception as error:  # likewise
        logger.info(f"No MTP layers: {error}")
        return (
            NgramDrafter(),
            "Drafting with copies from the text itself: no other drafter for "
            f"{name or 'this target'} is here.",
        )
    return drafter, f"Drafting with the MTP layers that {name} brings."


def _ancestors(name: str) -> list[str]:
    """List a model's name and those of the models that it was made of, as their cards say."""
    names = [name] if name else []
    while 0 < len(names) <= GENERATIONS:
        last = names[-1]
        try:
            parent: Any = ModelCard.load(
                Path(last, "README.md") if Path(last).is_dir() else last
            ).data.base_model
        except Exception:  # whatever a missing or foreign card raises, there is nothing to look up
            break
        parent = parent[0] if isinstance(parent, list) and parent else parent
        if not isinstance(parent, str) or parent in names:
            break
        names.append(parent)
    return names
