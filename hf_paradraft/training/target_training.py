"""Training on a frozen target that runs in the same process: the options, vocabularies and number
formats of such runs.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from timeit import repeat
from typing import Any, ClassVar

import torch
from huggingface_hub.constants import HF_HOME
from torch import LongTensor
from torch.nn.functional import linear
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..chat import end_tokens
from ..files import hub_name
from ..hardware import fast_dtype
from ..protocol.drafter import FeatureKey
from .losses import LOSSES, Loss
from .metrics import acceptance_of
from .rows import IGNORED
from .run import RunInputs, TrainingOptions, option
from .target import open_fast
from .target_states import TargetStates

logger = logging.get_logger(__name__)
JUDGED = 32  # evaluation rows whose acceptance is measured
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

    @property
    def source(self) -> str:
        """Implement `TrainingOptions.source`."""
        return self.target

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
        return acceptance_of(drafter, inputs.model, inputs, JUDGED)


def answer_vocabulary(
    rows: Iterable[dict], size: int, tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel
) -> LongTensor:
    """Choose the `size` most frequent ids of answers, special ids included.

    Ids that end a text are included too.

    Args:
        rows: the samples, from `encode_rows`.
        size: V', the number of ids.
        tokenizer, target: the models' own, whose special ids are always among them.

    Returns:
        int64 `(V',)`, rising.

    Raises:
        ValueError: as for `most_frequent`.
    """
    texts = ([label for label in row["labels"] if label != IGNORED] for row in rows)
    always = [*tokenizer.all_special_ids, *end_tokens(target)]
    return most_frequent(texts, size, always, target.config.get_text_config().vocab_size)


def most_frequent(
    texts: Iterable[Iterable[int]], size: int, always: Iterable[int], vocab_size: int
) -> LongTensor:
    """Choose `size` ids: those in `always`, the most frequent, then the lowest of the rest.

    The rest are ids that never occur. All are sorted in rising order.

    Args:
        texts: the ids that the target has written, by text.
        size: V', the number of ids.
        always: the ids that have to be in: ends of texts, and other special ones.
        vocab_size: V, the size of the target's vocabulary.

    Raises:
        ValueError: there is no room for `always`, or more is asked for than there is.
    """
    wanted = sorted({token for token in always if 0 <= token < vocab_size})
    if not len(wanted) < size <= vocab_size:
        raise ValueError(
            f"A vocabulary of {size} tokens: it must hold the {len(wanted)} special ones and some "
            f"more, and at most the target's {vocab_size}."
        )
    counts = Counter(token for text in texts for token in text)
    ranked = dict.fromkeys(
        [*wanted, *(token for token, _ in counts.most_common()), *range(vocab_size)]
    )
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
