"""One training run, from files to a drafter: what `paradraft train pard` does."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import find_adapter_config_file

from ...hub.card import hub_name
from ...training.arguments import check_context, training_arguments
from ...training.data import encode_rows, load_rows
from ...training.metrics import acceptance
from ...training.output import check_output, drop, drop_old_checkpoints, left_from_before
from ...training.row_trainer import CodConfig
from ...training.target import is_packed, refuse_packed, refuse_trimmed
from .config import MASK_KEYS
from .model import PardDrafter
from .training import PardTrainer


def train_pard(
    model: str | Path,
    train_file: str | Path,
    output_dir: Path,
    mask_token_id: int | None = None,
    eval_file: str | Path | None = None,
    target: str | Path | None = None,
    num_depths: int = 8,
    cod_ratio: float = 0.7,
    cod_min_ratio: float = 0.2,
    max_length: int = 512,
    resume: bool = False,
    overwrite: bool = False,
    **arguments: Any,
) -> PardDrafter:
    """Teach `model` to draft in parallel; the drafter, its tokenizer and its record are saved in `output_dir`.

    Args:
        model: folder or Hub id of a causal LM with its tokenizer.
        train_file: JSON lines or a Hub dataset, as for `load_rows`.
        output_dir: new or empty, unless `resume` or `overwrite`.
        mask_token_id: default: what the config says, else the tokenizer's mask token.
        eval_file: rows for the loss by depth, and the prompts of the acceptance.
        target: a model to measure acceptance by position against, after training; needs `eval_file`.
        num_depths: K of training.
        cod_ratio: r.
        cod_min_ratio: r_min.
        max_length: tokens of a sample at most.
        resume: continue from the last checkpoint; the run is the same as an uninterrupted one.
        overwrite: use a folder that has files.
        arguments: of `TrainingArguments`.

    Raises:
        ValueError, OSError: something about the inputs is wrong; nothing has been written then.
    """
    cod = CodConfig(num_depths, cod_ratio, cod_min_ratio)
    usual = {
        "weight_decay": 0.01,
        "adam_beta2": 0.95,
        "bf16": torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
    }
    output_dir = Path(output_dir)
    checkpoint = check_output(output_dir, resume, overwrite, model, target)
    training = training_arguments(output_dir, usual, arguments)
    if target is not None:
        if eval_file is None:
            raise ValueError("Acceptance against a target is measured on evaluation rows: pass an evaluation file too.")
        if not is_packed(target) and find_adapter_config_file(target) is None:
            # If there is no such model, say so before training.
            refuse_trimmed(AutoConfig.from_pretrained(target, trust_remote_code=False).to_dict(), target)
    refuse_packed(model, "a PARD drafter is trained of ordinary ones")
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    drafter = _load(model, mask_token_id, tokenizer.mask_token_id)
    check_context(drafter.config, max_length)
    train_set = encode_rows(load_rows(train_file), tokenizer, max_length)
    eval_set = encode_rows(load_rows(eval_file), tokenizer, max_length) if eval_file else None
    trainer = PardTrainer(
        drafter,
        training,
        cod,
        train_dataset=train_set,
        eval_dataset=eval_set,
        processing_class=tokenizer,
    )
    if overwrite:
        drop_old_checkpoints(output_dir)
    trainer.train(resume_from_checkpoint=checkpoint)
    options = drafter.speculation_config
    options.num_draft_tokens = max(options.num_draft_tokens, num_depths)
    record: dict[str, Any] = {
        "method": "pard",
        "base_model": hub_name(str(model)),
        "target": hub_name(str(target)),
        "num_depths": num_depths,
        "cod_ratio": cod_ratio,
        "cod_min_ratio": cod_min_ratio,
        "samples": len(train_set),
        "steps": trainer.state.global_step,
        "learning_rate": trainer.args.learning_rate,
        "seed": trainer.args.seed,
    }
    drafter.config.paradraft = {**drafter.paradraft, "training": record}
    begun, left = time.time() - 1, left_from_before(output_dir) if overwrite else []
    trainer.save_model(str(output_dir))  # before anything else is measured, which may fail
    if trainer.is_world_process_zero():
        drop(left, begun)
    if eval_set is not None:
        record["eval"] = trainer.evaluate()
    if target is not None:
        record["acceptance"] = acceptance(target, drafter, tokenizer, eval_set.select(range(min(64, len(eval_set)))))
        print(json.dumps(record["acceptance"], indent=1))
    if trainer.is_world_process_zero():
        drafter.config.save_pretrained(output_dir)
    return drafter


def _load(model: str | Path, mask_token_id: int | None, fallback: int | None) -> PardDrafter:
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    if mask_token_id is None and all(getattr(config, key, None) is None for key in MASK_KEYS):
        mask_token_id = fallback
    attention = {"attn_implementation": "flex_attention"} if torch.cuda.is_available() else {}  # no mask of R² entries
    # Master weights are fp32: AdamW's small steps vanish in bf16.
    return PardDrafter.from_causal_lm(model, mask_token_id=mask_token_id, dtype=torch.float32, **attention)
