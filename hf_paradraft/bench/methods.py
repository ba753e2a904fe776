"""One way to generate: a name, and what to pass to `target.generate`."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import CompileConfig, PreTrainedModel

from ..decoding import Drafter, SpeculationConfig
from ..drafters.pard import PardDrafter
from ..drafters.ppd.drafter import PpdDrafter
from ..drafters.ppd.prompted import PromptedDrafter
from ..trees.sparse import static_trees


@dataclass
class Method:
    """A row of the table.

    Attributes:
        name: begins with `plain`, `assisted`, `prompt-lookup`, `pard-chain`, `pard-tree` or `ppd`.
        arguments: for `generate`.
        prepare: run before each call; sets what only lives on a shared assistant.
        drafter: ours, which counts its own rounds; None for the others, whose forwards are counted from outside.
        batches: whether it takes more than one prompt at a time.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[], None] = lambda: None
    drafter: Drafter | None = None
    batches: bool = False


def plain(compiled: bool = False) -> Method:
    """`generate` with nothing; or with transformers' own compilation, over a static cache."""
    if not compiled:
        return Method("plain", batches=True)
    compile_config = CompileConfig(fullgraph=True, dynamic=False, mode="default")
    compile_config._compile_all_devices = True  # transformers compiles on GPUs only, unless asked
    return Method("plain-compiled", {"cache_implementation": "static", "compile_config": compile_config}, batches=True)


def prompt_lookup(num_tokens: int = 10) -> Method:
    """transformers' prompt lookup: drafts are copied from the prompt."""
    return Method("prompt-lookup", {"prompt_lookup_num_tokens": num_tokens})


def assisted(parent: PreTrainedModel, num_tokens: int | None) -> Method:
    """transformers' assisted generation with an autoregressive model.

    Args:
        parent: the assistant.
        num_tokens: drafts a round, always; None for transformers' defaults.
    """
    defaults = {
        "num_assistant_tokens": 20,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.4,
    }
    fixed = {**defaults, "num_assistant_tokens": num_tokens, "assistant_confidence_threshold": 0.0}
    name = "assisted-default" if num_tokens is None else f"assisted-k{num_tokens}"
    settings = defaults if num_tokens is None else fixed
    return Method(name, {"assistant_model": parent}, lambda: parent.generation_config.update(**settings))


def pard_chain(drafter: PardDrafter, num_tokens: int, name: str = "pard-chain", compiled: bool = False) -> Method:
    """Our loop with chains of `num_tokens` drafts."""
    return _ours(f"{name}-k{num_tokens}", drafter, SpeculationConfig(num_tokens, compile=compiled))


def pard_tree(
    drafter: PardDrafter, num_tokens: int, tree_size: int | Literal["auto"], name: str = "pard-tree", compiled: bool = False
) -> Method:
    """Our loop with the best trees of `tree_size` nodes, or of as many as pay, at most `num_tokens` deep."""
    size = tree_size if tree_size == "auto" else f"n{tree_size}"
    return _ours(f"{name}-k{num_tokens}-{size}", drafter, SpeculationConfig(num_tokens, tree_size, compile=compiled))


def ppd(drafter: PpdDrafter, tree_size: int | Literal["auto"], name: str = "ppd") -> Method:
    """Our loop with a model's own prompt tokens, in rounds of `tree_size` rows beside the root."""
    size = tree_size if tree_size == "auto" else f"n{tree_size}"
    return _ours(f"{name}-{size}", drafter, SpeculationConfig(drafter.config.num_prompt_tokens, tree_size))


def ppd_static(drafter: PpdDrafter, tree_size: int) -> Method:
    """PPD's static trees, for comparison."""
    static = copy.copy(drafter)
    static.trees = lambda *_: static_trees(drafter.config.accuracy, tree_size, drafter.config.num_ensembles)
    return ppd(static, tree_size, "ppd-static")


def ppd_chain(drafter: PpdDrafter, tree_size: int) -> Method:
    """Prompt tokens with one guess at each distance, for comparison."""
    config = copy.copy(drafter.config)
    config.accuracy = [row[:1] for row in config.accuracy]
    return ppd(PpdDrafter(drafter.prompts, config, drafter.tensor_name), tree_size, "ppd-chain")


def prompted(drafter: PromptedDrafter, tree_size: int | None = None, num_tokens: int | None = None) -> Method:
    """Our loop with a small model that drafts by prompt tokens: what one forward guesses, or `num_tokens`, decoding ahead."""
    depth = num_tokens or drafter.num_prompts + 1
    name = "ppd-drafter" if depth <= drafter.num_prompts + 1 else "ppd-ahead"
    suffix = "" if tree_size is None else f"-n{tree_size}"
    return _ours(f"{name}-k{depth}{suffix}", drafter, SpeculationConfig(depth, tree_size))


def _ours(name: str, drafter: Drafter, config: SpeculationConfig) -> Method:
    def prepare() -> None:
        drafter.speculation_config = config

    return Method(name, {"assistant_model": drafter}, prepare, drafter, batches=True)
