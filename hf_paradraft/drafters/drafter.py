"""The one base of drafters with files: how a kind is recognised, loaded, saved and published."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import CommitInfo
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    QuantoConfig,
    TorchAoConfig,
)

from ..files import (
    check_whole,
    names_folder,
    share_weights,
    tensor_names,
    write_json,
)
from ..hub.card import CardFields
from ..hub.push import push_drafter
from ..protocol import Drafter, SpeculationConfig
from .formats.files import check_tokenizer, drop_older_weights, drop_pieces, save_tensors
from .formats.folder import ADAPTER, DrafterFolder, find_folder
from .formats.keys import without
from .formats.values import check_dtype, provenance_of

# arguments of an adapter's loading that only concern its target, which it goes with
OF_TARGET = dict.fromkeys(("device_map", "attn_implementation", "quantization_config"))


class SavedDrafter(Drafter):
    """A kind of drafter with files.

    One that is an `nn.Module` says how its folder is read and which config and tensors are written
    into it (`read_folder`, `contents`); another one how it is loaded and written (`load_folder`,
    `write`).

    Attributes:
        model_types: the `model_type`s that its configs name, if these tell the kind.
        template: the template of its model card, in `hub_cards/`.
        about: its work in a clause for that card, after "it".
        made_from: the key of its training's record for the model that it came of.
        has_tokenizer: whether a tokenizer lies next to it.
        is_adapter: whether it is one of PEFT's, with a config of that name.
        fits: the libraries and engines that its folder works with.
        training_options: the dataclass of its run's options, by name, in `training.py` next to its
            class; None: it is not trained here. Who has one is an `nn.Module`.
        paradraft: the record of its training and use, as its config has it.
        packed: whether its matrices are quantised, so that they cannot be saved.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    template: ClassVar[str] = "drafter.jinja"
    about: ClassVar[str] = "guesses tokens"
    made_from: ClassVar[str] = "target"
    has_tokenizer: ClassVar[bool] = False
    is_adapter: ClassVar[bool] = False
    fits: ClassVar[str] = "transformers with hf_paradraft, attached to its target"
    training_options: ClassVar[str | None] = None
    paradraft: Mapping[str, Any] = MappingProxyType({})
    packed: bool = False

    @classmethod
    def recognises(cls, folder: DrafterFolder) -> bool:
        """Tell whether a folder with a config holds a drafter of this kind, by its `model_type`.

        Of all kinds at most one may say so.
        """
        return folder.config.get("model_type") in cls.model_types

    @classmethod
    def read_folder(cls, folder: DrafterFolder) -> Self:
        """Read the drafter that lies in a folder, in fp32 or as it was saved.

        Raises:
            OSError, ValueError: it is damaged, incomplete, or something else.
        """
        raise NotImplementedError(
            f"{cls.__name__} has no read_folder(folder), and no load_folder that does without."
        )

    def contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Make the config and the tensors that `write` puts into a folder."""
        raise NotImplementedError(
            f"{type(self).__name__} has no contents(), and no write(folder) that does without."
        )

    @classmethod
    def details(cls, config: dict[str, Any], names: list[str]) -> list[tuple[str, Any]]:
        """List the facts that `paradraft info` tells of this kind only, as (name, value) pairs.

        Args:
            config: the config, as `read_description` gives it.
            names: the names of all tensors; none where the weights are elsewhere.
        """
        return []

    @classmethod
    def read_description(cls, folder: DrafterFolder) -> dict[str, Any]:
        """Read the config next to its weights."""
        return folder.adapter if cls.is_adapter else folder.config

    @classmethod
    def load_folder(cls, folder: DrafterFolder, **kwargs: Any) -> Self:
        """Load the drafter in a folder, in any layout of its kind.

        Args:
            folder: the folder with its files.
            kwargs: arguments of `configured`; and `ignore_keys`, keys of its config that nothing
                obeys, and of which the caller knows that they make no difference.

        Raises:
            OSError, ValueError: it is damaged, incomplete, or something else.
        """
        if ignore_keys := kwargs.pop("ignore_keys", ()):
            folder.config = without(folder.config, ignore_keys)
        drafter = cls.read_folder(folder)
        drafter.paradraft = folder.provenance
        if saved := drafter.paradraft.get("speculation_config"):
            drafter.speculation_config = SpeculationConfig.from_saved(saved)
        return drafter.configured(**kwargs)

    def configured(
        self: Any,
        dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        attn_implementation: str | None = None,
        quantization_config: Any = None,
        torch_dtype: torch.dtype | str | None = None,
        use_safetensors: bool = True,
        low_cpu_mem_usage: bool = True,
    ) -> Any:
        """Set dtype, device and attention in place, and return the drafter.

        Args:
            dtype: the dtype of its weights; default, and `"auto"`: as they were saved.
            device_map: a device, or `"auto"`.
            attn_implementation: `sdpa` or `eager`.
            quantization_config: a `QuantoConfig` or `TorchAoConfig` of transformers, for its
                matrices.
            torch_dtype: the older name of `dtype`.
            use_safetensors, low_cpu_mem_usage: they make no difference here.

        Raises:
            ValueError: an argument that cannot be meant.
        """
        dtype = torch_dtype or dtype
        check_dtype(dtype)
        if isinstance(dtype, str):
            dtype = None if dtype == "auto" else getattr(torch, dtype.removeprefix("torch."))
        if attn_implementation not in (None, "sdpa", "eager"):
            raise ValueError(
                f"A {self.title} takes explicit masks: attn_implementation is sdpa or eager, not "
                f"{attn_implementation}."
            )
        for part in self.modules() if attn_implementation else ():
            if isinstance(part, PreTrainedModel):
                part.set_attn_implementation(attn_implementation)
        if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
            device_map = "cuda" if torch.cuda.is_available() else None
        elif isinstance(device_map, dict):
            device_map = next(iter(device_map.values()), None)
        try:
            self.to(device=device_map, dtype=dtype).eval()
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"The {self.title} cannot go to device {device_map!r} and dtype {dtype}: {error}"
            ) from None
        if quantization_config is not None:
            quantise(self, quantization_config)
        return self

    def record_training(self, record: dict[str, Any]) -> None:
        """Keep the record of the drafter's training.

        `write` puts it into `config.json`, as `{"paradraft": {"training": record}}`.
        """
        self.paradraft = {**self.paradraft, "training": record}

    def write(self, folder: Path, **kwargs: Any) -> None:
        """Write the drafter into a folder, each file whole, with nothing of its target.

        The config also says how to use it and how it was trained.
        """
        config, tensors = self.contents()
        config["paradraft"] = {
            **self.paradraft,
            "speculation_config": self.speculation_config.saved(),
        }
        new = folder / ".model.safetensors.new"
        save_tensors(tensors, new, format="pt")
        new.replace(folder / "model.safetensors")
        drop_pieces(folder)
        write_json(folder / "config.json", config)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Save it, readable for all who may read the folder's other files.

        Args:
            save_directory: a folder; made if it does not exist.
            kwargs: arguments of `PreTrainedModel.save_pretrained`, for a causal LM.

        Raises:
            ValueError: it has something that its layout has no place for, or the folder holds an
                adapter.
        """
        folder = Path(save_directory)
        if self.packed:
            raise ValueError(
                f"This {self.title} was packed when it was loaded: load it without "
                "quantization_config to save it."
            )
        if not self.is_adapter and (folder / ADAPTER).exists():
            raise ValueError(
                f"{folder} holds an adapter, which would be loaded in the place of this "
                f"{self.title}: give another."
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.write(folder, **kwargs)
        if not self.is_adapter:  # it may lie next to its base, whose weights are not ours
            drop_older_weights(folder)
        share_weights(folder)

    @classmethod
    @names_folder
    def from_pretrained(cls, repo_or_dir: str | Path, **kwargs: Any) -> Self:
        """Load one from a folder or a Hub repository, in any layout that the kind has.

        Args:
            repo_or_dir: a folder, or a Hub id.
            kwargs: `dtype`, `device_map`, `revision`, `subfolder`, `token` and the like, as for
                `AutoModelForCausalLM.from_pretrained`; `speculation_config`, its options, instead
                of the saved ones; and arguments of the kind's `load_folder`. Remote code is never
                run.

        Raises:
            OSError: nothing loadable there, or a damaged file.
            ValueError: it is something else; the message names it.
        """
        return load_drafter(lambda folder: cls, repo_or_dir, kwargs)

    def push_to_hub(
        self, repo_id: str, tokenizer: PreTrainedTokenizerBase | None = None, **kwargs: Any
    ) -> CommitInfo:
        """Publish weights, configs, card and the drafter's tokenizer, if any, in one commit.

        Args:
            repo_id: `user/name`.
            tokenizer: default: the one that lies where the drafter was loaded from.
            kwargs: `private`, `revision`, `create_pr`, `token`, `commit_message`, `license`, as for
                `push_drafter`.

        Raises:
            OSError: the Hub refused, or there is no tokenizer.
            ValueError: nothing says which tokenizer it is.
        """
        if self.has_tokenizer and tokenizer is None:
            if not self.name_or_path:
                raise ValueError(
                    "This drafter was not loaded from anywhere, so its tokenizer is not known: "
                    "pass tokenizer=…."
                )
            tokenizer = AutoTokenizer.from_pretrained(
                self.name_or_path, **self.found_under, trust_remote_code=False
            )
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            self.save_pretrained(folder)
            if self.has_tokenizer:
                tokenizer.save_pretrained(folder)
            saved = DrafterFolder(folder)
            self.check_folder(saved)
            return push_drafter(folder, repo_id, self.card_fields(saved), **kwargs)

    @classmethod
    def card_fields(cls, folder: DrafterFolder) -> CardFields:
        """Collect the fields of a model card that are the drafter's own.

        Args:
            folder: the folder of a whole drafter.

        Raises:
            OSError, ValueError: a damaged file.
        """
        config = cls.read_description(folder)
        library, relation, given = "hf-paradraft", "finetune", None
        provenance = provenance_of(config)
        if cls.is_adapter:
            library, relation = "peft", "adapter"
            given = config.get("base_model_name_or_path")
            provenance = provenance_of({"paradraft": folder.record} if folder.record else config)
        elif cls.has_tokenizer:
            library = "transformers"
        return CardFields(
            template=cls.template,
            library_name=library,
            relation=relation,
            base_model=provenance["training"].get(cls.made_from) or given,
            kind=cls.kind,
            name=folder.path.resolve().name,
            provenance=provenance,
            values={"config": config, "title": cls.title, "about": cls.about},
        )

    @classmethod
    def check_folder(cls, folder: DrafterFolder) -> None:
        """Refuse a folder that is not whole.

        Raises:
            OSError: something is missing or damaged.
            ValueError: it is something else.
        """
        if not any(folder.path.glob("*.safetensors")):
            raise OSError(
                f"{folder} has no .safetensors file: load the drafter and save_pretrained it, and "
                "publish that."
            )
        tensor_names(folder.path)
        if cls.has_tokenizer:
            check_tokenizer(folder.path)


def quantise(drafter: nn.Module, config: Any) -> None:
    """Pack a loaded drafter's matrices as a config of transformers says.

    Raises:
        ImportError: the library that packs is not there.
        ValueError: another one's config; the message says which are served.
    """
    if isinstance(config, QuantoConfig):
        from optimum import quanto

        quanto.quantize(drafter, weights=getattr(quanto, f"q{config.weights}"))
        quanto.freeze(drafter)
    elif isinstance(config, TorchAoConfig):
        from torchao.quantization import quantize_

        quantize_(drafter, config.get_apply_tensor_subclass())
    else:
        raise ValueError(
            f"A {type(config).__name__} does not pack this drafter: pass a QuantoConfig or a "
            "TorchAoConfig."
        )
    drafter.packed = True


def load_drafter(
    kind_of: Callable[[DrafterFolder], type[SavedDrafter]],
    repo_or_dir: str | Path,
    kwargs: dict[str, Any],
) -> Any:
    """Load a drafter from a folder or a Hub repository, which is read once.

    Args:
        kind_of: says of which kind a folder's is.
        repo_or_dir, kwargs: the arguments of `SavedDrafter.from_pretrained`.
    """
    if kwargs.pop("trust_remote_code", False):
        raise ValueError("Drafters never need remote code: leave trust_remote_code unset.")
    wanted = kwargs.pop("speculation_config", None)
    found_under = {name: kwargs[name] for name in ("revision", "subfolder") if kwargs.get(name)}
    folder = find_folder(repo_or_dir, kwargs)
    if folder.holds("generation_config.json"):
        check_whole(folder.path / "generation_config.json")  # transformers takes it for an object
    drafter = kind_of(folder).load_folder(folder, **kwargs)
    drafter.speculation_config = wanted or drafter.speculation_config
    drafter.found_under = found_under
    if drafter.has_tokenizer:
        drafter.name_or_path = str(repo_or_dir)
    return drafter
