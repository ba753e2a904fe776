"""Model cards: what a drafter is, how to use it here and in other engines, what it was trained on and what it measured."""

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..bench.report import markdown
from ..drafters.pard.config import MASK_KEYS
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
    ours = [row for row in bench if row["method"].startswith(("pard", "ppd"))]
    if not ours:
        return []
    best = max(ours, key=lambda row: row["speedup"])
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
    bench, training = _bench(folder), provenance.get("training", {})
    base = hub_name(training.get("base_model") or (config.get("base_model_name_or_path") if adapter else None))
    results = _results(bench or [])
    data = ModelCardData(
        license=license,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=base,
        base_model_relation=("adapter" if adapter else "finetune") if base else None,
        tags=TAGS,
        model_name=repo_id.split("/")[-1] if results else None,
        eval_results=results or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(shipped("hub_cards") / ("ppd.jinja" if adapter else "pard.jinja")),
        repo_id=repo_id,
        config=config,
        base=base or "BASE-MODEL",
        target=hub_name(training.get("target")) or "TARGET-MODEL",
        num_draft_tokens=provenance.get("speculation_config", {}).get("num_draft_tokens", 12),
        training=training,
        mask_token_id=next((config[key] for key in MASK_KEYS if config.get(key) is not None), None),
        measured=markdown(bench) if bench else None,
        environment=bench[0].get("environment") if bench else None,
        license=license,
    )


def read_bench(file: Path) -> list[dict[str, Any]]:
    """Records of `paradraft bench --json`.

    Raises:
        OSError: there is no such file.
        ValueError: it is something else.
    """
    if not file.is_file():
        raise OSError(f"There is no file {file}: paradraft bench --json writes one.")
    rows = read_json(file, list)
    wanted = {"method", "batch_size", "temperature", "tokens_per_second", "speedup", "speedup_quartiles", "tau", "by_category"}
    wanted |= {"tau_by_category", "matches_reference"}
    if not rows or not all(isinstance(row, dict) and wanted <= row.keys() for row in rows):
        raise ValueError(f"{file} is not what this version's paradraft bench --json writes: measure again.")
    return rows


def _bench(folder: Path) -> list[dict[str, Any]] | None:
    """The folder's own records, if it has some."""
    return read_bench(folder / "bench.json") if (folder / "bench.json").exists() else None


def plot_bench(folder: Path) -> Path | None:
    """Draw τ by task from the folder's `bench.json`, as `tau.png` beside it; None where there is nothing to draw."""
    if (rows := _bench(folder)) is None:
        return None
    from ..bench.plots import tau_by_task

    tau_by_task(rows).savefig(folder / "tau.png", dpi=120)
    return folder / "tau.png"
