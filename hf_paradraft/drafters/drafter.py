"""A drafter with files: how any kind is recognised, loaded, saved, published and described."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self

from huggingface_hub import CommitInfo
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..files import names_folder, share_weights, tensor_names
from ..hub.card import CardFields, provenance_of
from ..hub.push import push_drafter
from ..protocol import Drafter
from .formats.files import check_files, names_in
from .formats.identify import drafter_folder, identify
from .formats.values import read_config
from .variants import NamedDrafter


class SavedDrafter(NamedDrafter, ABC):
    """A kind of drafter with files: how it is recognised, loaded, saved, published and described.

    Attributes:
        template: of its model card, in `hub_cards/`.
        about: what it does, for that card: behind "it".
        made_from: what the record of its training calls the model that it came of.
        has_tokenizer: whether a tokenizer lies beside it.
        fits: what its folder works with.
        training_options: the dataclass of its run's options, by name, in `training.py` beside its class; None: it is not trained
            here. Who has one is an `nn.Module`, and has `remember`.
    """

    template: ClassVar[str] = "drafter.jinja"
    about: ClassVar[str] = "guesses tokens"
    made_from: ClassVar[str] = "target"
    has_tokenizer: ClassVar[bool] = False
    fits: ClassVar[str] = "transformers with hf_paradraft, attached to its target"
    training_options: ClassVar[str | None] = None

    @classmethod
    @abstractmethod
    def recognises(cls, folder: Path) -> bool:
        """Whether a folder holds one. Of all kinds at most one may say so."""

    @classmethod
    @abstractmethod
    def load_folder(cls, folder: Path, **kwargs: Any) -> Self:
        """The drafter in a folder; arguments as for `from_pretrained`.

        Raises:
            OSError, ValueError: it is damaged, incomplete, or something else.
        """

    @abstractmethod
    def write(self, folder: Path, **kwargs: Any) -> None:
        """Write it into a folder, with how to use it and how it was trained, and nothing of its target."""

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Save it, readable for all who may read the folder's other files.

        Args:
            save_directory: a folder; made if it does not exist.
            kwargs: of a causal LM, as for `PreTrainedModel.save_pretrained`.

        Raises:
            ValueError: it has something that its layout has no place for.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        self.write(folder, **kwargs)
        share_weights(folder)

    def remember(self, record: dict[str, Any]) -> None:
        """Note how it was trained; `write` puts that into `config.json`, as `{"paradraft": {"training": record}}`."""
        raise NotImplementedError(f"A {self.title} is not trained here.")

    @classmethod
    @names_folder
    def from_pretrained(cls, repo_or_dir: str | Path, **kwargs: Any) -> Self:
        """Load one from a folder or a Hub repository, in any layout that the kind has.

        Args:
            repo_or_dir: a folder, or a Hub id.
            kwargs: `dtype`, `device_map`, `revision`, `subfolder`, `token` and the like, as for
                `AutoModelForCausalLM.from_pretrained`, and what the kind's `load_folder` has. Remote code is never run.

        Raises:
            OSError: nothing loadable there, or a damaged file.
            ValueError: it is something else; the message says what.
        """
        if kwargs.pop("trust_remote_code", False):
            raise ValueError("Drafters never need remote code: leave trust_remote_code unset.")
        found_under = {name: kwargs[name] for name in ("revision", "subfolder") if kwargs.get(name)}
        drafter = cls.load_folder(drafter_folder(repo_or_dir, kwargs), **kwargs)
        drafter.found_under = found_under
        if cls.has_tokenizer:
            drafter.name_or_path = str(repo_or_dir)
        return drafter

    def push_to_hub(self, repo_id: str, tokenizer: PreTrainedTokenizerBase | None = None, **kwargs: Any) -> CommitInfo:
        """Publish weights, configs and card in one commit, and the tokenizer of a drafter that has one.

        Args:
            repo_id: `user/name`.
            tokenizer: default: the one that lies where the drafter was loaded from.
            kwargs: `private`, `revision`, `create_pr`, `token`, `commit_message`, `license`, as for `push_drafter`.

        Raises:
            OSError: the Hub refused, or there is no tokenizer.
            ValueError: nothing says which tokenizer it is.
        """
        if self.has_tokenizer and tokenizer is None:
            if not self.name_or_path:
                raise ValueError("This drafter was not loaded from anywhere, so its tokenizer is not known: pass tokenizer=….")
            tokenizer = AutoTokenizer.from_pretrained(self.name_or_path, **self.found_under, trust_remote_code=False)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            self.save_pretrained(folder)
            if self.has_tokenizer:
                tokenizer.save_pretrained(folder)
            self.check_folder(folder)
            return push_drafter(folder, repo_id, self.card_fields(folder), **kwargs)

    @classmethod
    def check_folder(cls, folder: Path) -> None:
        """Refuse a folder that is not whole.

        Raises:
            OSError: something is missing or damaged.
            ValueError: it is something else.
        """
        check_files(folder, cls.has_tokenizer)
        tensor_names(folder)

    @classmethod
    def card_fields(cls, folder: Path) -> CardFields:
        """Collect the fields of its model card that are its own."""
        config = read_config(folder)
        provenance = provenance_of(config)
        return CardFields(
            template=cls.template,
            library_name="transformers" if cls.has_tokenizer else "hf-paradraft",
            relation="finetune",
            base_model=provenance["training"].get(cls.made_from),
            methods=(cls.kind,),
            provenance=provenance,
            values={"config": config, "title": cls.title, "about": cls.about},
        )

    @classmethod
    def describe(cls, folder: Path) -> list[tuple[str, Any]]:
        """Describe a folder with at least its config, as (name, value) pairs."""
        config, names = read_config(folder), names_in(folder)
        return [
            ("kind", identify(config, names) or cls.title),
            *cls.details(config, names),
            ("trained for", provenance_of(config)["training"].get("target") or "not recorded"),
            ("fits", cls.fits),
        ]

    @classmethod
    def details(cls, config: dict[str, Any], names: list[str]) -> list[tuple[str, Any]]:
        """List the kind's own part of `describe`, as (name, value) pairs.

        Args:
            config: of `config.json`.
            names: of all tensors; none where the weights are elsewhere.
        """
        return []

    @classmethod
    def adopt(cls, target: PreTrainedModel, assistant: object) -> Drafter | None:
        """The drafter of this kind that a model given as `assistant_model` is for `target`; None: it is none."""
        return None

    @classmethod
    def export(cls, folder: Path, output: Path, engine: str, target: str | None, pad: bool) -> str:
        """Write a folder for another engine; arguments as for `integration.export.export`.

        Raises:
            ValueError: no other engine has such a drafter.
        """
        raise ValueError(f"A {cls.title} is of use in transformers alone, and there as it is: {engine} has nothing of the kind.")
