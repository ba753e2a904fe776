"""Training on a frozen target that runs in the same process: what the runs of such drafters
share.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import torch
from huggingface_hub.constants import HF_HOME
from torch import LongTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..files import hub_name
from ..hardware import fast_dtype
from ..protocol.drafter import FeatureKey
from .losses import LOSSES, Loss
from .metrics import acceptance
from .run import RunInputs, TrainingOptions, option
from .target import open_model
from .target_states import TargetStates
from .vocabulary import answer_vocabulary

logger = logging.get_logger(__name__)
JUDGED = 32  # evaluation rows whose acceptance is measured
FASTER = 0.8  # of the seconds in float32: less is worth another format


@dataclass(kw_only=True)
class TargetTraining(TrainingOptions):
    """Options of a drafter that stands on its target."""

    recorded: ClassVar[tuple[str, ...]] = ("loss",)

    target: str = option(
        "The causal LM to speed up: folder, Hub id or .gguf file. It is not changed."
    )
    target_id: str | None = option(
        "The target's name on the Hub, where it is loaded from a folder.", None
    )
    vocab: int | None = option(
        "V': tokens that are guessed, the answers' most frequent; default: all.", None, least=1
    )
    loss: Loss = option(LOSSES, "tv")
    cache_dir: Path | None = option(
        "Keep the target's states of every text here: it runs once for all epochs.", None
    )
    cache_gb: float | None = option(
        "Size of that folder in GB, at most; default: 50.", None, least=0
    )

    @property
    def source(self) -> str:
        """Implement `TrainingOptions.source`."""
        return self.target

    @property
    def sources(self) -> tuple[str | Path | None, ...]:
        """Implement `TrainingOptions.sources`."""
        return (self.target, None if self.cache_dir is None else Path(self.cache_dir))

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
        dtype = fast_dtype()
        logger.warning(
            "The target is run in %s, which this hardware is fast at.",
            str(dtype).removeprefix("torch."),
        )
        if hub_name(self.target_id or self.target) is None:
            logger.warning(
                "The drafter will not say which model it is for, and other engines ask: "
                "--target-id ORG/NAME names %s.",
                self.target,
            )
        return open_model(self.target, whole=True, dtype=dtype).to(device).requires_grad_(False)

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
        folder = None if self.cache_dir is None else Path(self.cache_dir)
        size = {} if self.cache_gb is None else {"max_bytes": self.cache_gb * 1e9}
        return TargetStates(inputs.model, keys, vocabulary, folder, **size)

    @property
    def models(self) -> dict[str, str | None]:
        """Implement `TrainingOptions.models`."""
        return {"target": hub_name(self.target_id or self.target)}

    def measure(self, drafter: Any, inputs: RunInputs) -> dict[str, Any]:
        """Measure the acceptance of chains on evaluation rows."""
        assert inputs.eval_set is not None
        judged = inputs.eval_set.select(range(min(JUDGED, len(inputs.eval_set))))
        measured = acceptance(inputs.model, drafter, inputs.tokenizer, judged)
        print(json.dumps(measured, indent=1))
        return {"acceptance": measured}


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
    seconds = []
    for _ in range(5):
        begun = perf_counter()
        torch.nn.functional.linear(rows, weight)
        seconds.append(perf_counter() - begun)
    return min(seconds)
