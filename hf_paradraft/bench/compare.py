"""The whole benchmark: measure, check equality, write and print."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from ..decoding.latency import measure as measure_latency
from ..decoding.tree_attention import attention_windows
from ..report.tables import table
from ..training.target import fingerprint
from .measure import Settings, bench, check_equality
from .methods import Method
from .questions import Prompt
from .results import Unfinished, environment, records


def compare(
    target: PreTrainedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    console: Console,
    settings: Settings,
    pad_token_id: int | None = None,
    file: Path | None = None,
    equality: bool = True,
    names: Mapping[str, str | None] | None = None,
) -> list[dict[str, Any]]:
    """Measure methods on prompts, print the tables and continue a run that was stopped.

    A stopped run goes on from the measurements in `FILE.part`, next to `file`.

    Args:
        target: on its device, in its dtype, in evaluation mode.
        methods: plain first.
        prompts: of all categories.
        console: prints.
        settings: lengths, batches, temperatures, repeats.
        pad_token_id: needed for batches.
        file: gets the records as JSON.
        equality: compare outputs in fp32 too, in a second pass; a quantised target is never asked.
        names: of the models; a run is continued only with the same ones, and the same weights.

    Returns:
        One record per method, batch size and temperature; each with `environment`, the reference's
        with `latency` too, where a forward's time by its rows can be measured.

    Raises:
        OSError: the file cannot be written; said before anything is measured.
        ValueError: it belongs to another run, or two methods have one name.
    """
    digest = hashlib.sha256(
        str([(prompt.category, prompt.ids.tolist()) for prompt in prompts]).encode()
    ).hexdigest()
    about: dict[str, Any] = {
        "environment": environment(target),
        "methods": [method.name for method in methods],
        "prompts": digest,
        "target": fingerprint(target),
        "weights": {
            method.name: _weights(method.arguments.get("assistant_model")) for method in methods
        },
    }
    unfinished = Unfinished(file, {**about, **asdict(settings), "models": names})
    done = unfinished.load()
    if done:
        console.print(f"Going on with {unfinished.file}.")
    unfinished.save(done)
    if len({method.name for method in methods}) < len(methods):
        raise ValueError(f"Two methods have one name: {', '.join(about['methods'])}.")
    results = bench(target, methods, prompts, settings, pad_token_id, done, unfinished.save)
    if equality and getattr(target.config, "quantization_config", None) is None:
        try:
            check_equality(
                target, methods, prompts, settings, results, pad_token_id, unfinished.save
            )
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(
                error
            ):
                raise
            console.print(
                "There is not enough memory for the target in float32: whether outputs are equal "
                "is left open."
            )
    rows = [{**row, "environment": about["environment"]} for row in records(results)]
    if attention_windows(target) is not None:
        rows[0]["latency"] = asdict(measure_latency(target))
    unfinished.finish(rows)
    console.print(table(rows, f"{len(prompts)} prompts, up to {settings.max_new_tokens} tokens"))
    console.print(about["environment"], style="dim")
    return rows


def _weights(assistant: Any) -> list[str]:
    """Fingerprint an assistant's weights; the list is empty without weights.

    Fingerprints tell an assistant from one of the same name that was trained anew.
    """
    parts = (
        [assistant]
        if isinstance(assistant, torch.nn.Module)
        else vars(assistant).values()
        if assistant is not None
        else ()
    )
    modules = [
        torch.nn.ParameterList([part]) if isinstance(part, torch.Tensor) else part for part in parts
    ]
    return [fingerprint(module) for module in modules if isinstance(module, torch.nn.Module)]
