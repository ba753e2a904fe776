"""One way to generate: a name, and what to pass to `target.generate`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import PreTrainedModel

from ..drafters.pard import PardDrafter


@dataclass
class Method:
    """A row of the table.

    Attributes:
        name: begins with `plain`, `assisted`, `prompt-lookup`, `pard-chain` or `pard-tree`.
        arguments: for `generate`.
        prepare: run before each call; sets what only lives on a shared assistant.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[], None] = lambda: None


def plain() -> Method:
    """`generate` with nothing."""
    return Method("plain")


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


def pard_chain(drafter: PardDrafter, num_tokens: int) -> Method:
    """Our loop with chains of `num_tokens` drafts."""

    return Method(f"pard-chain-k{num_tokens}", {"assistant_model": drafter}, lambda: _configure(drafter, num_tokens, None))


def pard_tree(drafter: PardDrafter, num_tokens: int, tree_size: int | Literal["auto"]) -> Method:
    """Our loop with the best trees of `tree_size` nodes, or of as many as pay, at most `num_tokens` deep."""
    name = f"pard-tree-k{num_tokens}-{tree_size if tree_size == 'auto' else f'n{tree_size}'}"
    return Method(name, {"assistant_model": drafter}, lambda: _configure(drafter, num_tokens, tree_size))


def _configure(drafter: PardDrafter, num_tokens: int, tree_size: int | Literal["auto"] | None) -> None:
    drafter.speculation_config.num_draft_tokens = num_tokens
    drafter.speculation_config.tree_size = tree_size
