"""DSpark: DFlash's blocks with a head that looks at the token before, and one that says how sure it
is (DeepSpec, 2026).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import LongTensor, Tensor, nn
from transformers import PreTrainedModel

from ...protocol import GuessedLogits
from ...protocol.draft import Bias
from ..formats.layout import DSPARK
from .config import BlockConfig
from .model import DFlashDrafter


class MarkovHead(nn.Module):
    """A logit bias for each token v after the token u that was chosen before.

    It is `bias(v | u) = W2[v] · e(u)`, of rank `r`.

    `vanilla`: `e = W1[u]`. `gated`: `e = σ(G [h; W1[u]] + b) ⊙ W1[u]`. `rnn`: `[a; c; o] = J [s;
    W1[u]; h] + b`, `e = tanh(o)`; the state becomes `σ(a) ⊙ s + (1 - σ(a)) ⊙ tanh(c)`.

    Args:
        config: its drafter's config.
        num_guesses: V'.
    """

    def __init__(self, config: BlockConfig, num_guesses: int):
        super().__init__()
        self.kind, self.rank = config.markov_type, config.markov_rank
        rank, hidden_size = self.rank, config.layers.hidden_size
        self.before = nn.Embedding(config.vocab_size, rank)
        self.after = nn.Linear(rank, num_guesses, bias=False)
        nn.init.normal_(self.before.weight, std=0.01)
        if self.kind == "gated":
            self.gate = nn.Linear(hidden_size + rank, rank)
        elif self.kind == "rnn":
            self.joint = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def embed(self, tokens: LongTensor) -> Tensor:
        """Look up the embeddings `W1`, `(…, r)`, of tokens.

        Tokens that the table does not have count as token 0.
        """
        return self.before(tokens.where(tokens < self.before.num_embeddings, 0))

    def forward(self, tokens: LongTensor, states: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the logit bias after `tokens`, and the memory after them.

        Args:
            tokens: int64 `(…)`, in the target's ids.
            states: `(…, d)`, the states of the rows that guess the next tokens.
            memory: `(…, r)`, of the `rnn`; the other heads leave it as it is.

        Returns:
            `(…, V')` and `(…, r)`.
        """
        embedded = self.embed(tokens)
        if self.kind == "gated":
            embedded = torch.sigmoid(self.gate(torch.cat([states, embedded], dim=-1))) * embedded
        elif self.kind == "rnn":
            joint = self.joint(torch.cat([memory, embedded, states], dim=-1))
            keep, new, out = joint.chunk(3, dim=-1)
            keep, embedded = torch.sigmoid(keep), torch.tanh(out)
            memory = keep * memory + (1 - keep) * torch.tanh(new)
        return self.after(embedded), memory

    def biases_of_known(self, tokens: LongTensor, states: Tensor, memory: Tensor) -> Tensor:
        """Compute the biases `(…, k, V')` where the tokens before, `(…, k)`, are all known.

        `memory`, `(…, r)`, is the one before the first of them.
        """
        if self.kind != "rnn":
            return self(tokens, states, memory)[0]
        biases = []
        for token, state in zip(tokens.unbind(-1), states.unbind(-2), strict=True):
            bias, memory = self(token, state, memory)
            biases.append(bias)
        return torch.stack(biases, dim=-2)


class DSparkDrafter(DFlashDrafter):
    """A block drafter whose guesses depend on each other; arguments as for `DFlashDrafter`."""

    kind = "dspark"
    title = DSPARK
    training_options = "DSparkTraining"

    def add_parts(self, config: BlockConfig) -> None:
        """Implement `DFlashDrafter.add_parts`."""
        self.markov = MarkovHead(config, self.num_guesses) if config.markov_rank else None
        width = self.hidden_size + (config.markov_rank if config.confidence_with_markov else 0)
        self.confidence = nn.Linear(width, 1) if config.confidence else None

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        mask_token_id: int,
        num_layers: int = 2,
        block_size: int = 7,
        num_features: int = 5,
        vocabulary: LongTensor | None = None,
        markov_rank: int = 64,
        markov_type: str = "vanilla",
        confidence: bool = True,
    ) -> DSparkDrafter:
        """Implement `DFlashDrafter.from_target`; each row guesses the token after it.

        Args:
            target, mask_token_id, num_layers, num_features, vocabulary: as there.
            block_size: rows of a block, and guesses.
            markov_rank, markov_type: rank and type of the head that looks at the token before; rank
                0: there is none.
            confidence: whether it says how sure it is.

        Raises:
            ValueError: options that do not fit the target.
        """
        drafter = cls._untrained(
            target,
            mask_token_id,
            num_layers,
            block_size,
            num_features,
            vocabulary,
            fill_in=False,
            markov_rank=markov_rank,
            markov_type=markov_type,
            confidence=confidence,
            confidence_with_markov=confidence and markov_rank > 0,
        )
        if drafter.markov is not None:  # says nothing at first, and learns as fast as its blocks
            with torch.no_grad():
                drafter.markov.before.weight.normal_()
                drafter.markov.after.weight.zero_()
        return drafter

    def first_memory(self, anchors: LongTensor, states: Tensor) -> Tensor:
        """Compute the recurrent head's memory `(…, r)` before the first guess of blocks.

        The first row of a block that is filled in guesses nothing, but passes the head too.

        Args:
            anchors: int64 `(…)`, the newest tokens.
            states: `(…, block size, d)`, the states of all rows of a block.
        """
        memory = states.new_zeros((*anchors.shape, self.markov.rank))
        if self.config.fill_in:
            memory = self.markov(anchors, states[..., 0, :], memory)[1]
        return memory

    def confidence_logits(self, states: Tensor, before: LongTensor) -> Tensor:
        """Compute how sure each guess is, as logits `(…, k)` before the sigmoid.

        Args:
            states: `(…, k, d)`.
            before: int64 `(…, k)`, the token before each.
        """
        if self.config.confidence_with_markov:
            states = torch.cat([states, self.markov.embed(before)], dim=-1)
        return self.confidence(states)[..., 0]

    def bias_after(self, text: LongTensor, states: Tensor, logits: Tensor) -> Bias | None:
        """Implement `DFlashDrafter.bias_after`."""
        if (markov := self.markov) is None:
            return None
        begin, states = self.first_memory(text[-1], states), self.guesses(states)

        def bias(
            depths: LongTensor, tokens: LongTensor, memories: list[Any]
        ) -> tuple[Tensor, list[Any]]:
            before = torch.stack([begin if memory is None else memory for memory in memories])
            rows = states[depths.to(states.device)]
            biases, after = markov(tokens.to(states.device), rows, before)
            return biases[..., : logits.shape[-1]], list(after)

        return bias

    def guess(self, states: Tensor, text: LongTensor, room: int) -> GuessedLogits:
        """Make the guess of one row's block, and say how sure it is."""
        guess = super().guess(states, text, room)
        if self.confidence is not None:
            states = self.guesses(states)[:room]

            def chances(before: LongTensor) -> list[float]:
                sure = self.confidence_logits(states[: len(before)], before.to(states.device))
                return torch.sigmoid(sure.float()).tolist()

            guess.confidences = chances
        return guess
