"""A drafter that reads features, as vLLM wants it: with the rows of its target's head that it
guesses by.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..drafters.formats.folder import DrafterFolder
from ..training.output import replace_model
from ..training.target import open_model

KINDS = ("dflash", "dspark", "eagle3")  # that vLLM reads in the speculators layout


def export_features(
    kind: Any, folder: DrafterFolder, output: Path, engine: str, target: str | None
) -> str:
    """Write a drafter with the rows of the target's head that it guesses by.

    The drafter guesses only a part of the target's tokens. Without these rows vLLM takes the
    target's whole head, and the drafter's ids for rows of it: then nothing is accepted.

    Args:
        kind: class of the drafter.
        folder: of the drafter.
        output: a new folder.
        engine: who loads it.
        target: folder or Hub id, whose head it is.

    Returns:
        The command line that uses it.

    Raises:
        ValueError: another engine, a drafter that is read as it is, or no target.
    """
    drafter = kind.load_folder(folder)
    if (
        engine != "vllm"
        or kind.kind not in KINDS
        or drafter.vocabulary is None
        or drafter.head is not None
    ):
        raise ValueError(
            f"This {kind.title} has no other form to be exported to: save_pretrained writes the "
            "speculators layout, which vLLM reads where it serves that kind, and transformers "
            "needs no export."
        )
    if target is None:
        raise ValueError(
            f"This {kind.title} guesses by rows of its target's head, which vLLM wants with it: "
            "pass --target."
        )
    drafter.attach(open_model(target, dtype=drafter.dtype))
    with torch.no_grad():
        rows = drafter.shared.head.weight[drafter.vocabulary].clone()
    drafter.shortlist = None  # vLLM would take its file for weights
    drafter.head = nn.Linear(*reversed(rows.shape), bias=False)
    drafter.head.weight = nn.Parameter(rows)
    replace_model(output, drafter.save_pretrained)
    count = drafter.speculation_config.num_draft_tokens
    options = {"method": kind.kind, "model": str(output), "num_speculative_tokens": count}
    return (
        f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(options))}"
    )
