"""Drafters and their lessons, as a recipe wants them, and what a drafter has learned."""

from typing import Any

import torch
import torch.nn.functional as F
from recipe import Kind, Recipe
from torch import Tensor
from transformers import PreTrainedModel

from hf_paradraft import (
    DSparkDrafter,
    Eagle3Drafter,
    MtpDrafter,
    ParallelSpecDrafter,
    SpeculationConfig,
    SpeculationStats,
)
from hf_paradraft.drafters.blocks.training import Blocks
from hf_paradraft.drafters.eagle3.config import Eagle3Config
from hf_paradraft.drafters.mtp.model import MtpStep
from hf_paradraft.training.anchors import AnchorCollator
from hf_paradraft.training.data import IGNORED
from hf_paradraft.training.losses import cross_entropy, rejection
from hf_paradraft.training.rows import CodConfig, RowCollator
from hf_paradraft.training.target_states import TargetStates
from hf_paradraft.training.target_training import unused_token
from hf_paradraft.training.unrolled import Unrolled

LENGTH = 320
TREE_PROMPTS = 12  # whose answers are drafted by trees


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


def by_group(
    values: Tensor, made: dict[str, Tensor], count: int, missing: float
) -> tuple[Tensor, Tensor]:
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
        losses = losses + recipe.near * F.smooth_l1_loss(
            made["states"], made["wanted"], reduction="none"
        ).mean(-1)
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

    def __init__(
        self,
        drafter: ParallelSpecDrafter,
        states: TargetStates,
        recipe: Recipe,
        seed: int,
        everything: bool,
    ):
        kept = (
            CodConfig(recipe.guesses, 1.0, 1.0)
            if everything
            else CodConfig(recipe.guesses, recipe.dropping, 0.2)
        )
        self.drafter, self.states = drafter, states
        self.collator = RowCollator(0, kept, seed, True, drafter.vocabulary)

    def __call__(self, samples: list[dict]) -> dict[str, Tensor]:
        """Of all guesses with a label: `logits`, `labels`, `depths`, `group` of one beginning, `p`,
        and `states` to be as `wanted`.
        """
        batch = self.collator(samples)
        labels = batch.pop("labels")
        text = batch["depths"] == 0
        with torch.no_grad():
            states = self.states(batch["input_ids"][:, text.any(0)], text.sum(1))
        features = F.pad(
            states["normed"][:, :-1].float(), (0, 0, 1, labels.shape[1] - states["normed"].shape[1])
        )
        learned = labels != IGNORED
        logits, guessed = self.drafter(
            **batch, columns=torch.arange(labels.shape[1]), features=features
        )
        rows, places = learned.nonzero()[:, 0], batch["position_ids"][learned]
        depths = batch["depths"][learned]
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

    def __init__(
        self, module: Any, states: TargetStates, recipe: Recipe, seed: int, everything: bool
    ):
        self.module, self.drafter, self.states = module, module.drafter, states
        self.collator = AnchorCollator(
            LENGTH if everything else recipe.places, recipe.guesses, seed
        )
        self.places = torch.full((states.target.config.vocab_size,), IGNORED)
        vocabulary = (
            torch.arange(len(self.places))
            if self.drafter.vocabulary is None
            else self.drafter.vocabulary
        )
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
            made = self.module(batch, {key: states[key].float() for key in self.drafter.features})[
                "logits"
            ]
        finally:
            del self.drafter.logits
        learned = (batch["labels"] != IGNORED) & (
            self.places[batch["labels"].clamp(min=0)] != IGNORED
        )
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


def untrained(
    kind: Kind, recipe: Recipe, target: PreTrainedModel, tokenizer: Any, vocabulary: Tensor | None
) -> tuple[Any, Any]:
    """A drafter, and what is called with batches."""
    if kind == "parallelspec":
        drafter = ParallelSpecDrafter.from_target(
            target, "eagle", max(1, recipe.guesses - 1), 1, vocabulary
        ).float()
        layer, module = drafter.stack.layers[0], drafter
    elif kind == "mtp":
        drafter = MtpDrafter.from_target(target, True, vocabulary).float()
        layer = drafter.stack.layers[0]
        module = Unrolled(drafter, MtpStep(drafter, drafter.layers[0]), recipe.guesses)
    elif kind == "eagle3":
        size = None if vocabulary is None else len(vocabulary)
        config = Eagle3Config.for_target(
            target, 1, draft_vocab_size=size, num_draft_tokens=recipe.guesses
        )
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
        weights = {
            name: value.float() for name, value in target.model.layers[-1].state_dict().items()
        }
        layer.load_state_dict(weights, strict=kind != "dspark")
    return drafter, module


@torch.no_grad()
def low_rank_head(keeper: TargetStates, rank: int, texts: list[dict]) -> torch.nn.Sequential:
    """`U (V h)`, the closest to the target's head for the states of some texts: from an SVD behind
    their whitening (SlimSpec).
    """
    states = torch.cat(
        [
            keeper(torch.tensor([row["input_ids"]]), torch.tensor([row["length"]]))["normed"][0]
            for row in texts
        ]
    )
    root = torch.linalg.cholesky(
        states.double().T @ states.double() / len(states)
        + 1e-4 * torch.eye(states.shape[1]).double()
    )
    weight = keeper.target.get_output_embeddings().weight
    wanted = weight if keeper.vocabulary is None else weight[keeper.vocabulary]
    u, sizes, v = torch.linalg.svd(wanted.double() @ root, full_matrices=False)
    factors = (
        sizes[:rank].sqrt()[:, None]
        * torch.linalg.solve_triangular(root, v[:rank], upper=False, left=False),
        u[:, :rank] * sizes[:rank].sqrt(),
    )
    layers = [torch.nn.Linear(factor.shape[1], factor.shape[0], bias=False) for factor in factors]
    for layer, factor in zip(layers, factors, strict=True):
        layer.weight.copy_(factor)
    return torch.nn.Sequential(*layers)


@torch.no_grad()
def measured(lessons: Any, held_out: list[dict], count: int) -> dict[str, float]:
    """How often each guess is what the target wrote, if those before are, and τ of chains that
    never rest, teacher-forced; `sampled`: how often rejection sampling takes a first guess that is
    drawn.
    """
    right, total, sampled = torch.zeros(count), 0, 0.0
    for begin in range(0, len(held_out), 4):
        made = lessons(held_out[begin : begin + 4])
        correct, _ = by_group(
            (made["logits"].argmax(-1) == made["labels"]).float(), made, count, 0.0
        )
        right += correct.cumprod(1).sum(0)
        first = made["depths"] == 0
        sampled += float((1 - rejection(made["logits"][first], made["p"][first])).sum())
        total += sum(
            label != IGNORED for row in held_out[begin : begin + 4] for label in row["labels"][2:]
        )
    rates = (right / total).tolist()
    chances = [
        rate / before if before else 0.0 for rate, before in zip(rates, [1.0, *rates], strict=False)
    ]
    return {
        "tau": 1 + sum(rates),
        "sampled": sampled / total,
        **{f"guess {depth}": chance for depth, chance in enumerate(chances, 1)},
    }


def tree_tau(target: PreTrainedModel, drafter: Any, held_out: list[dict], depth: int) -> float:
    """Tokens a round of greedy decoding with trees of 15 nodes, behind the prompts of the first
    texts.
    """
    drafter.speculation_config = SpeculationConfig(depth, tree_size=15, never_slower=False)
    stats = SpeculationStats()
    for row in held_out[:TREE_PROMPTS]:
        prompt = torch.tensor([row["input_ids"][: row["labels"].count(IGNORED)]])
        stats += target.generate(
            prompt,
            assistant_model=drafter,
            max_new_tokens=64,
            do_sample=False,
            return_dict_in_generate=True,
        ).speculation
    return stats.mean_emitted
