"""Which recipe teaches a ParallelSpec drafter most in equal minutes of one core: losses, starts, optimisers, depths.

`python examples/studies/recipes.py states --target … --train-file …` runs the target once over all texts;
`… trial --target … --train-file … --recipe lk --minutes 3 --seed 0 --json trials.jsonl` adds one line to a file;
`… table trials.jsonl` prints them as Markdown.
"""

import json
import random
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from datasets import Dataset
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paradraft import ParallelSpecDrafter
from hf_paradraft.hardware import fast_dtype, trains_in_bf16
from hf_paradraft.training.data import IGNORED, encode_rows, load_rows
from hf_paradraft.training.losses import cross_entropy, rejection
from hf_paradraft.training.row_trainer import CodConfig, RowCollator
from hf_paradraft.training.target_states import TargetStates
from hf_paradraft.training.vocabulary import answer_vocabulary

app = typer.Typer(help=__doc__)
HELD_OUT = 100  # texts that are measured with
LENGTH = 512


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        loss: `tv` (0.1 cross-entropy, 0.9 total variation), `ce`, `kl`, `lk` (`-log Σ min(p, q)`), `hybrid` (KL while cold, then
            total variation).
        near: weight of the distance to the target's states.
        start: of the layer: `random`, or `last`, the target's last one.
        optimiser: `adamw`, or `muon` for the matrices.
        rate: peak learning rate; of Muon as AdamW would have it.
        masks: M.
        dropping: r of conditional output dropping.
        decay: λ of the weight of further guesses; `pace`: by how sure the guesses before are (D-PACE).
        prompts: whether the user's turns are learned too.
    """

    loss: str = "tv"
    near: float = 1.0
    start: str = "random"
    optimiser: str = "adamw"
    rate: float = 1e-3
    masks: int = 2
    dropping: float = 0.6
    decay: float | str = 0.7
    prompts: bool = False


BASE = Recipe()
RECIPES = {
    "tv": BASE,
    "ce": replace(BASE, loss="ce"),
    "kl": replace(BASE, loss="kl"),
    "lk": replace(BASE, loss="lk"),
    "hybrid": replace(BASE, loss="hybrid"),
    "lk, no distance of states": replace(BASE, loss="lk", near=0.0),
    "lk, D-PACE": replace(BASE, loss="lk", decay="pace"),
    "lk, 2e-3": replace(BASE, loss="lk", rate=2e-3),
    "lk, Muon": replace(BASE, loss="lk", optimiser="muon", rate=2e-3),
    "lk, Muon 5e-3": replace(BASE, loss="lk", optimiser="muon", rate=5e-3),
    "lk, from the last layer": replace(BASE, loss="lk", start="last"),
    "lk, one mask": replace(BASE, loss="lk", masks=1),
    "lk, user's turns too": replace(BASE, loss="lk", prompts=True),
}


def row_losses(recipe: Recipe, logits: Tensor, labels: Tensor, p: Tensor) -> Tensor:
    """Of each guess, `(n,)`; `logits`, `p` `(n, V')`."""
    if recipe.loss == "ce":
        return cross_entropy(logits, labels)
    q = logits.softmax(-1)
    if recipe.loss == "lk":
        return -torch.minimum(p, q).sum(-1).clamp(min=1e-6).log()
    if recipe.loss == "tv":
        return 0.1 * cross_entropy(logits, labels) + 0.9 * rejection(logits, p)
    kl = (p * ((p + 1e-12).log() - logits.log_softmax(-1))).sum(-1)
    if recipe.loss == "kl":
        return kl
    share = (-3 * (1 - rejection(logits, p)).detach()).exp()
    return share * kl + (1 - share) * rejection(logits, p)


def pace(losses: Tensor, group: Tensor, depths: Tensor, count: int) -> Tensor:
    """D-PACE's weights `(n,)`: sums over later guesses of the product of how sure the guesses up to there are, halfway to 1."""
    sure = torch.ones(int(group.max()) + 1, count)
    there = torch.zeros_like(sure, dtype=torch.bool)
    sure[group, depths], there[group, depths] = 0.5 * (-losses).exp() + 0.5, True
    products = sure.cumprod(1) * there
    return products.flip(1).cumsum(1).flip(1)[group, depths]


def optimisers(drafter: ParallelSpecDrafter, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon takes matrices of layers alone."""
    parameters = {name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    matrices = [p for name, p in parameters.items() if recipe.optimiser == "muon" and p.ndim == 2 and "mask" not in name]
    others = [p for p in parameters.values() if not any(p is matrix for matrix in matrices)]
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=1e-3 if matrices else recipe.rate, betas=(0.9, 0.95), weight_decay=0)
    ]
    if matrices:
        made.append(torch.optim.Muon(matrices, lr=recipe.rate, weight_decay=0, adjust_lr_fn="match_rms_adamw"))
    return made


class Lessons:
    """Rows of texts beside the target's states."""

    def __init__(self, states: TargetStates, collator: RowCollator):
        self.states, self.collator = states, collator

    def __call__(self, drafter: ParallelSpecDrafter, samples: list[dict], probabilities: bool) -> dict[str, Tensor]:
        """Of all guesses with a label: `logits`, `states`, `labels`, `depths`, `group` (of one beginning), `p`, `wanted`."""
        batch = self.collator(samples)
        labels = batch.pop("labels")
        text = batch["depths"] == 0
        with torch.no_grad():
            states = self.states(batch["input_ids"][:, text.any(0)], text.sum(1))
        features = F.pad(states["normed"][:, :-1].float(), (0, 0, 1, labels.shape[1] - states["normed"].shape[1]))
        learned = labels != IGNORED
        rows = learned.nonzero(as_tuple=True)[0]
        with torch.autocast("cpu", torch.bfloat16, enabled=trains_in_bf16()):
            logits, guessed = drafter(**batch, columns=torch.arange(labels.shape[1]), features=features)
        positions, depths = batch["position_ids"][learned], batch["depths"][learned]
        begins = rows * LENGTH + positions - depths
        result = {
            "logits": logits[learned].float(),
            "states": guessed[learned].float(),
            "labels": labels[learned],
            "depths": depths,
        }
        result["group"] = begins.unique(return_inverse=True)[1]
        if probabilities:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=trains_in_bf16()):
                result["p"] = self.states.probabilities(states, rows, positions)
            result["wanted"] = states["normed"][rows, positions].float()
        return result


@torch.no_grad()
def measured(drafter: ParallelSpecDrafter, states: TargetStates, held_out: list[dict]) -> dict[str, float]:
    """How often each guess is what the target wrote, if those before it are, and τ of chains, teacher-forced."""
    count = drafter.most_drafts
    lessons = Lessons(states, RowCollator(0, CodConfig(count, 1.0, 1.0), 0, True, drafter.vocabulary))
    right = torch.zeros(count)
    total = 0
    for begin in range(0, len(held_out), 4):
        made = lessons(drafter.eval(), held_out[begin : begin + 4], False)
        correct = torch.zeros(int(made["group"].max()) + 1, count)
        correct[made["group"], made["depths"]] = (made["logits"].argmax(-1) == made["labels"]).float()
        right += correct.cumprod(1).sum(0)
        total += len(correct)
    rates = (right / total).tolist()
    chances = [rate / before if before else 0.0 for rate, before in zip(rates, [1.0, *rates], strict=False)]
    return {"tau": 1 + sum(rates), **{f"guess {depth}": chance for depth, chance in enumerate(chances, 1)}}


def opened(target: str, train_file: list[Path]) -> tuple:
    """The target, its tokenizer and the texts."""
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=fast_dtype(), trust_remote_code=False).requires_grad_(False)
    rows = [row for file in train_file for row in load_rows(file)]
    return model, tokenizer, encode_rows(rows, tokenizer, LENGTH)


def split(data: Dataset) -> tuple[list[dict], list[dict]]:
    """To train on, and to measure with."""
    order = random.Random(1).sample(range(len(data)), len(data))
    rows = [data[index] for index in order]
    return rows[HELD_OUT:], rows[:HELD_OUT]


Target = Annotated[str, typer.Option(help="The causal LM.")]
TrainFile = Annotated[list[Path], typer.Option(help="Its answers; repeatable.")]
Cache = Annotated[Path, typer.Option(help="Keeps its states.")]


@app.command()
def states(target: Target, train_file: TrainFile, cache_dir: Cache = Path("build/states")) -> None:
    """Run the target once over all texts: trials begin with the same."""
    torch.set_num_threads(1)
    model, _, data = opened(target, train_file)
    keeper = TargetStates(model, ("normed",), None, cache_dir)
    rows = sorted((data[index] for index in range(len(data))), key=lambda row: row["length"])
    for begin in tqdm(range(0, len(rows), 8)):
        lengths = [row["length"] for row in rows[begin : begin + 8]]
        ids = torch.zeros((len(lengths), max(lengths) + -max(lengths) % 64), dtype=torch.long)
        for index, row in enumerate(rows[begin : begin + 8]):
            ids[index, : row["length"]] = torch.tensor(row["input_ids"])
        keeper(ids, torch.tensor(lengths))


@app.command()
def trial(
    target: Target,
    train_file: TrainFile,
    recipe: Annotated[str, typer.Option(help=f"One of: {'; '.join(RECIPES)}.")] = "tv",
    minutes: float = 3.0,
    seed: int = 0,
    vocab: int = 8000,
    batch_size: int = 8,
    points: Annotated[int, typer.Option(help="So often it is measured on the way.")] = 1,
    begin_with: Annotated[Path | None, typer.Option(help="A drafter that is trained further.")] = None,
    output_dir: Annotated[Path | None, typer.Option(help="Keeps the drafter, at each point.")] = None,
    json_file: Annotated[Path, typer.Option("--json", help="A line is added for each point.")] = Path("build/trials.jsonl"),
    cache_dir: Cache = Path("build/states"),
) -> None:
    """Train with one recipe for so many minutes of one core, and measure."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, tokenizer, data = opened(target, train_file)
    train_set, held_out = split(data)
    chosen = RECIPES[recipe]
    if begin_with is None:
        vocabulary = answer_vocabulary(train_set, vocab, tokenizer, model)
        drafter = ParallelSpecDrafter.from_target(model, "eagle", chosen.masks, 1, vocabulary).float()
        if chosen.start == "last":
            drafter.stack.layers[0].load_state_dict(model.model.layers[-1].state_dict())
    else:
        drafter = ParallelSpecDrafter.from_pretrained(begin_with, dtype=torch.float32)
        drafter.attach(model)
    if chosen.prompts:
        train_set = [{**row, "labels": [IGNORED, *row["input_ids"][1:]]} for row in train_set]
    keeper = TargetStates(model, ("normed",), drafter.vocabulary, cache_dir)
    collator = RowCollator(0, CodConfig(drafter.most_drafts, chosen.dropping, 0.2), seed, True, drafter.vocabulary)
    lessons, steppers = Lessons(keeper, collator), optimisers(drafter, chosen)
    peaks = [[group["lr"] for group in stepper.param_groups] for stepper in steppers]
    order, spent, steps, point = random.Random(seed), 0.0, 0, 1
    waiting: list[list[dict]] = []
    while spent < 60 * minutes:
        if not waiting:  # an epoch: texts of similar length together
            rows = order.sample(train_set, len(train_set))
            groups = [
                sorted(rows[begin : begin + 16 * batch_size], key=lambda row: row["length"])
                for begin in range(0, len(rows), 16 * batch_size)
            ]
            waiting = [group[begin : begin + batch_size] for group in groups for begin in range(0, len(group), batch_size)]
            order.shuffle(waiting)
            collator.epoch += 1
        begun = process_time()
        for stepper, rates in zip(steppers, peaks, strict=True):
            for group, peak in zip(stepper.param_groups, rates, strict=True):
                group["lr"] = peak * min(1.0, (steps + 1) / 20) * (1 - spent / (60 * minutes))
        made = lessons(drafter.train(), waiting.pop(), True)
        losses = row_losses(chosen, made["logits"], made["labels"], made["p"])
        losses = losses + chosen.near * F.smooth_l1_loss(made["states"], made["wanted"], reduction="none").mean(-1)
        if chosen.decay == "pace":
            weights = pace(
                cross_entropy(made["logits"], made["labels"]).detach(), made["group"], made["depths"], drafter.most_drafts
            )
        else:
            weights = float(chosen.decay) ** made["depths"]
        (losses * weights).mean().backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        spent, steps = spent + process_time() - begun, steps + 1
        if spent >= 60 * minutes * point / points:
            point += 1
            figures = {name: round(value, 4) for name, value in measured(drafter, keeper, held_out).items()}
            line = {"recipe": recipe, "minutes": round(spent / 60, 2), "of": minutes, "seed": seed, "steps": steps, **figures}
            print(line, flush=True)
            with json_file.open("a") as file:
                file.write(json.dumps(line) + "\n")
            if output_dir is not None:
                drafter.save_pretrained(output_dir)


@app.command()
def table(trials: Path) -> None:
    """Means over seeds at the end of each trial, best τ first."""
    by_recipe = defaultdict(list)
    for line in map(json.loads, trials.read_text().splitlines()):
        if line["minutes"] >= line["of"]:
            by_recipe[line["recipe"], line["of"]].append(line)
    print("| recipe | minutes | seeds | steps | first guesses | second, if the first is right | τ |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for (recipe, minutes), lines in sorted(by_recipe.items(), key=lambda item: -mean(line["tau"] for line in item[1])):
        first, second, tau = (mean(line[name] for line in lines) for name in ("guess 1", "guess 2", "tau"))
        steps = mean(line["steps"] for line in lines)
        print(f"| {recipe} | {minutes:g} | {len(lines)} | {steps:.0f} | {first:.1%} | {second:.1%} | {tau:.3f} |")


if __name__ == "__main__":
    app()
