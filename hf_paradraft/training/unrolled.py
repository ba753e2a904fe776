"""Training of drafters that guess one token after the other, fed with their own states as in
drafting (EAGLE-3, section 3.2).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache

from ..decoding.shortlist import LEAST, RANK, Shortlist
from ..decoding.tree_attention import additive
from ..protocol import SpeculationConfig
from ..protocol.drafter import FeatureKey
from .anchors import AnchorCollator, AnchorTrainer, AnchorTraining
from .rows import IGNORED
from .run import RunInputs, option

TEXTS = 128  # whose states the shortlist is fitted to


class Unrolled(torch.nn.Module):
    """A drafter's guesses after anchors, step by step on the text and the drafter's own states.

    Guesses are made for all anchors of a batch at once.

    Args:
        drafter: the drafter, attached to its target.
        model: the part of it that reads, with `fuse`, `text` and `run`.
        count: K, the number of steps.
    """

    def __init__(self, drafter: Any, model: Any, count: int):
        super().__init__()
        self.drafter, self.count = drafter, count
        self.reads = (model,)  # whose parameters are the drafter's

    def forward(
        self, batch: dict[str, Tensor], states: dict[FeatureKey, Tensor]
    ) -> dict[str, Tensor]:
        """Compute K guesses after each anchor, each on the states of the guess before.

        Args:
            batch: a batch of an `AnchorCollator`.
            states: the target's hidden states `(B, N, d_t)`.

        Returns:
            `logits` `(B, A, K, V')` of the guesses, and `states` `(B, A, K, hidden)` after them.
        """
        drafter, (model,), ids = self.drafter, self.reads, batch["input_ids"]
        cache, chains = DynamicCache(), batch["anchors"].shape[1]
        # row j of a text reads token j + 1 and the features of j
        rows = torch.arange(ids.shape[1] - 1, device=ids.device)
        causal = additive((rows <= rows[:, None])[None, None], drafter.dtype)
        fused = model.fuse(states)[:, :-1]
        # Of the text only keys and values are learned from: anchors are read again, so that nothing
        # else has a gradient.
        model.run(model.text(ids[:, 1:], fused), causal, rows.expand(len(ids), -1), cache)
        last = batch["places"][..., 0].sub(1).clamp(min=0)  # the row that reads the anchor
        seen = rows < last[..., None]  # (B, A, rows)
        itself = torch.eye(chains, dtype=torch.bool, device=ids.device).expand(len(ids), -1, -1)
        fed, read, logits = fused.gather(1, last[..., None].expand(-1, -1, fused.shape[-1])), [], []
        for step in range(self.count):
            seen = torch.cat([seen, itself], dim=-1)
            inputs = model.text(batch["before"][..., step], fed)
            mask = additive(seen[:, None], drafter.dtype)
            normed, fed = model.run(inputs, mask, last + step, cache)
            read.append(normed.detach())
            logits.append(drafter.logits(normed))
        return {"logits": torch.stack(logits, dim=2), "states": torch.stack(read, dim=2)}


def fit_shortlist(trainer: AnchorTrainer) -> None:
    """Give a drafter of many tokens a shortlist, if its head is one."""
    drafter, head = trainer.drafter, trainer.states.head.head
    many = drafter.vocabulary is not None and len(drafter.vocabulary) >= LEAST
    if not many or drafter.head is not None or type(head) is not torch.nn.Linear:
        return
    if len(states := states_in_texts(trainer)) > RANK:
        weight = head.weight.detach()
        rows = weight[drafter.vocabulary.to(weight.device)].cpu()
        drafter.shortlist = Shortlist.fit(states, rows)


@torch.no_grad()
def states_in_texts(trainer: AnchorTrainer) -> Tensor:
    """Compute the drafter's states in some texts, `(n, hidden)`.

    The states are the same ones however often the run was stopped.
    """
    trainer.model.eval()
    texts, seed, collator = trainer.train_dataset, trainer.args.seed, trainer.data_collator
    collate = AnchorCollator(collator.num_anchors, collator.count, seed)
    chosen = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))[:TEXTS]
    read = []
    for rows in chosen.split(trainer.args.train_batch_size):
        inputs = trainer._prepare_inputs(collate([texts[row] for row in rows.tolist()]))
        with trainer.compute_loss_context_manager():
            _, outputs = trainer.guesses(trainer.model, inputs)
        read.append(outputs["states"][inputs["labels"] != IGNORED].cpu())
    return torch.cat(read)


@dataclass(kw_only=True)
class UnrolledTraining(AnchorTraining):
    """Options of training a drafter that guesses one token after the other."""

    recorded: ClassVar[tuple[str, ...]] = ("num_draft_tokens", "num_anchors")
    drafter: ClassVar[type[Any]]

    num_draft_tokens: int = option(
        "K: tokens drafted one after the other, in training too.", 5, least=1
    )
    begin_with: str | None = option(
        "A trained drafter to go on from: folder or Hub id; it keeps its --vocab.", None, read=True
    )

    def check(self) -> None:
        """Implement `TrainingOptions.check`."""
        super().check()
        if self.begin_with and self.vocab:
            raise ValueError(
                "begin_with is a drafter with a vocabulary of its own: leave out vocab."
            )

    @property
    def defaults(self) -> dict[str, Any]:
        """ParallelSpec's values for EAGLE's style."""
        return {**super().defaults, "adam_beta2": 0.95}

    @abstractmethod
    def start(self, inputs: RunInputs) -> Any:
        """Make the drafter, attached to its target."""

    def untrained(self, inputs: RunInputs) -> Any:
        """Implement `TrainingOptions.untrained`.

        Raises:
            ValueError: the one to go on from is for another target.
        """
        if self.begin_with:
            drafter = self.drafter.from_pretrained(self.begin_with).float().to(inputs.model.device)
            drafter.attach(inputs.model)
            drafter.shortlist = None  # fitted anew
        else:
            drafter = self.start(inputs)
        self.check_drafter(drafter)
        drafter.speculation_config = SpeculationConfig(self.num_draft_tokens)
        return drafter

    def finish(self, trainer: AnchorTrainer) -> None:
        """Implement `TrainingOptions.finish`."""
        fit_shortlist(trainer)
