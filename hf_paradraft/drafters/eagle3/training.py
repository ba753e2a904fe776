"""Train an EAGLE-3 drafter on a frozen target; it is fed with its own states, as in drafting (EAGLE-3, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache

from ...decoding.tree_attention import additive
from ...protocol import SpeculationConfig
from ...protocol.drafter import FeatureKey
from ...training.anchors import AnchorTrainer
from ...training.run import RunInputs, option
from ...training.target_training import TargetTraining
from .model import Eagle3Drafter

FADING = 0.8  # the weight of each further step


class Unrolled(torch.nn.Module):
    """What a drafter guesses behind the anchors of a batch, step after step on the text's tokens and its own states.

    Args:
        drafter: attached to its target.
        count: K, steps.
    """

    def __init__(self, drafter: Eagle3Drafter, count: int):
        super().__init__()
        self.drafter, self.count = drafter, count

    def forward(self, batch: dict[str, Tensor], states: dict[FeatureKey, Tensor]) -> dict[str, Tensor]:
        """`logits` `(B, A, K, V')`.

        Args:
            batch: from `AnchorCollator`.
            states: the target's hidden states `(B, N, d_t)`.
        """
        drafter, ids = self.drafter, batch["input_ids"]
        cache = DynamicCache()
        size, chains = ids.shape[1] - 1, batch["anchors"].shape[1]  # row j of a text reads token j + 1 and the features of j
        rows = torch.arange(size, device=ids.device)
        causal = additive((rows <= rows[:, None])[None, None], drafter.dtype)
        hidden = drafter.run(drafter.text(ids[:, 1:], drafter.fuse(states)[:, :-1]), causal, rows.expand(len(ids), -1), cache)
        last = batch["places"][..., 0].sub(1).clamp(min=0)  # the row that read the anchor
        hidden = hidden.gather(1, last[..., None].expand(-1, -1, hidden.shape[-1]))
        seen = rows <= last[..., None]  # (B, A, rows)
        own = torch.eye(chains, dtype=torch.bool, device=ids.device).expand(len(ids), -1, -1)
        normed, fed = drafter.states_behind(hidden)
        logits = [drafter.logits(normed)]
        for step in range(1, self.count):
            seen = torch.cat([seen, own], dim=-1)
            inputs = drafter.text(batch["before"][..., step], fed)
            hidden = drafter.run(inputs, additive(seen[:, None], drafter.dtype), last + step, cache)
            normed, fed = drafter.states_behind(hidden)
            logits.append(drafter.logits(normed))
        return {"logits": torch.stack(logits, dim=2)}


@dataclass(kw_only=True)
class Eagle3Training(TargetTraining):
    """Train one decoder layer on three of a target's layers, which guesses one token after the other."""

    kind: ClassVar[str] = "eagle3"
    example: ClassVar[str] = "--target DIR --train-file answers.jsonl --output-dir OUT --vocab 8000"

    num_draft_tokens: int = option("K: tokens drafted one after the other, in training too.", 5, least=1)
    num_layers: int = option("Layers of the drafter.", 1, least=1)
    num_anchors: int = option("Places in each text from which it goes on, at most.", 32, least=1)

    @property
    def defaults(self) -> dict[str, Any]:
        """As ParallelSpec's of this style."""
        return {**super().defaults, "adam_beta2": 0.95}

    def prepare(self, inputs: RunInputs) -> tuple[Eagle3Drafter, AnchorTrainer]:
        """As `TrainingOptions.prepare`."""
        drafter = Eagle3Drafter.from_target(inputs.model, self.num_draft_tokens, self.num_layers, self.vocabulary(inputs))
        drafter.speculation_config = SpeculationConfig(self.num_draft_tokens)
        trainer = AnchorTrainer(
            Unrolled(drafter, self.num_draft_tokens),
            inputs.arguments,
            self.states(inputs, drafter.features, drafter.vocabulary),
            self.num_draft_tokens,
            FADING,
            self.num_anchors,
            train_dataset=inputs.train_set,
            eval_dataset=inputs.eval_set,
        )
        return drafter, trainer

    def record(self) -> dict[str, Any]:
        """As `TrainingOptions.record`."""
        names = ("num_layers", "num_draft_tokens", "num_anchors")
        return {**super().record(), **{name: getattr(self, name) for name in names}}
