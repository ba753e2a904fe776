"""One training run, from files to an adapter: what `paradraft train ppd` does."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from transformers import AutoTokenizer
from transformers.utils import logging

from ...hardware import fast_dtype
from ...hub.card import hub_name
from ...training.arguments import check_context, training_arguments
from ...training.data import encode_rows, load_rows
from ...training.output import check_output, drop, drop_old_checkpoints, left_from_before
from ...training.target import open_model, refuse_packed
from ...whole_files import write_whole
from .calibration import calibrate
from .config import PpdConfig
from .drafter import PpdDrafter
from .training import PpdTrainer, PpdTraining

logger = logging.get_logger(__name__)


def train_ppd(
    model: str | Path,
    train_file: str | Path,
    output_dir: Path,
    eval_file: str | Path | None = None,
    num_prompt_tokens: int = 3,
    num_ensembles: int = 1,
    points: int = 32,
    decay: float = 0.8,
    hard_labels: bool = False,
    max_length: int = 512,
    resume: bool = False,
    overwrite: bool = False,
    **arguments: Any,
) -> PpdDrafter:
    """Train prompt tokens for `model`; the adapter and a record of its training are saved in `output_dir`.

    Args:
        model: folder or Hub id of the causal LM, with its tokenizer; it is not changed.
        train_file: JSON lines or a Hub dataset, as for `load_rows`; best answered by the model itself.
        output_dir: new or empty, unless `resume` or `overwrite`.
        eval_file: rows for the accuracy at each distance, and to calibrate with.
        num_prompt_tokens: m.
        num_ensembles: E.
        points: where prompts are inserted in each text, at most.
        decay: α.
        hard_labels: see `PpdTraining`.
        max_length: tokens of a sample at most.
        resume: continue from the last checkpoint.
        overwrite: use a folder that has files.
        arguments: of `TrainingArguments`.

    Raises:
        ValueError, OSError: something about the inputs is wrong; nothing has been written then.
    """
    options = PpdTraining(points, decay, hard_labels)
    config = PpdConfig(num_prompt_tokens=num_prompt_tokens, num_ensembles=num_ensembles)
    output_dir = Path(output_dir)
    checkpoint = check_output(output_dir, resume, overwrite, model)
    usual = {"learning_rate": 1e-2, "lr_scheduler_type": "cosine"}  # the paper's
    training = training_arguments(output_dir, usual, arguments)
    refuse_packed(model, "prompt tokens are trained for ordinary ones")
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    train_set = encode_rows(load_rows(train_file), tokenizer, max_length)
    eval_set = encode_rows(load_rows(eval_file), tokenizer, max_length) if eval_file else None
    torch.manual_seed(arguments.get("seed", 42))  # the prompts' first values
    dtype = fast_dtype()
    logger.warning("The model is run in %s, which this hardware is fast at.", str(dtype).removeprefix("torch."))
    base = open_model(model, dtype=dtype)
    check_context(base.config, max_length)
    adapted = get_peft_model(base, config)
    trainer = PpdTrainer(
        adapted,
        training,
        options,
        train_dataset=train_set,
        eval_dataset=eval_set,
        processing_class=tokenizer,
    )
    if overwrite:
        drop_old_checkpoints(output_dir)
    trainer.train(resume_from_checkpoint=checkpoint)
    record: dict[str, Any] = {
        "method": "ppd",
        "base_model": hub_name(str(model)),
        "samples": len(train_set),
        "steps": trainer.state.global_step,
        "points": points,
        "decay": decay,
        "hard_labels": hard_labels,
        "seed": trainer.args.seed,
    }
    adapted.eval()
    first = trainer.is_world_process_zero()
    if first:
        begun, left = time.time() - 1, left_from_before(output_dir) if overwrite else []
        _save(adapted, record, output_dir)  # before anything else is measured, which may fail
        drop(left, begun)
    if eval_set is not None:
        record["eval"] = trainer.evaluate()
        if first:
            print(json.dumps(record["eval"], indent=1))
            try:
                calibrate(adapted, eval_set)
            except ValueError as error:
                logger.warning("The adapter is saved without calibration. %s", error)
            _save(adapted, record, output_dir)
    return PpdDrafter.from_model(adapted)


def _save(adapted: PeftModel, record: dict[str, Any], output_dir: Path) -> None:
    made = output_dir / ".new"  # PEFT would write its card into an old one
    adapted.save_pretrained(made)
    for file in made.iterdir():
        file.replace(output_dir / file.name)
    made.rmdir()
    write_whole(output_dir / "paradraft.json", json.dumps({"training": record}, indent=1) + "\n")
