"""Ways to generate, a name and arguments of `target.generate` each, and the lists of them that are
compared: one for each question.
"""

import copy
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import LongTensor
from transformers import CompileConfig, PreTrainedModel

from ..drafters.causal import AutoregressiveDrafter
from ..drafters.ngram import NgramDrafter
from ..drafters.pard.model import PardDrafter
from ..outer_names import ASSISTS_COMPILED, compiles_everywhere
from ..pearl import ProcessDrafter
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
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    drafter: Drafter | None = None
    config: SpeculationConfig | None = None
    threads: int | None = None

    @property
    def is_peer(self) -> bool:
        """Whether transformers drafts by its own means, for one prompt at a time."""
        return self.drafter is None and not self.name.startswith("plain")

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
    return Method(name, {"assistant_model": drafter}, drafter, config)


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
    """Make the method of plain `generate`; a compiled call runs over a static cache."""
    return Method("plain-compiled", _compiled()) if compiled else Method("plain")


def _compiled() -> dict[str, Any]:
    """Make the arguments of a call that transformers compiles over a static cache, on CPUs too."""
    compile_config = CompileConfig(fullgraph=True, dynamic=False, mode="default")
    return {"cache_implementation": "static", "compile_config": compiles_everywhere(compile_config)}


def prompt_lookup() -> Method:
    """Make the method of transformers' prompt lookup: drafts are copied from the prompt."""
    return Method("prompt-lookup", {"prompt_lookup_num_tokens": 10})


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
        stop_strings=None,  # they would need the tokenizer
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


class Case(StrEnum):
    """Questions that a benchmark can answer, each by a list of methods.

    `methods`: transformers' own methods and ours. `batches`: ours over several prompts at a time.
    `compiled`: both sides compiled, over static caches. `overlap`: drafting while verifying against
    one after the other, a core each, and with all cores. `hopeless`: a drafter that knows nothing,
    and prompts of random tokens: how much is lost?
    """

    methods = "methods"
    batches = "batches"
    compiled = "compiled"
    hopeless = "hopeless"
    overlap = "overlap"


def _untrained(drafter: Drafter) -> Drafter:
    """Make a drafter of the same shape, dtype and place with random weights.

    Raises:
        ValueError: it is no PARD drafter.
    """
    if not isinstance(drafter, PardDrafter):
        raise ValueError(
            f"An untrained {drafter.title} cannot be made: the case 'hopeless' is for PARD "
            "drafters."
        )
    torch.manual_seed(0)
    made: Any = type(drafter)
    fresh = made(drafter.config).to(drafter.device, drafter.dtype).eval()
    return PardDrafter.from_causal_lm(fresh, drafter.mask_token_id)


def _overlapped(name: str, drafter: Drafter, length: int) -> list[Method]:
    """Make sequential and overlapped methods of chains of one length.

    In order: sequential on one core, overlapped in one process, overlapped in two processes, and
    sequential on all cores.
    """
    config = SpeculationConfig(length, None, never_slower=False)
    chain, overlap = f"{name}-chain-k{length}", replace(config, overlap=True)
    return [
        replace(drafted(f"{chain}-one-core", drafter, config), threads=1),
        drafted(f"pearl-{name}-k{length}", drafter, overlap),
        drafted(f"pearl-process-{name}-k{length}", ProcessDrafter(drafter), overlap),
        drafted(chain, drafter, config),
    ]


def _variants_of_all(
    drafters: Sequence[Drafter], lengths: Sequence[int], sizes: Sequence[TreeSize]
) -> list[Method]:
    """List the variants of all drafters, and append the drafter's folder to names of several.

    Where folders do not tell drafters apart, the drafter's number in the order given is appended.
    """
    variants = [variants_of(drafter, lengths, sizes) for drafter in drafters]
    uses = Counter(variant.name for own in variants for variant in own)
    folders = [Path(drafter.name_or_path).name for drafter in drafters]
    for number, (folder, own) in enumerate(zip(folders, variants, strict=True), 1):
        label = folder if folder and folders.count(folder) == 1 else number
        for variant in own:
            if uses[variant.name] > 1:
                variant.name = f"{variant.name}@{label}"
    return [variant for own in variants for variant in own]


def methods_of(
    case: Case,
    drafter: Drafter,
    parent: PreTrainedModel | None,
    draft_lengths: Sequence[int] = (4, 8, 12),
    tree_sizes: Sequence[TreeSize] = (16, "auto"),
    others: Sequence[Drafter] = (),
    recurrent: bool = False,
    lookup: bool = False,
) -> list[Method]:
    """List the methods of a case, the reference first; trees are as deep as the longest chain.

    Args:
        case: the question to answer.
        drafter: our drafter.
        parent: the assistant of transformers' own assisted generation; None leaves that out.
        draft_lengths: K of chains.
        tree_sizes: N of trees.
        others: more drafters for the same target.
        lookup: add copied drafts by themselves, and our trees once more with copies in them.
        recurrent: whether the target has a state, which transformers' own methods refuse.

    Raises:
        ValueError: a case that this drafter cannot serve.
    """
    longest = max(draft_lengths)
    if case == Case.overlap:
        overlapped = _overlapped(drafter.kind, drafter, longest)
        if parent is not None:
            overlapped += _overlapped("autoregressive", AutoregressiveDrafter(parent), 5)
        return [plain(), *overlapped]
    if case == Case.hopeless:
        name, chain = f"{drafter.kind}-chain", SpeculationConfig(longest, None)
        return [
            plain(),
            drafted(f"{name}-k{longest}", drafter, chain),
            drafted(f"{name}-untrained-k{longest}", _untrained(drafter), chain),
        ]
    compiled, peers = case == Case.compiled, []
    if compiled and parent is not None and ASSISTS_COMPILED and not recurrent:
        peers = [assisted(parent, None, compiled=True)]
    if case == Case.methods and not recurrent:
        peers = [assisted(parent, k) for k in (3, 5, 8, None)] if parent is not None else []
        peers.append(prompt_lookup())
    drafters = [drafter, *others] if case == Case.methods else [drafter]
    variants = _variants_of_all(drafters, draft_lengths, tree_sizes)
    if lookup:
        peers.append(drafted("ngram-chain-k10", NgramDrafter(), SpeculationConfig(10, None)))
        variants += [
            drafted(f"{tree.name}-lookup", tree.drafter, replace(tree.config, prompt_lookup=True))
            for tree in variants
            if tree.config.tree_size
        ]
    for variant in variants:
        variant.config = replace(variant.config, compile=compiled)
    return [plain(compiled), *peers, *variants]
