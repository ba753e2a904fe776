"""Train a head that looks at the token before, on top of a drafter that guesses in parallel and stays as it is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainingArguments
from transformers.utils import logging

from ..files import local_folder
from ..hardware import fast_dtype
from ..hub.card import hub_name
from ..training.arguments import check_context, training_arguments
from ..training.data import encode_rows, load_rows
from ..training.losses import cross_entropy
from ..training.metrics import acceptance
from ..training.output import check_output, drop, drop_old_checkpoints, left_from_before
from ..training.row_trainer import CodConfig, RowCollator, RowTrainer
from ..training.target import open_model, open_tokenizer
from .kinds import kind_of_folder
from .markov import MarkovHead
from .parallelspec.model import ParallelSpecDrafter
from .parallelspec.training import before_each, text_states
from .pard.model import PardDrafter
from .pard.training import read_rows
from .target_states import TargetStates

logger = logging.get_logger(__name__)
SAMPLES = 32  # of which τ is measured


class MarkovTrainer(RowTrainer):
    """Cross-entropy of a frozen drafter's logits with the head's bias.

    Args:
        model: the head.
        args: any `TrainingArguments`.
        collator: of the drafter's rows.
        logits: the drafter's, `(B, C, V')` for a batch and columns.
        kwargs: as for `Trainer`, with datasets from `encode_rows`.
    """

    def __init__(
        self,
        model: MarkovHead,
        args: TrainingArguments,
        collator: RowCollator,
        logits: Callable[[dict[str, Any], Tensor], Tensor],
        **kwargs: Any,
    ):
        super().__init__(model, args, collator, **kwargs)
        self.logits = logits

    def row_losses(
        self, model: Any, inputs: dict[str, Any], labels: Tensor, depths: Tensor, columns: Tensor
    ) -> tuple[Tensor, Any]:
        """As `RowTrainer.row_losses`. Rows of depth 0 come first, so a row's position is the column of the token before."""
        before = inputs["input_ids"].gather(1, inputs["position_ids"][:, columns])
        with torch.no_grad():
            logits = self.logits(inputs, columns).float()
        logits = logits + model(before, logits)[0]
        return cross_entropy(logits, labels), logits


def train_markov(
    drafter: str | Path,
    train_file: str | Path,
    output_dir: Path,
    target: str | Path | None = None,
    eval_file: str | Path | None = None,
    rank: int = 64,
    num_depths: int = 8,
    max_length: int = 512,
    resume: bool = False,
    overwrite: bool = False,
    **arguments: Any,
) -> PardDrafter | ParallelSpecDrafter:
    """Train a head for `drafter`; the drafter with its head is saved in `output_dir`.

    Args:
        drafter: folder or Hub id of a PARD or ParallelSpec drafter; it is not changed.
        train_file: JSON lines or a Hub dataset, as for `load_rows`; best answered by the target.
        output_dir: new or empty, unless told otherwise.
        target: folder or Hub id of its causal LM, which a ParallelSpec drafter stands on. With `eval_file`, τ is measured
            against it, with the head and without.
        eval_file: rows for the loss by depth, and the prompts of the acceptance.
        rank: r, of the head.
        num_depths: K, of a PARD drafter; a ParallelSpec drafter has its own.
        max_length: tokens of a sample at most.
        resume: continue from the last checkpoint.
        overwrite: use a folder that has files.
        arguments: of `TrainingArguments`.

    Raises:
        ValueError, OSError: something about the inputs is wrong; nothing has been written then.
    """
    if rank < 1:
        raise ValueError(f"A head has a rank of at least 1, but rank is {rank}.")
    output_dir = Path(output_dir)
    checkpoint = check_output(output_dir, resume, overwrite)
    training = training_arguments(output_dir, {"learning_rate": 3e-3}, arguments)
    folder = local_folder(drafter, {})
    kind = kind_of_folder(folder)
    if kind.name not in ("pard", "parallelspec"):
        raise ValueError(f"{drafter} is no drafter that guesses in parallel without such a head, but: {kind.title}.")
    model: Any = kind.load(folder, dtype=torch.float32)
    if isinstance(model, PardDrafter) and model.projection is not None:
        raise ValueError("A PARD-2 drafter's head would have to know the target's states too: this is not served.")
    if target is None and isinstance(model, ParallelSpecDrafter):
        raise ValueError("A ParallelSpec drafter stands on its target: pass --target.")
    check_context(model.config if isinstance(model, PardDrafter) else model.config.layer_config, max_length, "drafter")
    if target is not None and eval_file is None and isinstance(model, PardDrafter):
        raise ValueError("Acceptance against a target is measured on evaluation rows: pass an evaluation file too.")
    model.forget_head()
    tokenizer = open_tokenizer(folder if isinstance(model, PardDrafter) else target)
    train_set = encode_rows(load_rows(train_file), tokenizer, max_length)
    eval_set = encode_rows(load_rows(eval_file), tokenizer, max_length) if eval_file else None
    judge: Any = None
    if target is not None:
        dtype = fast_dtype()
        logger.warning("The target is run in %s, which this hardware is fast at.", str(dtype).removeprefix("torch."))
        judge = open_model(target, whole=True, dtype=dtype)
        judge = judge.to(training.device).requires_grad_(False)
    model = model.to(training.device).eval().requires_grad_(False)
    if isinstance(model, PardDrafter):
        depths, mask, size = num_depths, model.mask_token_id, model.config.get_text_config().vocab_size
        attention = model.config._attn_implementation

        def logits(inputs: dict[str, Any], columns: Tensor) -> Tensor:
            return read_rows(model, inputs, columns, attention, model.dtype).logits
    else:
        model.attach(judge)
        states = TargetStates(judge, ("normed",))
        depths, mask, size = model.most_drafts, 0, model.config.vocab_size

        def logits(inputs: dict[str, Any], columns: Tensor) -> Tensor:
            features = None
            if model.reads_features:
                features = before_each(text_states(states, inputs)["normed"], inputs["input_ids"], model.dtype)
            return model(**inputs, columns=columns, features=features)[0]

    torch.manual_seed(training.seed)
    head = MarkovHead(size, size if model.vocabulary is None else len(model.vocabulary), rank, 0)
    collator = RowCollator(mask, CodConfig(depths, 0.7, 0.2), training.seed, True, model.vocabulary)
    trainer = MarkovTrainer(head, training, collator, logits, train_dataset=train_set, eval_dataset=eval_set)
    if overwrite:
        drop_old_checkpoints(output_dir)
    begun = time.time()
    trainer.train(resume_from_checkpoint=checkpoint)
    record: dict[str, Any] = {
        "drafter": hub_name(str(drafter)),
        "rank": rank,
        "samples": len(train_set),
        "steps": trainer.state.global_step,
        "learning_rate": training.learning_rate,
        "seed": training.seed,
        "seconds": round(time.time() - begun, 1),
    }
    _give(model, head)
    _save(model, record, tokenizer, output_dir, trainer, overwrite)  # before anything else is measured, which may fail
    if eval_set is None:
        return model
    record["eval"] = trainer.evaluate()
    if judge is not None:
        some = eval_set.select(range(min(SAMPLES, len(eval_set))))
        record["acceptance"] = acceptance(judge, model, tokenizer, some)
        model.forget_head()
        record["acceptance_without"] = acceptance(judge, model, tokenizer, some)
        _give(model, head)
        print(json.dumps({name: record[name]["mean_emitted"] for name in ("acceptance_without", "acceptance")}, indent=1))
    _save(model, record, tokenizer, output_dir, trainer, False)
    return model


def _save(model: Any, record: dict[str, Any], tokenizer: Any, output_dir: Path, trainer: MarkovTrainer, overwrite: bool) -> None:
    if not trainer.is_world_process_zero():
        return
    since, left = time.time() - 1, left_from_before(output_dir) if overwrite else []
    model.config.paradraft = {**model.paradraft, "markov": record}
    model.save_pretrained(output_dir)
    if isinstance(model, PardDrafter):
        tokenizer.save_pretrained(output_dir)
    drop(left, since)


def _give(model: PardDrafter | ParallelSpecDrafter, head: MarkovHead) -> None:
    """Let the drafter use the head."""
    if isinstance(model, PardDrafter):
        model.__dict__["markov"] = head.eval()
    else:
        model.add_head(head.rank).load_state_dict(head.state_dict())
        model.to(head.before.weight.device)
