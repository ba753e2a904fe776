"""Answers in the form of a grammar, whose forced tokens are drafts without a drafter."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import LongTensor, Tensor
from transformers import LogitsProcessor

from ..copies import PromptLookup
from ..copies.lookup import Copy
from ..protocol import Prefix

PARSE_SECONDS = 5  # that a grammar may take
VALIDATE = (
    "import sys; from llguidance import LLMatcher; LLMatcher.validate_grammar(sys.stdin.read(), "
    "None)"
)


def spaced(schema: dict[str, Any]) -> str:
    """Write a schema whose JSON has exactly the spaces that chat templates write."""
    return json.dumps(
        {
            **schema,
            "x-guidance": {
                "whitespace_flexible": False,
                "item_separator": ", ",
                "key_separator": ": ",
            },
        }
    )


def json_grammar(schema: dict[str, Any]) -> str:
    """Write the grammar of the JSON texts that fit a schema."""
    return LLMatcher.grammar_from_json_schema(spaced(schema))


@lru_cache(32)
def check_parse_time(grammar: str) -> None:
    """Read a grammar in a process that can be ended, to refuse one that takes too long.

    Several patterns for one text may take exponential time, for example.

    Raises:
        ValueError: it takes too long, or ends the process itself.
    """
    try:
        subprocess.run(
            [sys.executable, "-P", "-X", "utf8", "-c", VALIDATE],
            input=grammar,
            encoding="utf-8",
            check=True,
            timeout=PARSE_SECONDS,
            stderr=subprocess.DEVNULL,
        )
    except subprocess.SubprocessError as error:
        raise ValueError(
            f"the schema cannot be followed: it is not understood within {PARSE_SECONDS} seconds."
        ) from error


class Grammar(LogitsProcessor):
    """A logits processor that allows the next tokens of a grammar, for one text that only grows.

    Args:
        tokenizer: the target's tokenizer, with as many ids as it has logits.
        grammar: the grammar in llguidance's form.

    Raises:
        ValueError: the grammar cannot be followed: it has an unknown keyword or pattern, say.
    """

    def __init__(self, tokenizer: LLTokenizer, grammar: str):
        check_parse_time(grammar)
        self.matcher = LLMatcher(tokenizer, grammar)
        self.length: int | None = None  # the number of tokens read, the prompt's included
        self._check()

    def _check(self) -> None:
        if self.matcher.is_error():
            raise ValueError(
                f"the schema cannot be followed: {self.matcher.get_error().splitlines()[0]}"
            )

    def _read(self, ids: LongTensor) -> None:
        new = [] if self.length is None else ids[0, self.length :].tolist()
        self.length = ids.shape[1]
        if not self.matcher.is_stopped():
            self.matcher.consume_tokens(new)
        self._check()

    def __call__(self, input_ids: LongTensor, scores: Tensor) -> Tensor:
        """Mask the tokens that are not allowed after ids `(1, n)`."""
        self._read(input_ids)
        allowed = torch.frombuffer(
            bytearray(self.matcher.compute_logit_bias()), dtype=torch.uint8
        ).to(scores.device)
        return scores.masked_fill(allowed == 0, -torch.inf)

    def forced(self, ids: LongTensor) -> list[int]:
        """List the next tokens after ids `(1, n)`, as far as the grammar allows only one."""
        self._read(ids)
        return self.matcher.compute_ff_tokens()


class Forced(PromptLookup):
    """A prompt lookup that drafts the tokens forced by a grammar before its copies.

    Args:
        grammar: the grammar of the only sequence.
        memory: a memory of other texts, as for `PromptLookup`.
    """

    def __init__(self, grammar: Grammar, memory: Any = None):
        super().__init__(memory=memory)
        self.grammar = grammar

    def find(self, prefix: Prefix, space: int | None, deep: bool) -> list[Copy]:
        """Implement `PromptLookup.find`."""
        copies = super().find(prefix, space, deep)
        if prefix.room and (tokens := self.grammar.forced(prefix.ids)[: prefix.room]):
            copies.insert(0, (tokens, [1.0] * len(tokens)))
        return copies
