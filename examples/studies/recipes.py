"""Which recipe teaches a drafter most in equal minutes of one core: losses, weights of far guesses, starts, optimisers.

`python examples/studies/recipes.py states --target … --train-file …` runs the target once over all texts;
`… trial mtp --target … --train-file … --recipe lk --minutes 3 --seed 0` adds lines to `trials.jsonl`, one at each point;
`… table trials.jsonl` prints their ends as Markdown, and `… picture trials.jsonl curve.png` draws τ over minutes.
"""

import copy
import json
import random
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from statistics import mean, stdev
from time import process_time
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
import typer
from datasets import Dataset
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedModel

from hf_paradraft import DSparkDrafter, Eagle3Drafter, MtpDrafter, ParallelSpecDrafter, SpeculationConfig, SpeculationStats
from hf_paradraft.drafters.blocks.training import Blocks
from hf_paradraft.drafters.eagle3.config import Eagle3Config
from hf_paradraft.drafters.mtp.model import MtpStep
from hf_paradraft.hardware import fast_dtype, trains_in_bf16
from hf_paradraft.training.anchors import AnchorCollator
from hf_paradraft.training.data import IGNORED, encode_rows, load_rows
from hf_paradraft.training.losses import cross_entropy, rejection
from hf_paradraft.training.row_trainer import CodConfig, RowCollator
from hf_paradraft.training.target import open_model
from hf_paradraft.training.target_states import TargetStates
from hf_paradraft.training.target_training import unused_token
from hf_paradraft.training.unrolled import Unrolled
from hf_paradraft.training.vocabulary import answer_vocabulary

app = typer.Typer(help=__doc__)
Kind = Literal["parallelspec", "mtp", "dspark", "eagle3"]
HELD_OUT = 100  # texts that are measured with
LENGTH = 320
TREE_PROMPTS = 12  # whose answers are drafted by trees


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        guesses: behind each place of a text.
        fading: weight of each guess, of that before it; None: by how sure those before are (D-PACE).
        places: of a text from which is guessed, at most; ParallelSpec guesses from all.
        near: weight of the distance to the target's states, of drafters that are fed with them.
        loss: `tv` (0.1 cross-entropy, 0.9 total variation), `half` of both, `ce`, `kl`, `lk` (`-log Σ min(p, q)`), `hybrid` (KL
            while cold, then total variation).
        end: share of the training, at its end, that has the expected number of accepted guesses as its loss.
        own: share of the training, at its end, that adds Draft-OPD's loss on its own guesses, up to the first wrong one:
            what is behind is never asked for, and up to there the text's distributions are those of the verification.
        prefix: whether nothing is learned behind the first guess that is wrong.
        start: of the layer: `random`, or `last`, the target's last one.
        muon: as optimiser of matrices, with its rate; AdamW has the others.
        rate: peak learning rate.
        vocabulary: tokens that are guessed, the answers' most frequent; None, or as many as there are: all.
        rank: of a head `U (V h)` of its own, learned from the target's best one of that rank on (SlimSpec); None: the target's.
        dropping: r of ParallelSpec's conditional output dropping.
        prompts: whether the user's turns are learned too.
        norms: whether EAGLE-3 has a norm for each state that it reads and feeds back a normed one (EAGLE-3.1).
        last: whether the last layer is the high one that EAGLE-3 reads.
        layers: of EAGLE-3.
    """

    guesses: int
    fading: float | None
    places: int = 32
    near: float = 0.0
    loss: str = "tv"
    end: float = 0.0
    own: float = 0.0
    prefix: bool = False
    start: str = "random"
    muon: bool = False
    muon_rate: float = 2e-3
    rate: float = 1e-3
    vocabulary: int | None = 8000
    rank: int | None = None
    dropping: float = 0.6
    prompts: bool = False
    norms: bool = False
    last: bool = False
    layers: int = 1


KINDS: dict[str, Recipe] = {
    "parallelspec": Recipe(3, 0.7, near=1.0),
    "mtp": Recipe(3, 0.6),
    "dspark": Recipe(7, 0.78),
    "eagle3": Recipe(3, 0.6, muon=True, rate=2e-3),
}
CHANGES: dict[str, dict[str, Any]] = {
    "tv": {},
    "ce": {"loss": "ce"},
    "kl": {"loss": "kl"},
    "lk": {"loss": "lk"},
    "hybrid": {"loss": "hybrid"},
    "D-PACE": {"fading": None},
    "expected length at the end": {"end": 0.2},
    "own guesses at the end": {"own": 0.1},
    "valid prefix": {"prefix": True},
    "Muon": {"muon": True},
    "Muon, lk": {"muon": True, "loss": "lk"},
    "Muon 4e-3": {"muon": True, "muon_rate": 4e-3},
    "Muon, 2e-3 for all": {"muon": True, "rate": 2e-3},
    "Muon, 16 places": {"muon": True, "places": 16},
    "Muon, 4,000 tokens": {"muon": True, "vocabulary": 4000},
    "Muon, all tokens": {"muon": True, "vocabulary": None},
    "Muon, all tokens by rank 96": {"muon": True, "vocabulary": None, "rank": 96},
    "Muon, rank 128": {"muon": True, "rank": 128},
    "Muon, ce": {"muon": True, "loss": "ce"},
    "Muon, hybrid": {"muon": True, "loss": "hybrid"},
    "Muon, half": {"muon": True, "loss": "half"},
    "Muon, D-PACE": {"muon": True, "fading": None},
    "Muon, valid prefix": {"muon": True, "prefix": True},
    "Muon, expected length at the end": {"muon": True, "end": 0.2},
    "Muon, own guesses at the end": {"muon": True, "own": 0.1},
    "Muon, from the last layer": {"muon": True, "start": "last"},
    "rate 5e-4": {"rate": 5e-4},
    "rate 2e-3": {"rate": 2e-3},
    "from the last layer": {"start": "last"},
    "16 places": {"places": 16},
    "96 places": {"places": 96},
    "near states": {"near": 1.0},
    "not near states": {"near": 0.0},
    "4,000 tokens": {"vocabulary": 4000},
    "all tokens": {"vocabulary": None},
    "one guess": {"guesses": 1},
    "two guesses": {"guesses": 2},
    "user's turns too": {"prompts": True},
    "norms": {"norms": True},
    "norms, last layer": {"norms": True, "last": True},
    "norms, last layer, two layers": {"norms": True, "last": True, "layers": 2},
}


def row_losses(loss: str, logits: Tensor, labels: Tensor, p: Tensor) -> Tensor:
    """Of each guess, `(n,)`; `logits`, `p` `(n, V')`."""
    if loss == "ce":
        return cross_entropy(logits, labels)
    if loss == "lk":
        return -torch.minimum(p, logits.softmax(-1)).sum(-1).clamp(min=1e-6).log()
    rejected = rejection(logits, p)
    if loss in ("tv", "half"):
        share = 0.1 if loss == "tv" else 0.5
        return share * cross_entropy(logits, labels) + (1 - share) * rejected
    kl = (p * ((p + 1e-12).log() - logits.log_softmax(-1))).sum(-1)
    if loss == "kl":
        return kl
    share = (-3 * (1 - rejected).detach()).exp()
    return share * kl + (1 - share) * rejected


def by_group(values: Tensor, made: dict[str, Tensor], count: int, missing: float) -> tuple[Tensor, Tensor]:
    """Values `(n,)` of guesses as `(groups, count)`, and which of them there are."""
    shape = (int(made["group"].max()) + 1, count)
    where = (made["group"], made["depths"])
    present = torch.zeros(shape, dtype=torch.bool).index_put(where, torch.tensor(True))
    return values.new_full(shape, missing).index_put(where, values), present


def loss_of(recipe: Recipe, made: dict[str, Tensor], left: float) -> Tensor:
    """One number for a batch, with this share of the training left."""
    where, logits = (made["group"], made["depths"]), made["logits"]
    if left < recipe.end:
        accepted, present = by_group(1 - rejection(logits, made["p"]), made, recipe.guesses, 0.0)
        return 1 - (accepted.cumprod(1) * present).sum() / present.sum()
    losses = row_losses(recipe.loss, logits, made["labels"], made["p"])
    if recipe.near:
        losses = losses + recipe.near * F.smooth_l1_loss(made["states"], made["wanted"], reduction="none").mean(-1)
    if recipe.fading is None:
        sure = 0.5 * (-cross_entropy(logits, made["labels"]).detach()).exp() + 0.5
        chances, present = by_group(sure, made, recipe.guesses, 1.0)
        weights = (chances.cumprod(1) * present).flip(1).cumsum(1).flip(1)[where]
    else:
        weights = recipe.fading ** made["depths"]
    right, _ = by_group((logits.argmax(-1) == made["labels"]).float(), made, recipe.guesses, 1.0)
    reached = F.pad(right.cumprod(1)[:, :-1], (1, 0), value=1.0)[where]
    if recipe.prefix:
        weights = weights * reached
    loss = (losses * weights).mean()
    if left < recipe.own:
        guess = logits.argmax(-1, keepdim=True)
        log_q = logits.log_softmax(-1).gather(-1, guess).clamp(min=-10)
        gap = made["p"].gather(-1, guess).log().clamp(min=-10) - log_q
        loss = loss + ((gap.exp() - gap - 1).clamp(max=10)[:, 0] * reached).sum() / reached.sum()
    return loss


class Rows:
    """ParallelSpec's rows of texts, beside the target's states.

    Args:
        drafter: attached.
        states: of its target.
        recipe: of the training.
        seed: of the rows that are kept.
        everything: whether all are.
    """

    def __init__(self, drafter: ParallelSpecDrafter, states: TargetStates, recipe: Recipe, seed: int, everything: bool):
        kept = CodConfig(recipe.guesses, 1.0, 1.0) if everything else CodConfig(recipe.guesses, recipe.dropping, 0.2)
        self.drafter, self.states = drafter, states
        self.collator = RowCollator(0, kept, seed, True, drafter.vocabulary)

    def __call__(self, samples: list[dict]) -> dict[str, Tensor]:
        """Of all guesses with a label: `logits`, `labels`, `depths`, `group` of one beginning, `p`, and `states` to be as
        `wanted`."""
        batch = self.collator(samples)
        labels = batch.pop("labels")
        text = batch["depths"] == 0
        with torch.no_grad():
            states = self.states(batch["input_ids"][:, text.any(0)], text.sum(1))
        features = F.pad(states["normed"][:, :-1].float(), (0, 0, 1, labels.shape[1] - states["normed"].shape[1]))
        learned = labels != IGNORED
        logits, guessed = self.drafter(**batch, columns=torch.arange(labels.shape[1]), features=features)
        rows, places, depths = learned.nonzero()[:, 0], batch["position_ids"][learned], batch["depths"][learned]
        group = (rows * 10_000 + places - depths).unique(return_inverse=True)[1]
        return {
            "logits": logits[learned].float(),
            "labels": labels[learned],
            "depths": depths,
            "group": group,
            "p": self.states.probabilities(states, rows, places),
            "states": guessed[learned].float(),
            "wanted": states["normed"][rows, places].float(),
        }


class Anchored:
    """What MTP layers and blocks guess behind some tokens of texts; as `Rows`.

    Args:
        module: holds a drafter that is attached.
        states: of its target.
        recipe: of the training.
        seed: of the tokens.
        everything: whether all tokens are taken.
    """

    def __init__(self, module: Any, states: TargetStates, recipe: Recipe, seed: int, everything: bool):
        self.module, self.drafter, self.states = module, module.drafter, states
        self.collator = AnchorCollator(LENGTH if everything else recipe.places, recipe.guesses, seed)
        self.places = torch.full((states.target.config.vocab_size,), IGNORED)
        vocabulary = torch.arange(len(self.places)) if self.drafter.vocabulary is None else self.drafter.vocabulary
        self.places[vocabulary] = torch.arange(len(vocabulary))

    def __call__(self, samples: list[dict]) -> dict[str, Tensor]:
        """As `Rows.__call__`."""
        batch = self.collator(samples)
        with torch.no_grad():
            states = self.states(batch["input_ids"], batch["lengths"])
        read: list[Tensor] = []
        head = self.drafter.logits
        self.drafter.logits = lambda normed: read.append(normed) or head(normed)
        try:
            made = self.module(batch, {key: states[key].float() for key in self.drafter.features})["logits"]
        finally:
            del self.drafter.logits
        learned = (batch["labels"] != IGNORED) & (self.places[batch["labels"].clamp(min=0)] != IGNORED)
        text, anchor, depths = learned.nonzero(as_tuple=True)
        places = batch["places"][learned]
        result = {
            "logits": made[learned].float(),
            "labels": self.places[batch["labels"][learned]],
            "depths": depths,
            "group": (text * 10_000 + anchor).unique(return_inverse=True)[1],
            "p": self.states.probabilities(states, text, places),
            "wanted": states["normed"][text, places].float(),
        }
        if len(read) == made.shape[2]:
            result["states"] = torch.stack(read, dim=2)[learned].float()
        return result


def untrained(kind: Kind, recipe: Recipe, target: PreTrainedModel, tokenizer: Any, vocabulary: Tensor | None) -> tuple[Any, Any]:
    """A drafter, and what is called with batches."""
    if kind == "parallelspec":
        drafter = ParallelSpecDrafter.from_target(target, "eagle", max(1, recipe.guesses - 1), 1, vocabulary).float()
        layer, module = drafter.stack.layers[0], drafter
    elif kind == "mtp":
        drafter = MtpDrafter.from_target(target, True, vocabulary).float()
        layer, module = drafter.stack.layers[0], Unrolled(drafter, MtpStep(drafter, drafter.layers[0]), recipe.guesses)
    elif kind == "eagle3":
        size = None if vocabulary is None else len(vocabulary)
        config = Eagle3Config.for_target(target, recipe.layers, draft_vocab_size=size, num_draft_tokens=recipe.guesses)
        config.fc_norm = config.norm_output = recipe.norms
        if recipe.last:
            config.features = (*config.features[:-1], len(target.model.layers) - 1)
        drafter = Eagle3Drafter(config, vocabulary).started_beside(target).float()
        layer, module = drafter.stack.layers[0], Unrolled(drafter, drafter, recipe.guesses)
    else:
        mask = unused_token(tokenizer, target.config.vocab_size)
        drafter = DSparkDrafter.from_target(target, mask, 2, recipe.guesses, 5, vocabulary).float()
        layer, module = drafter.stack.layers[-1], Blocks(drafter)
    if recipe.start == "last":
        weights = {name: value.float() for name, value in target.model.layers[-1].state_dict().items()}
        layer.load_state_dict(weights, strict=kind != "dspark")
    return drafter, module


@torch.no_grad()
def low_rank_head(keeper: TargetStates, rank: int, texts: list[dict]) -> torch.nn.Sequential:
    """`U (V h)`, the closest to the target's head for the states of some texts: from an SVD behind their whitening (SlimSpec)."""
    states = torch.cat([keeper(torch.tensor([row["input_ids"]]), torch.tensor([row["length"]]))["normed"][0] for row in texts])
    root = torch.linalg.cholesky(states.double().T @ states.double() / len(states) + 1e-4 * torch.eye(states.shape[1]).double())
    weight = keeper.target.get_output_embeddings().weight
    wanted = weight if keeper.vocabulary is None else weight[keeper.vocabulary]
    u, sizes, v = torch.linalg.svd(wanted.double() @ root, full_matrices=False)
    factors = (
        sizes[:rank].sqrt()[:, None] * torch.linalg.solve_triangular(root, v[:rank], upper=False, left=False),
        u[:, :rank] * sizes[:rank].sqrt(),
    )
    layers = [torch.nn.Linear(factor.shape[1], factor.shape[0], bias=False) for factor in factors]
    for layer, factor in zip(layers, factors, strict=True):
        layer.weight.copy_(factor)
    return torch.nn.Sequential(*layers)


@torch.no_grad()
def measured(lessons: Any, held_out: list[dict], count: int) -> dict[str, float]:
    """How often each guess is what the target wrote, if those before are, and τ of chains that never rest, teacher-forced;
    `sampled`: how often rejection sampling takes a first guess that is drawn."""
    right, total, sampled = torch.zeros(count), 0, 0.0
    for begin in range(0, len(held_out), 4):
        made = lessons(held_out[begin : begin + 4])
        correct, _ = by_group((made["logits"].argmax(-1) == made["labels"]).float(), made, count, 0.0)
        right += correct.cumprod(1).sum(0)
        first = made["depths"] == 0
        sampled += float((1 - rejection(made["logits"][first], made["p"][first])).sum())
        total += sum(label != IGNORED for row in held_out[begin : begin + 4] for label in row["labels"][2:])
    rates = (right / total).tolist()
    chances = [rate / before if before else 0.0 for rate, before in zip(rates, [1.0, *rates], strict=False)]
    return {
        "tau": 1 + sum(rates),
        "sampled": sampled / total,
        **{f"guess {depth}": chance for depth, chance in enumerate(chances, 1)},
    }


def tree_tau(target: PreTrainedModel, drafter: Any, held_out: list[dict], depth: int) -> float:
    """Tokens a round of greedy decoding with trees of 15 nodes, behind the prompts of the first texts."""
    drafter.speculation_config = SpeculationConfig(depth, tree_size=15, never_slower=False)
    stats = SpeculationStats()
    for row in held_out[:TREE_PROMPTS]:
        prompt = torch.tensor([row["input_ids"][: row["labels"].count(IGNORED)]])
        stats += target.generate(
            prompt, assistant_model=drafter, max_new_tokens=64, do_sample=False, return_dict_in_generate=True
        ).speculation
    return stats.mean_emitted


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
        dict.fromkeys((*DSparkDrafter.from_target(target, mask).features, *eagle, len(target.model.layers) - 1, "normed"))
    )


Target = Annotated[str, typer.Option(help="The causal LM.")]
TrainFile = Annotated[list[Path], typer.Option(help="Its answers; repeatable.")]
Cache = Annotated[Path, typer.Option(help="Keeps its states.")]


@app.command()
def states(target: Target, train_file: TrainFile, cache_dir: Cache = Path("build/states")) -> None:
    """Run the target once over all texts: trials begin with the same."""
    torch.set_num_threads(1)
    model, tokenizer, data = opened(target, train_file)
    keeper = TargetStates(model, keys_of(model, tokenizer), None, cache_dir)
    rows = sorted((data[index] for index in range(len(data))), key=lambda row: row["length"])
    for begin in tqdm(range(0, len(rows), 8)):
        lengths = [row["length"] for row in rows[begin : begin + 8]]
        ids = torch.zeros((len(lengths), max(lengths) + -max(lengths) % 64), dtype=torch.long)
        for index, row in enumerate(rows[begin : begin + 8]):
            ids[index, : row["length"]] = torch.tensor(row["input_ids"])
        keeper(ids, torch.tensor(lengths))


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
    json_file: Annotated[Path, typer.Option("--json", help="A line is added for each point.")] = Path("build/trials.jsonl"),
    cache_dir: Cache = Path("build/states"),
) -> None:
    """Train with one recipe for so many minutes of one core, and measure."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, tokenizer, data = opened(target, train_file)
    train_set, held_out = split(data)
    chosen = replace(KINDS[kind], **CHANGES[recipe])
    if chosen.near and kind == "dspark":
        raise typer.BadParameter("Blocks are not fed with states of their own, so these need not be near the target's.")
    wanted = chosen.vocabulary
    everything = wanted is None or wanted >= model.config.vocab_size
    vocabulary = None if everything else answer_vocabulary(train_set, wanted, tokenizer, model)
    drafter, module = untrained(kind, chosen, model, tokenizer, vocabulary)
    if chosen.prompts:
        train_set = [{**row, "labels": [IGNORED, *row["input_ids"][1:]]} for row in train_set]
    lessons = Rows if kind == "parallelspec" else Anchored
    keeper = TargetStates(model, drafter.features if kind != "parallelspec" else ("normed",), drafter.vocabulary, cache_dir)
    if chosen.rank is not None:
        drafter.head = low_rank_head(keeper, chosen.rank, train_set[:100])
    taught = lessons(module, keeper, chosen, seed, False)
    judged = lessons(module, keeper, chosen, seed, True)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=trains_in_bf16())
    parameters = {name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    matrices = [p for name, p in parameters.items() if chosen.muon and p.ndim == 2 and "proj" in name]
    others = [p for p in parameters.values() if all(p is not matrix for matrix in matrices)]
    steppers: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=chosen.rate, betas=(0.9, 0.95), weight_decay=0)]
    if matrices:
        steppers.append(torch.optim.Muon(matrices, lr=chosen.muon_rate, weight_decay=0, adjust_lr_fn="match_rms_adamw"))
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
            waiting = [group[begin : begin + batch_size] for group in groups for begin in range(0, len(group), batch_size)]
            order.shuffle(waiting)
            taught.collator.epoch += 1
        begun = process_time()
        for stepper, peak in zip(steppers, peaks, strict=True):
            stepper.param_groups[0]["lr"] = peak * min(1.0, (steps + 1) / 20) * (1 - spent / (60 * minutes))
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
            line = {"kind": kind, "recipe": recipe, "minutes": round(spent / 60, 2), "of": minutes, "seed": seed, "steps": steps}
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
    """Means over seeds at the end of each trial, best τ of chains first, with its spread; then the τ of trees."""
    print("| target | drafter | recipe | minutes | seeds | steps | first guesses | second, behind it | τ | trees | sampled |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for (target, kind, minutes, recipe), lines in sorted(
        ends(trials).items(), key=lambda item: (*item[0][:3], -mean(line["tau"] for line in item[1]))
    ):
        first, second, tau, steps = ([line.get(name, 0.0) for line in lines] for name in ("guess 1", "guess 2", "tau", "steps"))
        spread = f" ± {stdev(tau):.3f}" if len(tau) > 1 else ""
        trees, sampled = ([line[name] for line in lines if name in line] for name in ("tree", "sampled"))
        more = f"{mean(trees):.3f} | {mean(sampled):.1%}" if sampled else " | "
        print(
            f"| {target} | {kind} | {recipe} | {minutes:g} | {len(lines)} | {mean(steps):.0f} | {mean(first):.1%} "
            f"| {mean(second):.1%} | {mean(tau):.3f}{spread} | {more} |"
        )


@app.command()
def picture(trials: Path, file: Path) -> None:
    """Draw τ over minutes, a line for each trial that was measured on its way, and a point for each other one."""
    from matplotlib.figure import Figure  # an extra

    lines = defaultdict(list)
    for line in map(json.loads, trials.read_text().splitlines()):
        lines[line["kind"], line["recipe"], line["seed"], line["of"]].append((line["minutes"], line["tau"]))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    colours = dict(zip(KINDS, ("tab:orange", "tab:green", "tab:blue"), strict=True))
    named: set[str] = set()
    markers = cycle("s^vD")
    for (kind, recipe, *_), points in lines.items():
        label = f"{kind}, {recipe}" if len(points) > 1 else f"{kind}, short trials"
        label = "" if label in named else label
        style = {"marker": next(markers) if len(points) > 1 else "o", "markersize": 5, "color": colours[kind]}
        axes.plot(*zip(*sorted(points), strict=True), label=label, **style)
        named.add(label)
    axes.set(xlabel="minutes of training", ylabel="τ of chains of three, teacher-forced")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    app()
