"""A drafter that is a module with a file of weights: how it is read, placed and written."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..hub.card import provenance_of
from ..protocol import SpeculationConfig
from ..whole_files import write_json
from .drafter import SavedDrafter
from .formats.values import read_config


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
