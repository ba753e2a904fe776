"""What every training run here wants of `transformers.TrainingArguments`."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, TrainingArguments


def check_context(config: PreTrainedConfig, max_length: int) -> None:
    """Refuse samples that a model has no positions for.

    Args:
        config: of the model.
        max_length: tokens of a sample at most.

    Raises:
        ValueError: they are longer than its context.
    """
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and max_length > context:
        raise ValueError(f"max_length={max_length} is longer than the model's context of {context} tokens: lower it.")


def training_arguments(output_dir: Path, defaults: dict[str, Any], asked: dict[str, Any]) -> TrainingArguments:
    """The arguments of a run: what all methods start from, then what one method usually takes, then what is asked for."""
    common = {
        "report_to": "none",
        "logging_steps": 20,
        "save_total_limit": 2,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    return TrainingArguments(output_dir=str(output_dir), **{**common, **defaults, **asked})
