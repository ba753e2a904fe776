"""Training on a frozen target that runs in the same process: the options, vocabularies and number
formats of such runs, and how much of a drafter's work the target accepts.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from timeit import repeat
from typing import Any, ClassVar

import torch
from datasets import Dataset
from huggingface_hub.constants import HF_HOME
from torch import LongTensor
from torch.nn.functional import linear
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..chat import end_tokens, learned_context, stopping
from ..files import hub_name
from ..hardware import fast_dtype
from ..protocol import SpeculationStats
from ..protocol.drafter import FeatureKey
from .losses import LOSSES, Loss
from .rows import IGNORED
from .run import RunInputs, TrainingOptions, option
from .target import open_fast
from .target_states import TargetStates

logger = logging.get_logger(__name__)
JUDGED = 32  # evaluation rows whose acceptance is measured
CONTINUED = 128  # tokens that each of them is continued by, at most
FASTER = 0.8  # of the seconds in float32: less is worth another format


@dataclass(kw_only=True)
class TargetTraining(TrainingOptions):
    """Options of a drafter that stands on its target."""

    recorded: ClassVar[tuple[str, ...]] = ("loss",)

    target: str = option(
        "The causal LM to speed up: folder, Hub id or .gguf file. It is not changed.", read=True
    )
    target_id: str | None = option(
        "The target's name on the Hub, where it is loaded from a folder.", None
    )
    vocab: int | None = option(
        "V': tokens that are guessed, the answers' most frequent; default: all.", None, least=1
    )
    loss: Loss = option(LOSSES, "tv")
    cache_dir: Path | None = option(
        "Keep the target's states of every text here: it runs once for all epochs.",
        None,
        read=True,
    )
    cache_gb: float | None = option(
        "Size of that folder in GB, at most; default: 50.", None, least=0
    )

    def __post_init__(self):
        super().__post_init__()
        if self.cache_dir is not None:
            self.cache_dir = Path(self.cache_dir)

    def check(self) -> None:
        """Implement `TrainingOptions.check`."""
        super().check()
        if self.cache_gb is not None and self.cache_dir is None:
            raise ValueError("cache_gb is the size of the folder cache_dir: pass both.")

    @property
    def defaults(self) -> dict[str, Any]:
        """Autocast to bf16 where that is faster. Weights stay in fp32."""
        return {"bf16": True, "use_cpu": not torch.cuda.is_available()} if trains_in_bf16() else {}

    def open_model(
        self, tokenizer: PreTrainedTokenizerBase, device: torch.device
    ) -> PreTrainedModel:
        """Load the target, frozen, in the dtype that this hardware is fast at."""
        if self.models["target"] is None:
            logger.warning(
                "The drafter will not say which model it is for, and other engines ask: "
                "--target-id ORG/NAME names %s.",
                self.target,
            )
        return open_fast(self.target, whole=True).to(device).requires_grad_(False)

    def vocabulary(self, inputs: RunInputs) -> LongTensor | None:
        """Choose the ids that the drafter guesses, the most frequent of answers; None for all.

        The ids are int64 `(V',)`.

        Raises:
            ValueError: `vocab` is too small, or larger than the target's.
        """
        if self.vocab is None:
            return None
        return answer_vocabulary(inputs.train_set, self.vocab, inputs.tokenizer, inputs.model)

    def states(
        self, inputs: RunInputs, keys: Sequence[FeatureKey], vocabulary: LongTensor | None
    ) -> TargetStates:
        """Make the source of the target's states for the trainer."""
        size = {} if self.cache_gb is None else {"max_bytes": self.cache_gb * 1e9}
        return TargetStates(inputs.model, keys, vocabulary, self.cache_dir, **size)

    @property
    def models(self) -> dict[str, str | None]:
        """Implement `TrainingOptions.models`."""
        return {"target": hub_name(str(self.target_id or self.target))}

    def measure(self, drafter: Any, inputs: RunInputs) -> dict[str, Any]:
        """Measure the acceptance of chains on evaluation rows."""
        return acceptance(inputs.model, drafter, inputs.tokenizer, inputs.eval_set, JUDGED)


def acceptance(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Dataset,
    count: int,
) -> dict[str, Any]:
    """Measure and print the greedy acceptance of a drafter's chains against `target`.

    Each sample is continued from its first labelled token, as far as the target's context goes.

    Args:
        target: the model that judges.
        drafter: the drafter to measure.
        tokenizer: the target's, for the padding id.
        samples: rows from `encode_rows`; texts labelled throughout are continued from their first
            quarter.
        count: the samples that are continued, the first ones.

    Returns:
        For the record, as `acceptance`: `mean_emitted` (τ, bonus included),
        `acceptance_by_position` and `samples`.
    """
    judged = samples.select(range(min(count, len(samples))))
    target = target.to(next(drafter.parameters()).device).eval()
    options = drafter.eval().speculation_config
    stats, context = SpeculationStats(), learned_context(target)
    # chains, and every round counts
    drafter.speculation_config = replace(options, tree_size=None, never_slower=False)
    try:
        for sample in tqdm(judged, desc="acceptance", unit="prompts", leave=False):
            begin = next(i for i, label in enumerate(sample["labels"]) if label != IGNORED)
            prompt = sample["input_ids"][: begin or max(1, len(sample["input_ids"]) // 4)]
            ids = torch.tensor([prompt], device=target.device)
            room = CONTINUED if context is None else min(CONTINUED, context - len(prompt))
            target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=drafter,
                max_new_tokens=room,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
                **stopping(target, tokenizer),
            )
            stats = stats + drafter.last_stats
    finally:
        drafter.speculation_config = options
    measured = {
        "mean_emitted": stats.mean_emitted,
        "acceptance_by_position": stats.acceptance_by_position,
        "samples": len(judged),
    }
    print(json.dumps(measured, indent=1))
    return {"acceptance": measured}


def answer_vocabulary(
    rows: Iterable[dict], size: int, tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel
) -> LongTensor:
    """Choose `size` ids: special ones, the most frequent of answers, and the lowest of the rest.

    Special ones are the tokenizer's, and those that end the target's texts. The rest are ids that
    never occur.

    Args:
        rows: the samples, from `encode_rows`.
        size: V', the number of ids.
        tokenizer, target: the models' own, whose special ids are always among them.

    Returns:
        int64 `(V',)`, rising.

    Raises:
        ValueError: there is no room for the special ids, or more is asked for than there is.
    """
    vocab_size = target.config.get_text_config().vocab_size
    special = [*tokenizer.all_special_ids, *end_tokens(target)]
    wanted = sorted({token for token in special if 0 <= token < vocab_size})
    if not len(wanted) < size <= vocab_size:
        raise ValueError(
            f"A vocabulary of {size} tokens: it must hold the {len(wanted)} special ones and some "
            f"more, and at most the target's {vocab_size}."
        )
    counts = Counter(label for row in rows for label in row["labels"] if label != IGNORED)
    frequent = (token for token, _ in counts.most_common())
    ranked = dict.fromkeys([*wanted, *frequent, *range(vocab_size)])
    return torch.tensor(sorted(list(ranked)[:size]))


def unused_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """Find an id whose embedding ordinary text does not use, to stand for "guess this token".

    Raises:
        ValueError: there is none.
    """
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    if len(tokenizer) < vocab_size:
        return vocab_size - 1
    used = {
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
    }
    template = tokenizer.chat_template or ""
    for token, content in sorted(tokenizer.added_tokens_decoder.items(), reverse=True):
        if (
            content.special
            and token not in used
            and str(content) not in template
            and token < vocab_size
        ):
            return token
    raise ValueError(
        "The tokenizer has no token that ordinary text does not use: add a mask token to it."
    )


@cache
def trains_in_bf16() -> bool:
    """Tell whether this hardware multiplies faster in bfloat16 than in float32.

    A CPU with such instructions is timed, once, with a thousand rows: a run that is resumed there
    goes on in the same format.
    """
    if torch.cuda.is_available() or fast_dtype() == torch.float32:
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    cpu = f"{torch.backends.cpu.get_cpu_capability()}-{torch.cpu._is_amx_tile_supported()}"
    note = Path(HF_HOME) / "paradraft" / f"bf16-{platform.node()}-{cpu}-{torch.__version__}"
    with suppress(OSError):
        return note.read_text() == "faster"
    faster = _seconds(torch.bfloat16) < FASTER * _seconds(torch.float32)
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text("faster" if faster else "slower")
    return faster


def _seconds(dtype: torch.dtype) -> float:
    """Time a matrix product of a training step's size, in seconds: the best of some runs."""
    rows, weight = torch.ones(1024, 512, dtype=dtype), torch.ones(1024, 512, dtype=dtype)
    return min(repeat(partial(linear, rows, weight), number=1, repeat=5))
