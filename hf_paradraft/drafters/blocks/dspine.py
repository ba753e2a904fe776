"""DSpine: DFlash in which each row of a block is told, after each layer, the prediction of the row
before (arXiv 2609.36173).

A row's prediction is a direction in a table of codes of all tokens, read from its state. The first
guess is told the newest token's own code. After the last layer the token before is known, and its
code takes the place of the predicted one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import LongTensor, Tensor, nn

from ...names import with_cache
from ...protocol import GuessedLogits
from ...protocol.draft import Bias
from ..formats.layout import DSPINE
from ..layers import turns
from ..reading.network import Mask
from .config import BlockConfig
from .dflash2 import among_best
from .model import DFlashDrafter


class Injection(nn.Module):
    """Messages between neighbouring rows of a block.

    The state h of a row with code u becomes `h + |h| / √d · W (σ(G u + P p + b) ⊙ M p)`, where p is
    the code of the row before it.

    Each layer has a readout and W of its own.

    Args:
        config: its drafter's config.
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        num_layers, hidden_size = config.layers.num_hidden_layers, config.layers.hidden_size
        rank, message_size = config.transfer_rank, config.message_size
        self.readouts = nn.ModuleList(
            nn.Linear(hidden_size, rank, bias=False) for _ in range(num_layers)
        )
        self.writes = nn.ModuleList(
            nn.Linear(message_size, hidden_size, bias=False) for _ in range(num_layers)
        )
        self.message, self.receiver_gate, self.predecessor_gate = (
            nn.Linear(rank, message_size, bias=False) for _ in range(3)
        )
        self.bias = nn.Parameter(torch.zeros(message_size))

    def predicted(self, layer: int, states: Tensor) -> Tensor:
        """Compute the codes `(…, r)`, of length √r, that states `(…, d)` after a layer predict."""
        values = self.readouts[layer](states)
        unit = F.normalize(values.float(), dim=-1, eps=1e-12)
        return (unit * values.shape[-1] ** 0.5).to(values)

    def forward(self, layer: int, states: Tensor, codes: Tensor, before: Tensor) -> Tensor:
        """Compute states `(…, d)` after a message.

        Args:
            layer: the layer before the message.
            states: `(…, d)`.
            codes: `(…, r)`, which the states predict.
            before: `(…, r)`, the codes of the rows before them.
        """
        gate = torch.sigmoid(self.receiver_gate(codes) + self.predecessor_gate(before) + self.bias)
        size = states.float().norm(dim=-1, keepdim=True).to(states) / states.shape[-1] ** 0.5
        return states + size * self.writes[layer](gate * self.message(before))


class DSpineDrafter(DFlashDrafter):
    """A DSpine drafter as `assistant_model`; arguments as for `DFlashDrafter`.

    Raises:
        ValueError: it guesses fewer tokens than the target has, or its rows see those after them.
    """

    kind = "dspine"
    title = DSPINE
    training_options = None

    def add_parts(self, config: BlockConfig) -> None:
        """Implement `DFlashDrafter.add_parts`."""
        if (
            self.vocabulary is not None
            or not config.fill_in
            or set(config.causal) != set(self.windows)
        ):
            raise ValueError(
                "A DSpine drafter fills its block in causally, with all of its target's tokens; "
                "this one does not."
            )
        self.injection = Injection(config)
        self.register_buffer("transfer_codes", torch.zeros(config.vocab_size, config.transfer_rank))

    def codes(self, tokens: LongTensor) -> Tensor:
        """Look up the codes `(…, r)` of tokens, int64 `(…,)`."""
        return (
            self.transfer_codes[tokens.to(self.device)].to(self.dtype)
            * self.transfer_codes.shape[-1] ** 0.5
        )

    @classmethod
    def mend(cls, weights: dict[str, Tensor]) -> None:
        """Implement `FeatureDrafter.mend`: a mark says whether the codes were ever made.

        Raises:
            ValueError: they were not.
        """
        if not weights.pop("transfer_ready", True):
            raise ValueError(
                "This DSpine drafter's table of codes was never filled (transfer_ready): download "
                "it again."
            )

    def forward_block(
        self, ids: LongTensor, mask: Mask, positions: LongTensor, cache: Any
    ) -> Tensor:
        """Implement `DFlashDrafter.forward_block`: states before the last messages and the norm.

        The last messages are those after the last layer.
        """
        states = self.embed(ids) * self.config.embedding_scale
        turned, anchors = turns(self.stack, states, positions), self.codes(ids[:, :1])
        for index, layer in enumerate(self.stack.layers):
            seen = mask[self.stack.config.layer_types[index]] if isinstance(mask, dict) else mask
            states = self.told(index - 1, states, anchors) if index else states
            given = {
                "attention_mask": seen,
                "position_ids": positions,
                "position_embeddings": turned,
                **with_cache(layer, cache),
            }
            states = layer(states, use_cache=True, **given)
        return states

    def told(self, layer: int, states: Tensor, anchors: Tensor) -> Tensor:
        """Send each row of blocks the code that the row before it predicts.

        The newest token's own row is sent nothing.

        Args:
            layer: the layer before the messages.
            states: `(B, M, d)`.
            anchors: `(B, 1, r)`, codes of the newest tokens.
        """
        codes = self.injection.predicted(layer, states[:, 1:])
        before = torch.cat([anchors, codes[:, :-1]], dim=1)
        return torch.cat(
            [states[:, :1], self.injection(layer, states[:, 1:], codes, before)], dim=1
        )

    def guess(self, states: Tensor, text: LongTensor, room: int) -> GuessedLogits:
        """Make the guess of one row's block, whose logits come only from the bias.

        The bias is the head that knows the token before.
        """
        told = self.told(len(self.stack.layers) - 1, states[None], self.codes(text[-1:])[None])[0]
        logits = self.base_logits(self.guesses(self.stack.norm(told))[:room])
        return GuessedLogits(torch.zeros_like(logits), bias=self.bias_after(text, states, logits))

    def bias_after(self, text: LongTensor, states: Tensor, logits: Tensor) -> Bias:
        """Implement `DFlashDrafter.bias_after`: the last messages again, from known tokens.

        They are computed once more from the tokens before themselves, instead of predicted codes.
        """
        last, states = len(self.stack.layers) - 1, self.guesses(states)
        codes = self.injection.predicted(last, states)

        def score(rows: LongTensor, tokens: LongTensor, candidates: LongTensor) -> Tensor:
            told = self.injection(last, states[rows], codes[rows], self.codes(tokens))
            return self.chosen_logits(self.stack.norm(told), candidates)

        return among_best(logits, self.config.selector_top_k, score)

    def chosen_logits(self, states: Tensor, ids: LongTensor) -> Tensor:
        """Compute logits `(n, c)` of some tokens for each of n normed states.

        The states are `(n, d)`, the tokens' ids int64 `(n, c)`.
        """
        head = self.shared.head if self.head is None else self.head
        if type(head) is not nn.Linear or head.bias is not None or head.weight.is_meta:
            return self.base_logits(states).gather(-1, ids)
        logits = torch.einsum(
            "nd,ncd->nc", states, F.embedding(ids.to(head.weight.device), head.weight).to(states)
        )
        return self.shared.finished(logits, self.softcap, self.logit_scale, self.raw_target)
