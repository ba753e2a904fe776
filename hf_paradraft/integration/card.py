"""Model cards: what a drafter is, how to use it here and in other engines, what it was trained on and what it measured."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..bench.report import markdown
from .files import read_json, shipped

TAGS = ["speculative-decoding", "draft-model", "assisted-generation", "paradraft"]


def hub_name(name: str | None) -> str | None:
    """`name` if it can be a repository on the Hub; None for a folder's path, which means nothing to anyone else."""
    if name is None or "/" not in name or Path(name).exists():
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _results(bench: list[dict[str, Any]]) -> list[EvalResult]:
    best = max(bench, key=lambda row: row["speedup"])
    common = {"task_type": "text-generation", "dataset_type": "held-out-prompts", "dataset_name": "Held-out prompts"}
    name = f"{best['method']}, against plain generate"
    return [
        EvalResult(**common, metric_type="speedup", metric_name=f"Speed-up ({name})", metric_value=round(best["speedup"], 2)),
        EvalResult(**common, metric_type="tau", metric_name=f"Tokens per round ({name})", metric_value=round(best["tau"], 2)),
    ]


def render_card(folder: Path, repo_id: str, license: str | None = None) -> ModelCard:
    """The card of the drafter in `folder`.

    Args:
        folder: a saved PARD drafter or PPD adapter. `bench.json`, if it is there, gives the measured table: write it with
            `paradraft bench --json`.
        repo_id: where it goes.
        license: as the Hub names it.

    Raises:
        OSError, ValueError: the folder holds no drafter, or a damaged file.
    """
    adapter = (folder / "adapter_config.json").exists()
    config = read_json(folder / ("adapter_config.json" if adapter else "config.json"))
    provenance = read_json(folder / "paradraft.json") if (folder / "paradraft.json").exists() else config.get("paradraft") or {}
    bench = read_json(folder / "bench.json") if (folder / "bench.json").exists() else None
    base = hub_name(config.get("base_model_name_or_path") if adapter else provenance.get("training", {}).get("base_model"))
    data = ModelCardData(
        license=license,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=base,
        base_model_relation=("adapter" if adapter else "finetune") if base else None,
        tags=TAGS,
        model_name=repo_id.split("/")[-1] if bench else None,
        eval_results=_results(bench) if bench else None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(shipped("hub_cards") / ("ppd.jinja" if adapter else "pard.jinja")),
        repo_id=repo_id,
        config=config,
        base=base or "BASE-MODEL",
        target=hub_name(provenance.get("training", {}).get("target")) or base or "TARGET-MODEL",
        num_draft_tokens=provenance.get("speculation_config", {}).get("num_draft_tokens", 12),
        training=provenance.get("training", {}),
        measured=markdown(bench) if bench else None,
        environment=bench[0].get("environment") if bench else None,
        license=license,
    )


def plot_bench(folder: Path) -> Path | None:
    """Draw τ by task from the folder's `bench.json`, as `tau.png` beside it; None where there is nothing to draw."""
    if not (folder / "bench.json").exists():
        return None
    from ..bench.report import plot

    file = folder / "tau.png"
    plot(json.loads((folder / "bench.json").read_text()), file, "tau")
    return file
