"""One training run of a drafter that stands on its target, which is frozen and runs in the same process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import LongTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.utils import logging

from ..hardware import fast_dtype
from ..hub.card import hub_name
from ..protocol.drafter import FeatureKey
from ..training.arguments import check_context, training_arguments
from ..training.data import IGNORED, encode_rows, load_rows
from ..training.metrics import acceptance
from ..training.output import check_output, drop, drop_old_checkpoints, left_from_before
from ..training.target import open_model, open_tokenizer
from .pard.trim import most_frequent
from .target_states import TargetStates

logger = logging.get_logger(__name__)


@dataclass
class Setting:
    """What a kind makes its drafter and its trainer of.

    Attributes:
        target: frozen, on the device where it is trained.
        tokenizer: the target's.
        arguments: of the run.
        train_set, eval_set: from `encode_rows`.
        vocabulary: int64 `(V',)`, or None.
        cache_dir, cache_gb: of the target's states, where they are kept.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    arguments: TrainingArguments
    train_set: Dataset
    eval_set: Dataset | None
    vocabulary: LongTensor | None
    cache_dir: Path | None = None
    cache_gb: float = 50.0

    def states(self, keys: Sequence[FeatureKey]) -> TargetStates:
        """What a trainer asks the target."""
        return TargetStates(self.target, keys, self.vocabulary, self.cache_dir, self.cache_gb * 1e9)


def train_on_target(
    method: str,
    make: Callable[[Setting], tuple[Any, Trainer]],
    target: str | Path,
    train_file: str | Path,
    output_dir: Path,
    eval_file: str | Path | None = None,
    vocab: int | None = None,
    max_length: int = 512,
    cache_dir: str | Path | None = None,
    cache_gb: float = 50.0,
    resume: bool = False,
    overwrite: bool = False,
    usual: dict[str, Any] | None = None,
    record: dict[str, Any] | None = None,
    finish: Callable[[Any, Setting], None] | None = None,
    **arguments: Any,
) -> Any:
    """Train what `make` makes; the drafter and its record are saved in `output_dir`.

    Args:
        method: its name.
        make: an untrained drafter, attached, and its trainer.
        target: folder, Hub id or `.gguf` file of the causal LM, with its tokenizer; it is not changed.
        train_file: JSON lines or a Hub dataset, as for `load_rows`; best answered by the target itself.
        output_dir: new or empty, unless `resume` or `overwrite`.
        eval_file: rows for the loss by depth, and the prompts of the acceptance.
        vocab: V', tokens that the drafter guesses: those that the answers have most often; default: all.
        max_length: tokens of a sample at most.
        cache_dir: a folder that keeps the target's states of every text, `hidden` numbers of each layer that is read for each
            token, so that the target runs once for all epochs and drafters; default: it runs every time.
        cache_gb: of that folder, at most; what is beyond is run every time.
        resume: continue from the last checkpoint.
        overwrite: use a folder that has files.
        usual: what the method's paper takes for `arguments`.
        record: more to keep of this run.
        finish: what is left to do with a trained drafter, given evaluation rows: a calibration.
        arguments: of `TrainingArguments`.

    Raises:
        ValueError, OSError: something about the inputs is wrong; nothing has been written then.
    """
    output_dir = Path(output_dir)
    checkpoint = check_output(output_dir, resume, overwrite, target, cache_dir)
    training = training_arguments(output_dir, {"learning_rate": 5e-4, **(usual or {})}, arguments)
    tokenizer = open_tokenizer(target)
    train_set = encode_rows(load_rows(train_file), tokenizer, max_length)
    eval_set = encode_rows(load_rows(eval_file), tokenizer, max_length) if eval_file else None
    dtype = fast_dtype()
    logger.warning("The target is run in %s, which this hardware is fast at.", str(dtype).removeprefix("torch."))
    model = open_model(target, whole=True, dtype=dtype)
    model = model.to(training.device).requires_grad_(False)
    check_context(model.config, max_length, "target")
    vocabulary = None
    if vocab is not None:
        texts = ([label for label in row["labels"] if label != IGNORED] for row in train_set)
        ends = model.generation_config.eos_token_id
        always = [*tokenizer.all_special_ids, *(ends if isinstance(ends, list) else [] if ends is None else [ends])]
        vocabulary = most_frequent(texts, vocab, always, model.config.get_text_config().vocab_size)
    torch.manual_seed(training.seed)
    folder = None if cache_dir is None else Path(cache_dir)
    setting = Setting(model, tokenizer, training, train_set, eval_set, vocabulary, folder, cache_gb)
    drafter, trainer = make(setting)
    if overwrite:
        drop_old_checkpoints(output_dir)
    begun = time.time()
    trainer.train(resume_from_checkpoint=checkpoint)
    kept: dict[str, Any] = {
        "method": method,
        "target": hub_name(str(target)),
        "samples": len(train_set),
        "steps": trainer.state.global_step,
        "learning_rate": training.learning_rate,
        "seed": training.seed,
        "seconds": round(time.time() - begun, 1),
        **(record or {}),
    }
    drafter.eval()
    _save(drafter, kept, output_dir, overwrite, trainer)  # before anything else is measured, which may fail
    if eval_set is not None:
        kept["eval"] = trainer.evaluate()
        drafter.eval()
        if finish is not None:
            finish(drafter, setting)
            kept |= drafter.paradraft.get("training", {})
        kept["acceptance"] = acceptance(model, drafter, tokenizer, eval_set.select(range(min(32, len(eval_set)))))
        print(json.dumps(kept["acceptance"], indent=1))
        _save(drafter, kept, output_dir, False, trainer)
    return drafter


def _save(drafter: Any, record: dict[str, Any], output_dir: Path, overwrite: bool, trainer: Trainer) -> None:
    if not trainer.is_world_process_zero():
        return
    begun, left = time.time() - 1, left_from_before(output_dir) if overwrite else []
    drafter.remember(record)
    drafter.save_pretrained(output_dir)
    drop(left, begun)


def unused_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """An id whose embedding ordinary text does not use, to stand for "guess this token".

    Raises:
        ValueError: there is none.
    """
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    if len(tokenizer) < vocab_size:
        return vocab_size - 1
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    template = tokenizer.chat_template or ""
    for token, content in sorted(tokenizer.added_tokens_decoder.items(), reverse=True):
        if content.special and token not in used and str(content) not in template and token < vocab_size:
            return token
    raise ValueError("The tokenizer has no token that ordinary text does not use: add a mask token to it.")
