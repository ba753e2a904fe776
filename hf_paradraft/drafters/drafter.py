"""A drafter with files: how any kind is recognised, loaded, saved, published, described and compared."""

from __future__ import annotations

import copy
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import CommitInfo
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..files import names_folder, share_weights, tensor_names
from ..hub.card import CardFields, provenance_of
from ..hub.push import push_drafter
from ..protocol import Drafter, SpeculationConfig
from ..protocol.config import TreeSize
from ..whole_files import write_json
from .formats.files import check_files, names_in
from .formats.identify import drafter_folder, identify
from .formats.values import read_config


@dataclass(frozen=True)
class Variant:
    """One way to use a drafter, under the name that it has in benchmarks."""

    name: str
    drafter: Drafter
    config: SpeculationConfig


def with_prompt_lookup(variants: Sequence[Variant]) -> list[Variant]:
    """The trees among them, with prompt lookup."""
    trees = [variant for variant in variants if variant.config.tree_size]
    return [Variant(f"{tree.name}-lookup", tree.drafter, replace(tree.config, prompt_lookup=True)) for tree in trees]


class NamedDrafter(Drafter):
    """A drafter of this library: its name, and how it is compared with others.

    Attributes:
        kind: its name, as in `paradraft train NAME` and in benchmarks.
        title: for people.
    """

    kind: ClassVar[str]
    title: ClassVar[str]

    def variants(self, lengths: Sequence[int], sizes: Sequence[TreeSize]) -> list[Variant]:
        """List the variants for benchmarks: chains of all lengths, then trees of all sizes, as deep as the longest chain."""
        most = self.most_drafts
        lengths = lengths if most is None else sorted({min(length, most) for length in lengths})
        depth = max(lengths)
        chains = [Variant(f"{self.kind}-chain-k{length}", self, SpeculationConfig(length, None)) for length in lengths]
        names = [size if size == "auto" else f"n{size}" for size in sizes]
        trees = [
            Variant(f"{self.kind}-tree-k{depth}-{name}", self, SpeculationConfig(depth, size))
            for name, size in zip(names, sizes, strict=True)
        ]
        return [*chains, *trees]

    def untrained(self) -> Drafter:
        """One of the same shape that knows nothing.

        Raises:
            ValueError: it cannot be made.
        """
        raise ValueError(f"An untrained {self.title} cannot be made: the case 'hopeless' is for PARD drafters.")


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


class ModuleDrafter(nn.Module, SavedDrafter):
    """A drafter that is a module, with a file of weights and a `config.json`.

    Attributes:
        paradraft: how it was trained.
    """

    paradraft: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    @abstractmethod
    def read_folder(cls, folder: Path, ignore_keys: Iterable[str] = ()) -> Self:
        """Read the drafter that lies in a folder, in fp32 or as it was saved.

        Args:
            folder: with its files.
            ignore_keys: keys of its config that make no difference, for which it would be refused otherwise; a kind whose configs
                are its own needs no such argument.

        Raises:
            OSError, ValueError: it is damaged, incomplete, or something else.
        """

    @abstractmethod
    def contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Config and tensors, as they are written into a folder."""

    @classmethod
    def load_folder(cls, folder: Path, ignore_keys: Iterable[str] = (), **kwargs: Any) -> Self:
        """Load the drafter in a folder, in any layout of its kind.

        Args:
            folder: with its files.
            ignore_keys: keys of its config that nothing obeys, and of which the caller knows that they make no difference.
            kwargs: as for `placed`.

        Raises:
            OSError, ValueError: it is damaged, incomplete, or something else.
        """
        drafter = cls.read_folder(folder, ignore_keys) if ignore_keys else cls.read_folder(folder)
        drafter.paradraft = provenance_of(read_config(folder))
        if saved := drafter.paradraft.get("speculation_config"):
            drafter.speculation_config = SpeculationConfig.from_saved(saved)
        return drafter.placed(**kwargs)

    def placed(
        self,
        dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        speculation_config: SpeculationConfig | None = None,
        attn_implementation: str | None = None,
        **kwargs: Any,
    ) -> Self:
        """Itself, as a caller wants to have it.

        Args:
            dtype: of its weights; default, and `"auto"`: as they were saved.
            device_map: a device, or `"auto"`.
            speculation_config: how to use it; default: as saved.
            attn_implementation: `sdpa` or `eager`.
            kwargs: `torch_dtype`, and what makes no difference here.

        Raises:
            ValueError: an argument that cannot be meant.
        """
        who = type(self).__name__
        if more := sorted(kwargs.keys() - {"torch_dtype", "use_safetensors", "low_cpu_mem_usage"}):
            raise ValueError(f"{who}.from_pretrained does not know {', '.join(more)}.")
        if speculation_config is not None:
            self.speculation_config = speculation_config
        dtype = kwargs.get("torch_dtype") or dtype
        if isinstance(dtype, str):
            if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise ValueError(f"There is no dtype {dtype!r}: pass torch.bfloat16, 'bfloat16', 'auto' or the like.")
            dtype = None if dtype == "auto" else getattr(torch, dtype)
        if attn_implementation not in (None, "sdpa", "eager"):
            raise ValueError(
                f"A {self.title} takes explicit masks: attn_implementation is sdpa or eager, not {attn_implementation}."
            )
        for part in self.modules() if attn_implementation else ():
            if isinstance(part, PreTrainedModel):
                part.set_attn_implementation(attn_implementation)
        if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
            device_map = "cuda" if torch.cuda.is_available() else None
        elif isinstance(device_map, dict):
            device_map = next(iter(device_map.values()))
        return self.to(device=device_map, dtype=dtype).eval()

    def remember(self, record: dict[str, Any]) -> None:
        """Keep how it was trained."""
        self.paradraft = {**self.paradraft, "training": record}

    def write(self, folder: Path, **kwargs: Any) -> None:
        """Write `contents`, with how to use it and how it was trained; each file whole or not at all."""
        config, tensors = self.contents()
        config["paradraft"] = {**self.paradraft, "speculation_config": asdict(self.speculation_config)}
        new = folder / ".model.safetensors.new"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, new, metadata={"format": "pt"})
        new.replace(folder / "model.safetensors")
        write_json(folder / "config.json", config)

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        return next(self.parameters()).dtype


_pairs: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[PreTrainedModel, Any]] = weakref.WeakKeyDictionary()
_last: weakref.WeakKeyDictionary[Any, weakref.ref[PreTrainedModel]] = weakref.WeakKeyDictionary()


def pair(drafter: Any, target: PreTrainedModel, **shared: Any) -> Any:
    """A drafter as it stands beside one target: the same weights, with what that target shares. Two targets never share one.

    Args:
        drafter: a module; its copies and pickles hold nothing of a target.
        target: not kept alive.
        shared: what the pair has of its own; given where it is made, and again where that has changed.
    """
    pairs = _pairs.setdefault(drafter, weakref.WeakKeyDictionary())
    view = pairs.get(target)
    if view is None or any(getattr(view, name) != value for name, value in shared.items()):
        pairs[target] = view = copy.copy(drafter if view is None else view)
        view.__dict__.update(shared)
    view.__dict__["speculation_config"] = drafter.speculation_config
    return view


def remember_target(drafter: Any, target: PreTrainedModel) -> None:
    """Note what a drafter was attached to last, for `draft_logits`; neither keeps the other alive."""
    _last[drafter] = weakref.ref(target)


def last_target(drafter: Any) -> PreTrainedModel | None:
    """Look up the target that a drafter was attached to last, if it is still there."""
    reference = _last.get(drafter)
    return None if reference is None else reference()
