"""The whole benchmark: measure, check equality, make records, write and print; a file in which a
stopped run can be continued.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy
import torch
import transformers
from rich.console import Console
from transformers import PreTrainedModel

from .. import __version__
from ..decoding.latency import measure as measure_latency
from ..decoding.tree_attention import attention_windows
from ..files import other_settings, read_json, write_json, write_whole
from ..hardware import device_name
from ..protocol import Drafter, SpeculationStats
from ..report.tables import table
from ..training.target import fingerprint
from .measure import STATISTICS, Measurement, Settings, bench, check_equality
from .methods import Method
from .questions import Prompt

# Fields of a `Measurement` that its record has, and its run does not repeat.
OF_RECORD = ("method", "batch_size", "temperature")


def environment(model: PreTrainedModel) -> str:
    """Name the dtype, versions, device and threads that figures are measured with."""
    dtype = str(model.dtype).removeprefix("torch.")
    versions = (
        f"hf_paradraft {__version__}, transformers {transformers.__version__}, torch "
        f"{torch.__version__}"
    )
    return f"{dtype}, {versions}, {device_name(model.device)}"


def records(results: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Summarise measurements as one record per method, batch size and temperature.

    Each has `method`, `batch_size`, `temperature`, `tokens`, `seconds` (the sum over prompts of the
    median over repeats), `tokens_per_second`, `speedup` (the mean over categories of the median
    over prompts), `speedup_quartiles` over all prompts, `tau` (tokens per row and target forward,
    the target's own included) and `tau_drafted` (the accepted drafts only: one less),
    `matches_reference` (share of prompts with plain's fp32 output, or None), `matches_here` (the
    same in the dtype that was measured), `by_category` and `tau_by_category`, `peak_bytes`, and
    `runs`: the measurements it was made from. Ours have `acceptance_by_position` and `time_split`
    too: the shares of the drafter, the target and the engine.
    """
    groups: dict[tuple[int, float], dict[str, list[Measurement]]] = {}
    for entry in results:
        group = groups.setdefault((entry.batch_size, entry.temperature), {})
        group.setdefault(entry.method, []).append(entry)
    return [
        _record(mine, next(iter(group.values())))
        for group in groups.values()
        for mine in group.values()
    ]


def _record(mine: list[Measurement], plain: list[Measurement]) -> dict[str, Any]:
    tokens = sum(entry.tokens for entry in mine)
    seconds = sum(median(entry.seconds) for entry in mine)
    # tokens per second over plain's, of each prompt
    every = [
        (ours.tokens / median(ours.seconds)) / (other.tokens / median(other.seconds))
        for ours, other in zip(mine, plain, strict=True)
    ]
    categories: dict[str, list[tuple[Measurement, float]]] = {}
    for entry, speedup in zip(mine, every, strict=True):
        categories.setdefault(entry.category, []).append((entry, speedup))
    by_category = {
        category: median(speedup for _, speedup in pairs) for category, pairs in categories.items()
    }
    tau = _tau(mine)
    made = {
        **{name: getattr(mine[0], name) for name in OF_RECORD},
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "speedup": mean(by_category.values()),
        "speedup_quartiles": numpy.quantile(every, (0.25, 0.5, 0.75)).tolist(),
        "tau": tau,
        "tau_drafted": tau - 1,
        "matches_reference": _share([entry.same for entry in mine]),
        "matches_here": _share([entry.same_here for entry in mine]),
        "by_category": by_category,
        "tau_by_category": {
            category: _tau([entry for entry, _ in pairs]) for category, pairs in categories.items()
        },
        "peak_bytes": max(entry.peak_bytes or 0 for entry in mine) or None,
    }
    if mine[0].draft_seconds is not None:
        made |= _time_and_acceptance(mine)
    runs = [
        {name: value for name, value in asdict(entry).items() if name not in OF_RECORD}
        for entry in mine
    ]
    return {**made, "runs": runs}


def _share(answers: Sequence[bool | None]) -> float | None:
    return None if None in answers else mean(answers)


def _tau(entries: Sequence[Measurement]) -> float:
    return sum(entry.tokens for entry in entries) / sum(entry.forwards for entry in entries)


def _time_and_acceptance(mine: list[Measurement]) -> dict[str, Any]:
    """Compute acceptance by draft position, and time shares of drafter, target and engine.

    Acceptance and shares are of our own rounds.
    """
    total = SpeculationStats()
    for entry in mine:
        total += SpeculationStats(**{name: getattr(entry, name) for name in STATISTICS})
    whole = sum(entry.seconds[-1] for entry in mine)
    draft, verify = total.draft_seconds / whole, total.verify_seconds / whole
    return {
        "acceptance_by_position": total.acceptance_by_position,
        "time_split": {"draft": draft, "verify": verify, "engine": 1 - draft - verify},
    }


class Unfinished:
    """The measurements of an unfinished run, in a file next to its results.

    The file has the results' name with `.part` after it: `results.json.part`.

    Args:
        file: the results, or None to keep nothing.
        settings: JSON values that must not change between the stop and the continuation.
    """

    def __init__(self, file: Path | None, settings: Mapping[str, Any]):
        self.file = None if file is None else file.with_name(f"{file.name}.part")
        self.settings = json.loads(json.dumps(settings))

    def load(self) -> list[Measurement]:
        """Load the results so far, if they were measured with these settings.

        Raises:
            ValueError: it was measured with other settings.
        """
        if self.file is None or not self.file.exists():
            return []
        saved = read_json(self.file)
        if not {"settings", "measurements"} <= saved.keys():
            raise ValueError(f"{self.file} holds no unfinished run: delete the file.")
        if not saved["measurements"]:
            return []
        if other := other_settings(saved["settings"], self.settings):
            raise ValueError(
                f"{self.file} holds an unfinished run with other settings ({other}): "
                "run with those again to finish it, or delete the file."
            )
        return [Measurement(**entry) for entry in saved["measurements"]]

    def save(self, results: list[Measurement]) -> None:
        """Write everything anew; a stop in between leaves the former file."""
        if self.file is not None:
            text = json.dumps(
                {"settings": self.settings, "measurements": [asdict(entry) for entry in results]}
            )
            write_whole(self.file, text)

    def finish(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the results, and forget the measurements."""
        if self.file is not None:
            write_json(self.file.with_suffix(""), rows)
            self.file.unlink(missing_ok=True)


def compare(
    target: PreTrainedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    console: Console,
    settings: Settings,
    pad_token_id: int | None = None,
    file: Path | None = None,
    equality: bool = True,
    reference: str = "",
) -> list[dict[str, Any]]:
    """Measure methods on prompts, print the tables and continue a run that was stopped.

    A stopped run goes on from the measurements in `FILE.part`, next to `file`.

    Args:
        target: the target on its device, in its dtype, in evaluation mode.
        methods: the methods, plain first.
        prompts: the prompts of all categories.
        console: the console for the tables.
        settings: lengths, batches, temperatures, repeats.
        pad_token_id: the padding token, needed for batches.
        file: the file for the records, as JSON.
        equality: whether outputs are compared in fp32 too, in a second pass; those of a quantised
            target never are.
        reference: the files that drafts are copied from; a run is continued only with the same
            ones, and with models of the same weights.

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
    unfinished = Unfinished(file, {**about, **asdict(settings), "reference": reference})
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
    """Fingerprint the weights of an assistant, or of its parts; the list is empty without any.

    Fingerprints tell an assistant from one of the same name that was trained anew.
    """
    if isinstance(assistant, torch.nn.Module):
        return [fingerprint(assistant)]
    if isinstance(assistant, torch.Tensor):
        return [fingerprint(torch.nn.ParameterList([assistant]))]
    parts = vars(assistant) if isinstance(assistant, Drafter) else assistant
    values = parts.values() if isinstance(parts, dict) else ()
    return [weights for part in values for weights in _weights(part)]
