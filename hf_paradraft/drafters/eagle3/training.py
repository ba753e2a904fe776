"""Train an EAGLE-3 drafter on a frozen target; it is fed with its own states, as in drafting (EAGLE-3, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import LongTensor, Tensor
from transformers import DynamicCache, LlamaConfig, PreTrainedModel

from ...decoding.features import layers_of
from ...decoding.tree_attention import additive
from ...protocol import SpeculationConfig
from ...protocol.drafter import FeatureKey
from ...training.run import RunInputs, option
from ..anchors import AnchorTrainer
from ..layers import sizes_of
from ..target_head import final_scale
from ..target_training import TargetTraining
from .config import Eagle3Config
from .model import Eagle3Drafter

FADING = 0.8  # the weight of each further step


def eagle_drafter(
    target: PreTrainedModel, num_draft_tokens: int = 5, num_layers: int = 1, vocabulary: LongTensor | None = None
) -> Eagle3Drafter:
    """An untrained drafter for `target`, attached to it; embedding and head stay the target's own.

    Args:
        target: a decoder-only causal LM of seven layers at least.
        num_draft_tokens: K that it is trained for.
        num_layers: of its own, Llama's in the target's sizes.
        vocabulary: int64 `(V',)`, the ids that it guesses; default: all.

    Raises:
        ValueError: a target with too few layers to read three of.
    """
    config, total = target.config.get_text_config(), len(layers_of(target))
    if total < 7:
        raise ValueError(f"EAGLE-3 reads a low, a middle and a high layer, and this target has {total} in all: 7 are needed.")
    layers = LlamaConfig(**sizes_of(target), num_hidden_layers=num_layers)
    described = Eagle3Config(
        layers=layers,
        features=(1, total // 2 - 1, total - 4),
        num_features=3,
        target_hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        target_layers=total,
        draft_vocab_size=None if vocabulary is None else len(vocabulary),
        num_draft_tokens=num_draft_tokens,
    )
    drafter = Eagle3Drafter(described, vocabulary)
    with torch.no_grad():
        drafter.stack.norm.weight.copy_(final_scale(target))
    drafter.to(target.get_input_embeddings().weight.device).attach(target)
    return drafter


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
        drafter = eagle_drafter(inputs.model, self.num_draft_tokens, self.num_layers, self.vocabulary(inputs))
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
