"""Which recipe teaches a drafter most in equal minutes of one core: losses, weights of far guesses,
starts, optimisers.

`python examples/studies/recipes.py states --target … --train-file …` runs the target once over all
texts; `… trial mtp --target … --train-file … --recipe lk --minutes 3 --seed 0` adds lines to
`trials.jsonl`, one at each point; `… table trials.jsonl` prints their ends as Markdown, and `…
picture trials.jsonl curve.png` draws τ over minutes.
"""

import copy
import json
import random
from collections import defaultdict
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from statistics import mean, stdev
from time import process_time
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset
from lessons import LENGTH, Anchored, Rows, loss_of, low_rank_head, measured, tree_tau, untrained
from recipe import CHANGES, KINDS, Kind
from transformers import AutoTokenizer, PreTrainedModel

from hf_paradraft import DSparkDrafter
from hf_paradraft.drafters.eagle3.config import Eagle3Config
from hf_paradraft.hardware import fast_dtype
from hf_paradraft.training.data import IGNORED, encode_rows
from hf_paradraft.training.source import load_rows
from hf_paradraft.training.target import open_model
from hf_paradraft.training.target_states import TargetStates
from hf_paradraft.training.target_training import (
    answer_vocabulary,
    trains_in_bf16,
    unused_token,
)

app = typer.Typer(help=__doc__)
HELD_OUT = 100  # texts that are measured with


def opened(target: str, train_file: list[Path]) -> tuple[PreTrainedModel, Any, Dataset]:
    """The target, its tokenizer and the texts."""
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    model = open_model(target, whole=True, dtype=fast_dtype()).requires_grad_(False)
    rows = [row for file in train_file for row in load_rows(file)]
    return model, tokenizer, encode_rows(rows, tokenizer, LENGTH)


def split(data: Dataset) -> tuple[list[dict], list[dict]]:
    """To train on, and to measure with."""
    order = random.Random(1).sample(range(len(data)), len(data))
    rows = [data[index] for index in order]
    return rows[HELD_OUT:], rows[:HELD_OUT]


def keys_of(target: PreTrainedModel, tokenizer: Any) -> tuple:
    """The states that some kind reads."""
    mask = unused_token(tokenizer, target.config.vocab_size)
    eagle = Eagle3Config.for_target(target, 1).features
    return tuple(
        dict.fromkeys(
            (
                *DSparkDrafter.from_target(target, mask).features,
                *eagle,
                len(target.model.layers) - 1,
                "normed",
            )
        )
    )


Target = Annotated[str, typer.Option(help="The causal LM.")]
TrainFile = Annotated[list[Path], typer.Option(help="Its answers; repeatable.")]
Cache = Annotated[Path, typer.Option(help="Keeps its states.")]


@app.command()
def states(target: Target, train_file: TrainFile, cache_dir: Cache = Path("build/states")) -> None:
    """Run the target once over all texts: trials begin with the same."""
    torch.set_num_threads(1)
    model, tokenizer, _ = opened(target, train_file)
    keeper = TargetStates(model, keys_of(model, tokenizer), None, cache_dir)
    for file in train_file:
        keeper.keep(file, tokenizer, LENGTH)


@app.command()
def trial(
    kind: Kind,
    target: Target,
    train_file: TrainFile,
    recipe: Annotated[str, typer.Option(help=f"One of: {'; '.join(CHANGES)}.")] = "tv",
    minutes: float = 3.0,
    seed: int = 0,
    batch_size: int = 8,
    points: Annotated[int, typer.Option(help="So often it is measured on the way.")] = 1,
    json_file: Annotated[
        Path, typer.Option("--json", help="A line is added for each point.")
    ] = Path("build/trials.jsonl"),
    cache_dir: Cache = Path("build/states"),
) -> None:
    """Train with one recipe for so many minutes of one core, and measure."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, tokenizer, data = opened(target, train_file)
    train_set, held_out = split(data)
    chosen = replace(KINDS[kind], **CHANGES[recipe])
    if chosen.near and kind == "dspark":
        raise typer.BadParameter(
            "Blocks are not fed with states of their own, so these need not be near the target's."
        )
    wanted = chosen.vocabulary
    everything = wanted is None or wanted >= model.config.vocab_size
    vocabulary = None if everything else answer_vocabulary(train_set, wanted, tokenizer, model)
    drafter, module = untrained(kind, chosen, model, tokenizer, vocabulary)
    if chosen.prompts:
        train_set = [{**row, "labels": [IGNORED, *row["input_ids"][1:]]} for row in train_set]
    lessons = Rows if kind == "parallelspec" else Anchored
    keeper = TargetStates(
        model,
        drafter.features if kind != "parallelspec" else ("normed",),
        drafter.vocabulary,
        cache_dir,
    )
    if chosen.rank is not None:
        drafter.head = low_rank_head(keeper, chosen.rank, train_set[:100])
    taught = lessons(module, keeper, chosen, seed, False)
    judged = lessons(module, keeper, chosen, seed, True)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=trains_in_bf16())
    parameters = {
        name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad
    }
    matrices = [
        p for name, p in parameters.items() if chosen.muon and p.ndim == 2 and "proj" in name
    ]
    others = [p for p in parameters.values() if all(p is not matrix for matrix in matrices)]
    steppers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=chosen.rate, betas=(0.9, 0.95), weight_decay=0)
    ]
    if matrices:
        steppers.append(
            torch.optim.Muon(
                matrices, lr=chosen.muon_rate, weight_decay=0, adjust_lr_fn="match_rms_adamw"
            )
        )
    peaks = [stepper.param_groups[0]["lr"] for stepper in steppers]
    order, spent, steps, point = random.Random(seed), 0.0, 0, 1
    waiting: list[list[dict]] = []
    while spent < 60 * minutes:
        if not waiting:  # an epoch: texts of similar length together
            rows = order.sample(train_set, len(train_set))
            groups = [
                sorted(rows[begin : begin + 16 * batch_size], key=lambda row: row["length"])
                for begin in range(0, len(rows), 16 * batch_size)
            ]
            waiting = [
                group[begin : begin + batch_size]
                for group in groups
                for begin in range(0, len(group), batch_size)
            ]
            order.shuffle(waiting)
            taught.collator.epoch += 1
        begun = process_time()
        for stepper, peak in zip(steppers, peaks, strict=True):
            stepper.param_groups[0]["lr"] = (
                peak * min(1.0, (steps + 1) / 20) * (1 - spent / (60 * minutes))
            )
        drafter.train()
        with autocast:
            made = taught(waiting.pop())
        loss_of(chosen, made, 1 - spent / (60 * minutes)).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        spent, steps = spent + process_time() - begun, steps + 1
        if spent >= 60 * minutes * point / points:
            point += 1
            drafter.eval()
            with autocast:
                figures = measured(judged, held_out, chosen.guesses)
            if spent >= 60 * minutes:
                beside = copy.deepcopy(drafter).to(model.dtype)
                beside.attach(model)
                figures["tree"] = tree_tau(model, beside, held_out, chosen.guesses)
            figures = {name: round(value, 4) for name, value in figures.items()}
            line = {
                "kind": kind,
                "recipe": recipe,
                "minutes": round(spent / 60, 2),
                "of": minutes,
                "seed": seed,
                "steps": steps,
            }
            print({**line, **figures}, flush=True)
            with json_file.open("a") as file:
                file.write(json.dumps({"target": Path(target).name, **line, **figures}) + "\n")


def ends(trials: Path) -> dict[tuple, list[dict]]:
    """The last line of each trial, by what was trained and how."""
    by_recipe = defaultdict(list)
    for line in map(json.loads, trials.read_text().splitlines()):
        if line["minutes"] >= line["of"]:
            by_recipe[line["target"], line["kind"], line["of"], line["recipe"]].append(line)
    return by_recipe


@app.command()
def table(trials: Path) -> None:
    """Means over seeds at the end of each trial, best τ of chains first, with its spread; then the
    τ of trees.
    """
    print(
        "| target | drafter | recipe | minutes | seeds | steps | first guesses | second, behind it "
        "| τ | trees | sampled |"
    )
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for (target, kind, minutes, recipe), lines in sorted(
        ends(trials).items(),
        key=lambda item: (*item[0][:3], -mean(line["tau"] for line in item[1])),
    ):
        first, second, tau, steps = (
            [line.get(name, 0.0) for line in lines]
            for name in ("guess 1", "guess 2", "tau", "steps")
        )
        spread = f" ± {stdev(tau):.3f}" if len(tau) > 1 else ""
        trees, sampled = (
            [line[name] for line in lines if name in line] for name in ("tree", "sampled")
        )
        more = f"{mean(trees):.3f} | {mean(sampled):.1%}" if sampled else " | "
        print(
            f"| {target} | {kind} | {recipe} | {minutes:g} | {len(lines)} | {mean(steps):.0f} | "
            f"{mean(first):.1%} | {mean(second):.1%} | {mean(tau):.3f}{spread} | {more} |"
        )


@app.command()
def picture(trials: Path, file: Path) -> None:
    """Draw τ over minutes, a line for each trial that was measured on its way, and a point for each
    other one.
    """
    from matplotlib.figure import Figure  # an extra

    lines = defaultdict(list)
    for line in map(json.loads, trials.read_text().splitlines()):
        lines[line["kind"], line["recipe"], line["seed"], line["of"]].append(
            (line["minutes"], line["tau"])
        )
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    colours = dict(zip(KINDS, ("tab:orange", "tab:green", "tab:blue"), strict=True))
    named: set[str] = set()
    markers = cycle("s^vD")
    for (kind, recipe, *_), points in lines.items():
        label = f"{kind}, {recipe}" if len(points) > 1 else f"{kind}, short trials"
        label = "" if label in named else label
        style = {
            "marker": next(markers) if len(points) > 1 else "o",
            "markersize": 5,
            "color": colours[kind],
        }
        axes.plot(*zip(*sorted(points), strict=True), label=label, **style)
        named.add(label)
    axes.set(xlabel="minutes of training", ylabel="τ of chains of three, teacher-forced")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    app()
