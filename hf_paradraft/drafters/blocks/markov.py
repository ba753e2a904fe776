"""A logit bias that looks at the token before (DSpark, section 3.2)."""

from __future__ import annotations

import torch
from torch import LongTensor, Tensor, nn


class MarkovHead(nn.Module):
    """A logit bias for each token v after the token u that was chosen before.

    It is `bias(v | u) = W2[v] · e(u)`, of rank `r`.

    `vanilla`: `e = W1[u]`. `gated`: `e = σ(G [h; W1[u]] + b) ⊙ W1[u]`. `rnn`: `[a; c; o] = J [s;
    W1[u]; h] + b`, `e = tanh(o)`; the state becomes `σ(a) ⊙ s + (1 - σ(a)) ⊙ tanh(c)`.

    Args:
        vocab_size: V of the target, whose ids the token before has.
        num_guesses: V'.
        rank: r.
        hidden_size: d, of the states h.
        kind: one of the three.
    """

    def __init__(
        self, vocab_size: int, num_guesses: int, rank: int, hidden_size: int, kind: str = "vanilla"
    ):
        super().__init__()
        self.kind, self.rank = kind, rank
        self.before = nn.Embedding(vocab_size, rank)
        self.after = nn.Linear(rank, num_guesses, bias=False)
        nn.init.normal_(self.before.weight, std=0.01)
        if kind == "gated":
            self.gate = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def embed(self, tokens: LongTensor) -> Tensor:
        """Look up the embeddings `W1`, `(…, r)`, of tokens.

        Tokens that the table does not have count as token 0.
        """
        return self.before(tokens.where(tokens < self.before.num_embeddings, 0))

    def forward(
        self, tokens: LongTensor, states: Tensor, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the logit bias after `tokens`, and the new memory of the recurrent head.

        Args:
            tokens: int64 `(…)`, in the target's ids.
            states: `(…, d)`, of the rows that guess what follows.
            memory: `(…, r)` of the `rnn`; None: nothing yet.

        Returns:
            `(…, V')`, and `(…, r)` or None.
        """
        embedded = self.embed(tokens)
        if self.kind == "vanilla":
            return self.after(embedded), None
        if self.kind == "gated":
            return self.after(
                torch.sigmoid(self.gate(torch.cat([states, embedded], dim=-1))) * embedded
            ), None
        memory = torch.zeros_like(embedded) if memory is None else memory
        keep, new, out = self.joint(torch.cat([memory, embedded, states], dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(keep)
        return self.after(torch.tanh(out)), keep * memory + (1 - keep) * torch.tanh(new)

    def along(self, tokens: LongTensor, states: Tensor) -> Tensor:
        """Compute the biases `(…, k, V')` where the tokens before, `(…, k)`, are all known."""
        if self.kind != "rnn":
            return self(tokens, states)[0]
        memory, biases = None, []
        for token, state in zip(tokens.unbind(-1), states.unbind(-2), strict=True):
            bias, memory = self(token, state, memory)
            biases.append(bias)
        return torch.stack(biases, dim=-2)
