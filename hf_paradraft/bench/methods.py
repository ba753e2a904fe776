"""Ways to generate: a name each, the arguments of `target.generate`, and the ways to use one
drafter.
"""

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import LongTensor
from transformers import CompileConfig, PreTrainedModel

from ..outer_names import compiles_everywhere
from ..protocol import Drafter, Drafting, GuessedTokens, Prefix, SpeculationConfig
from ..protocol.config import TreeSize


def _keep_record(record: logging.LogRecord) -> bool:
    """Tell whether a log record is not assisted generation's warning about its own arguments."""
    return "Passing `generation_config` together" not in record.getMessage()


@dataclass
class Method:
    """A way to generate that is measured.

    Attributes:
        name: a name that begins with `plain`, `assisted`, `prompt-lookup`, or a kind of drafter.
        arguments: keywords of `generate`.
        drafter: our drafter, which counts its own rounds; None for other methods, whose forwards
            are counted from outside.
        config: the options of our drafter in these calls; None: its own.
        threads: CPU threads of a call; None: all that torch has.
        batches: whether it takes more than one prompt at a time.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    drafter: Drafter | None = None
    config: SpeculationConfig | None = None
    threads: int | None = None
    batches: bool = False

    @contextmanager
    def using(self) -> Iterator[None]:
        """Set threads and the drafter's options for a block, and hide a warning in it."""
        drafter, threads = self.drafter, torch.get_num_threads()
        before = None if drafter is None else drafter.speculation_config
        told = logging.getLogger("transformers.generation.utils")
        told.addFilter(_keep_record)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.config is not None:
            drafter.speculation_config = self.config
        try:
            yield
        finally:
            if self.config is not None:
                drafter.speculation_config = before
            torch.set_num_threads(threads)
            told.removeFilter(_keep_record)


def drafted(name: str, drafter: Drafter, config: SpeculationConfig) -> Method:
    """Make the method of our decoding loop with a drafter and its options."""
    return Method(name, {"assistant_model": drafter}, drafter, config, batches=True)


def prompt_lookup_variants(methods: Sequence[Method]) -> list[Method]:
    """Make a method with prompt lookup of each that drafts trees."""
    return [
        drafted(f"{tree.name}-lookup", tree.drafter, replace(tree.config, prompt_lookup=True))
        for tree in methods
        if tree.config.tree_size
    ]


def variants_of(
    drafter: Drafter, lengths: Sequence[int], sizes: Sequence[TreeSize]
) -> list[Method]:
    """List a drafter's chains of all lengths, then its trees of all sizes.

    Trees are as deep as the longest chain; of prompt tokens, only their own tree is listed.
    """
    if drafter.kind.startswith("ppd"):
        own = drafter.speculation_config
        return [drafted(f"{drafter.kind}-{_size_name(own.tree_size)}", drafter, own)]
    most = drafter.most_drafts
    lengths = lengths if most is None else sorted({min(length, most) for length in lengths})
    depth = max(lengths)
    chains = [
        drafted(f"{drafter.kind}-chain-k{length}", drafter, SpeculationConfig(length, None))
        for length in lengths
    ]
    name = f"{drafter.kind}-tree-k{depth}"
    trees = [
        drafted(f"{name}-{_size_name(size)}", drafter, SpeculationConfig(depth, size))
        for size in sizes
    ]
    return [*chains, *trees]


def _size_name(size: TreeSize) -> str:
    return "auto" if size == "auto" else f"n{size}"


def plain(compiled: bool = False) -> Method:
    """Make the method of plain `generate`; `compiled` uses transformers' own compilation.

    A compiled call runs over a static cache.
    """
    return (
        Method("plain-compiled", _compiled(), batches=True)
        if compiled
        else Method("plain", batches=True)
    )


def _compiled() -> dict[str, Any]:
    """Make the arguments of a call that transformers compiles over a static cache, on CPUs too."""
    compile_config = CompileConfig(fullgraph=True, dynamic=False, mode="default")
    return {"cache_implementation": "static", "compile_config": compiles_everywhere(compile_config)}


def prompt_lookup(num_tokens: int = 10) -> Method:
    """Make the method of transformers' prompt lookup: drafts are copied from the prompt."""
    return Method("prompt-lookup", {"prompt_lookup_num_tokens": num_tokens})


def assisted(parent: PreTrainedModel, num_tokens: int | None, compiled: bool = False) -> Method:
    """Make the method of transformers' assisted generation with an autoregressive model.

    Args:
        parent: the assistant; the method has a copy with the same weights and its own settings.
        num_tokens: drafts a round, always; None for transformers' defaults.
        compiled: over a static cache, with a compiled verification; since transformers 5.24.
    """
    name = "assisted-default" if num_tokens is None else f"assisted-k{num_tokens}"
    assistant = copy.copy(parent)
    assistant.generation_config = copy.copy(parent.generation_config)
    assistant.generation_config.update(
        num_assistant_tokens=20 if num_tokens is None else num_tokens,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.4 if num_tokens is None else 0.0,
    )
    arguments = {"assistant_model": assistant, **(_compiled() if compiled else {})}
    return Method(f"{name}-compiled" if compiled else name, arguments)


class Replay(Drafter, Drafting):
    """A drafter that replays the target's own answers at no cost.

    Its speed is the most that the engine could have.

    Args:
        num_tokens: drafts a round.
    """

    def __init__(self, num_tokens: int):
        self.speculation_config = SpeculationConfig(num_tokens, None)
        self.texts = list[LongTensor]()  # with their prompts

    def propose(self, prefixes: list[Prefix]) -> list[GuessedTokens]:
        """Implement `Drafting.propose`."""
        guesses = []
        for prefix in prefixes:
            ids = prefix.ids[0].cpu()
            known = next((text for text in self.texts if torch.equal(text[: len(ids)], ids)), ids)
            guesses.append(GuessedTokens(known[len(ids) :][: prefix.room]))
        return guesses


def replayed(num_tokens: int) -> Method:
    """Make the method of drafts that are the target's own answers."""
    drafter = Replay(num_tokens)
    return drafted("replayed", drafter, drafter.speculation_config)
