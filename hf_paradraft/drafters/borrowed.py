"""What a drafter shares with its target, embedding and head: by reference, outside its module tree."""

from __future__ import annotations

from typing import Any

import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedModel


class Borrowed:
    """The target's embedding and head, as the target itself uses them; never saved, moved or cast.

    Args:
        target: the model.
        vocabulary: int64 `(V',)`, the ids whose rows of the head are wanted; None: all. Rows are gathered once where the head is
            an ordinary matrix; another one (quantised, offloaded) gives all logits, of which these are taken.

    Raises:
        ValueError: the target has no embedding or no head, or its logits are made in a way that is not known.
    """

    def __init__(self, target: PreTrainedModel, vocabulary: LongTensor | None = None):
        config = target.config.get_text_config()
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        if embedding is None or head is None:
            raise ValueError(f"{type(target).__name__} has no embedding or no head that a drafter could share.")
        self.embedding, self.head, self.vocabulary = embedding, head, vocabulary
        self.multiplier = float(getattr(config, "embedding_multiplier", None) or 1.0)  # Granite's
        self.scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere's
        self.scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite's
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.rows: Tensor | None = None
        weight = getattr(head, "weight", None)
        if vocabulary is not None and isinstance(weight, Tensor) and type(head) is torch.nn.Linear and not weight.is_meta:
            if int(vocabulary.max()) >= len(weight):
                raise ValueError(f"The drafter guesses ids up to {int(vocabulary.max())}, and the target has {len(weight)}.")
            self.rows = weight.detach()[vocabulary.to(weight.device)]
            self.bias = None if head.bias is None else head.bias.detach()[vocabulary.to(weight.device)]

    def embed(self, ids: LongTensor) -> Tensor:
        """Embeddings `(…, hidden)` as the target's first layer reads them; ids that it does not have count as 0."""
        known = ids.where(ids < self.embedding.num_embeddings, 0)
        return self.embedding(known.to(self.embedding.weight.device)) * self.multiplier

    def logits(self, states: Tensor, softcap: float | None = None) -> Tensor:
        """Logits `(…, V')` of normed states, scaled and capped as the target's.

        Args:
            states: `(…, hidden)`.
            softcap: instead of the target's.
        """
        if self.rows is not None:
            logits = torch.nn.functional.linear(states.to(self.rows), self.rows, self.bias)
        else:
            weight = self.head.weight
            logits = self.head(states.to(weight.device, weight.dtype if weight.is_floating_point() else states.dtype))
            logits = logits if self.vocabulary is None else logits[..., self.vocabulary.to(logits.device)]
        return self.finished(logits, softcap)

    def finished(self, logits: Tensor, softcap: float | None = None) -> Tensor:
        """What a head gave, scaled and capped as the target's."""
        logits = logits * self.scale if self.scale != 1 else logits
        cap = softcap or self.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def __deepcopy__(self, memo: Any) -> Borrowed:
        return self

    def __reduce__(self) -> tuple:
        return _nothing, ()


def _nothing() -> None:
    """What a pickled drafter has of its target."""


def final_norm(decoder: torch.nn.Module) -> torch.nn.Module:
    """The norm behind a model's last layer.

    Raises:
        ValueError: it is not where models of transformers have it.
    """
    for part in (decoder, getattr(decoder, "decoder", None)):  # OPT's stands one deeper
        for name in ("norm", "final_layernorm", "ln_f", "final_layer_norm"):
            if (found := getattr(part, name, None)) is not None:
                return found
    raise ValueError(f"{type(decoder).__name__} has no final norm by a name that is known: its normed states cannot be found.")
