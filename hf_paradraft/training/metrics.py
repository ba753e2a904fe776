"""The measure of training: how much of a drafter's work a target accepts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..chat import learned_context, stopping
from ..protocol import SpeculationStats
from .rows import IGNORED
from .run import RunInputs
from .target import open_model


def acceptance_of(
    drafter: PreTrainedModel, target: PreTrainedModel | str | Path, inputs: RunInputs, count: int
) -> dict[str, Any]:
    """Measure and print the acceptance on the first `count` evaluation rows, for the record."""
    judged = inputs.eval_set.select(range(min(count, len(inputs.eval_set))))
    measured = acceptance(target, drafter, inputs.tokenizer, judged)
    print(json.dumps(measured, indent=1))
    return {"acceptance": measured}


def acceptance(
    target: PreTrainedModel | str | Path,
    drafter: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Dataset,
    max_new_tokens: int = 128,
) -> dict[str, Any]:
    """Measure the greedy acceptance of a drafter's chains against `target`.

    Each sample is continued from its first labelled token.

    Args:
        target: a model, or its folder or Hub id.
        drafter: the drafter to measure.
        tokenizer: the target's, for the padding id.
        samples: rows from `encode_rows`; texts labelled throughout are continued from their first
            quarter.
        max_new_tokens: the new tokens of a sample, at most; fewer if the target's context is full.

    Returns:
        `mean_emitted` (τ, bonus included), `acceptance_by_position` and `samples`.
    """
    if not isinstance(target, PreTrainedModel):
        target = open_model(target, dtype=drafter.dtype)
    target = target.to(next(drafter.parameters()).device).eval()
    options = drafter.eval().speculation_config
    stats, context = SpeculationStats(), learned_context(target)
    # chains, and every round counts
    drafter.speculation_config = replace(options, tree_size=None, never_slower=False)
    try:
        for sample in tqdm(samples, desc="acceptance", unit="prompts", leave=False):
            begin = next(i for i, label in enumerate(sample["labels"]) if label != IGNORED)
            prompt = sample["input_ids"][: begin or max(1, len(sample["input_ids"]) // 4)]
            ids = torch.tensor([prompt], device=target.device)
            room = max_new_tokens if context is None else min(max_new_tokens, context - len(prompt))
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
    return {
        "mean_emitted": stats.mean_emitted,
        "acceptance_by_position": stats.acceptance_by_position,
        "samples": len(samples),
    }
