"""PPD, as the rest of the library knows it: prompt tokens on a target, and on a small model that drafts for it."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from peft import PeftModel
from transformers import PreTrainedModel

from ...protocol import Drafter, SpeculationConfig
from ...protocol.config import TreeSize
from ..kind import Kind, Variant
from .drafter import PpdDrafter
from .prompted import PromptedDrafter
from .publish import card_fields, check_folder, describe
from .tuner import PpdModel, prompt_embedding

# One drafter in all calls of a model: what was learned of it stays, and its `last_stats` are found again.
_adopted: WeakKeyDictionary[PeftModel, dict[tuple, Any]] = WeakKeyDictionary()
STUDIED_SIZES = (6, 10, 15, 22, 31)


def _recognises(folder: Path) -> bool:
    return (folder / "adapter_config.json").exists()


def _adopt(target: PreTrainedModel, assistant: object) -> Drafter | None:
    """What a model with a PPD adapter is for a target: its own drafter, or a small model that guesses in parallel."""
    if not isinstance(assistant, PeftModel) or not isinstance(assistant.base_model, PpdModel):
        return None
    drafters = _adopted.setdefault(assistant, {})
    itself, prompts = assistant.get_base_model() is target, prompt_embedding(assistant.get_base_model()).prompts()
    key = itself, assistant.active_adapter
    if key not in drafters or drafters[key][0] is not prompts:
        drafters[key] = prompts, PpdDrafter.from_model(assistant) if itself else PromptedDrafter(assistant)
    return drafters[key][1]


def _variants(drafter: PpdDrafter | PromptedDrafter, lengths: Sequence[int], sizes: Sequence[TreeSize]) -> list[Variant]:
    if isinstance(drafter, PpdDrafter):
        size: TreeSize = "auto" if drafter.config.accuracy is not None else 15
        name = size if size == "auto" else f"n{size}"
        return [Variant(f"ppd-{name}", drafter, SpeculationConfig(drafter.config.num_prompt_tokens, size))]
    length = drafter.num_prompts + 1
    return [Variant(f"ppd-drafter-k{length}-n12", drafter, SpeculationConfig(length, 12))]


class _Everywhere(PpdDrafter):
    """Static trees: all prompts below every node."""

    everywhere = True


def _study(drafter: PpdDrafter) -> list[Variant]:
    """Dynamic sparse trees of several sizes, against static ones and one guess at each distance (PPD, section 5)."""
    if not isinstance(drafter, PpdDrafter) or drafter.config.accuracy is None:
        raise ValueError("The case 'prompts' needs calibrated prompt tokens: paradraft calibrate, then --drafter ADAPTER.")
    m = drafter.config.num_prompt_tokens
    sizes = [Variant(f"ppd-n{size}", drafter, SpeculationConfig(m, size)) for size in STUDIED_SIZES]
    first = copy.copy(drafter.config)
    first.accuracy = [row[:1] for row in first.accuracy]
    static = _Everywhere(drafter.prompts, drafter.config, drafter.tensor_name)
    chain = PpdDrafter(drafter.prompts, first, drafter.tensor_name)
    return [
        *sizes,
        Variant("ppd-auto", drafter, SpeculationConfig(m, "auto")),
        Variant("ppd-static-n15", static, SpeculationConfig(m, 15)),
        Variant("ppd-chain-n15", chain, SpeculationConfig(m, 15)),
    ]


PPD = Kind(
    name="ppd",
    title="PPD adapter",
    drafters=(PpdDrafter, PromptedDrafter),
    recognises=_recognises,
    load=PpdDrafter.from_pretrained,
    check=check_folder,
    card=card_fields,
    describe=describe,
    variants=_variants,
    study=_study,
    adopt=_adopt,
)
