"""Model cards: a drafter's kind, its use here and in other engines, its training and its
measurements.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..files import hub_name, shipped
from ..report.tables import markdown, read_bench

TAGS = ["speculative-decoding", "draft-model", "assisted-generation", "paradraft"]


@dataclass(frozen=True)
class CardFields:
    """The fields that a kind of drafter hands its card.

    Attributes:
        template: its file in `hub_cards/`.
        library_name, relation: as the Hub names them; the latter is how the drafter came of its
            base model.
        base_model: the model it was made from, a name or a folder.
        kind: the beginning of the names of its own rows in `bench.json`.
        name: its folder's name, by which `bench` tells drafters of a kind apart.
        provenance: its use and its training.
        values: further values of the template.
    """

    template: str
    library_name: str
    relation: str
    base_model: str | None
    kind: str
    name: str
    provenance: Mapping[str, Any]
    values: Mapping[str, Any]


def _plain(values: Any) -> Any:
    """Keep only numbers and single words, and drop all other texts.

    Texts of a foreign config could be anything in a card's Markdown.
    """
    if isinstance(values, Mapping):
        plain = {name: _plain(value) for name, value in values.items()}
        return {name: value for name, value in plain.items() if value is not None}
    if isinstance(values, list):
        return [value for value in values if isinstance(value, int | float)]
    word = isinstance(values, str) and re.fullmatch(r"[\w-]{1,40}", values)
    return values if word or isinstance(values, int | float) else None


def _results(bench: list[dict[str, Any]], kind: str, name: str) -> list[EvalResult]:
    """Choose the card's headline: speed-up and τ of the drafter's best row at batch 1.

    The row is one of the lowest temperature, greedy where that was measured. Of several drafters of
    a kind it is that of the one whose folder has that name.
    """
    own = re.compile(rf"{re.escape(kind)}-(chain|tree|auto|[nk]\d)[^@]*(@{re.escape(name)})?")
    alone = [row for row in bench if own.fullmatch(row["method"]) and row["batch_size"] == 1]
    if not alone:
        return []
    best = min(alone, key=lambda row: (row["temperature"], -row["speedup"]))
    how = f"temperature {best['temperature']:g}" if best["temperature"] else "greedy"
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type="held-out-prompts",
            dataset_name="Held-out prompts",
            metric_type=metric,
            metric_name=f"{title} ({best['method']}, {how}, batch 1, against plain generate)",
            metric_value=round(best[metric], 2),
        )
        for metric, title in (("speedup", "Speed-up"), ("tau", "Tokens per round"))
    ]


def render_card(
    folder: Path, repo_id: str, fields: CardFields, license: str | None = None
) -> ModelCard:
    """Render the model card of the drafter in `folder`.

    Args:
        folder: a saved drafter. `bench.json`, if it is there, gives the measured table: write it
            with `paradraft bench --json`.
        repo_id: the repository it goes to.
        fields: the fields of its kind.
        license: as the Hub names it.

    Raises:
        OSError, ValueError: a damaged file.
    """
    bench, training = _bench(folder), fields.provenance["training"]
    base = hub_name(fields.base_model)
    results = _results(bench or [], fields.kind, fields.name)
    data = ModelCardData(
        license=license,
        library_name=fields.library_name,
        pipeline_tag="text-generation",
        base_model=base,
        base_model_relation=fields.relation if base else None,
        tags=TAGS,
        model_name=repo_id.split("/")[-1] if results else None,
        eval_results=results or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(shipped("hub_cards") / fields.template),
        repo_id=repo_id,
        base=base or "BASE-MODEL",
        target=hub_name(training.get("target")) or "TARGET-MODEL",
        training=_plain(training),
        options=fields.provenance.get("speculation_config") or {},  # checked when it was read
        measured=markdown(bench) if bench else None,
        environment=bench[0].get("environment") if bench else None,
        license=license,
        **fields.values,
    )


def _bench(folder: Path) -> list[dict[str, Any]] | None:
    """Read the benchmark records in a drafter's folder; None if it has none."""
    return read_bench(folder / "bench.json") if (folder / "bench.json").exists() else None


def plot_bench(folder: Path) -> Path | None:
    """Draw τ by task from the folder's `bench.json`, as `tau.png` next to it.

    It returns None where there is nothing to draw.
    """
    if (rows := _bench(folder)) is None:
        return None
    from ..report.figures import tau_by_task  # matplotlib is an extra

    tau_by_task(rows).savefig(folder / "tau.png", dpi=120)
    return folder / "tau.png"
