"""What every training run here wants of `transformers.TrainingArguments`."""

from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments


def training_arguments(output_dir: Path, usual: dict[str, Any], asked: dict[str, Any]) -> TrainingArguments:
    """The arguments of a run: what all methods start from, then what one method usually takes, then what is asked for."""
    common = {
        "report_to": "none",
        "logging_steps": 20,
        "save_total_limit": 2,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    return TrainingArguments(output_dir=str(output_dir), **{**common, **usual, **asked})
