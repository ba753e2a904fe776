"""Grammars of answers, for a schema or for calls of tools in the form of a chat template; tokens
that they force are drafts without a drafter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import LongTensor, Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from ..chat import render_chat
from ..copies import PromptLookup
from ..copies.lookup import Copy
from ..protocol import Prefix
from .requests import ChatRequest

PARSE_SECONDS = 5  # that a grammar may take
VALIDATE = (
    "import sys; from llguidance import LLMatcher; LLMatcher.validate_grammar(sys.stdin.read(), "
    "None)"
)
PROBES = "paradraft_one", "paradraft_two"
CALL = re.compile(rf'\{{"(\w+)": "(?:{"|".join(PROBES)})", "(\w+)": \{{\}}\}}')
CONTENT = "paradraft says"


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


@dataclass(frozen=True)
class ToolForm:
    """The form in which a chat template, and so its model, writes tool calls.

    Calls are JSON objects of a name and arguments, in a frame.

    Attributes:
        begin: the text before the first call.
        between: the text from a call to the next one; None: an answer has one call.
        end: the text after the last call.
        name, arguments: the names of the two fields.
    """

    begin: str
    between: str | None
    end: str
    name: str
    arguments: str

    @classmethod
    def of_template(cls, tokenizer: PreTrainedTokenizerBase) -> ToolForm:
        """Find the form by rendering calls with the template.

        Raises:
            ValueError: the template has no tools, or writes calls in another form.
        """
        tool = {
            "type": "function",
            "function": {
                "name": PROBES[0],
                "description": "",
                "parameters": {"type": "object", "properties": {}},
            },
        }
        user = {"role": "user", "content": "a"}
        if tokenizer.chat_template is None or PROBES[0] not in render_chat(
            tokenizer, [user], True, [tool]
        ):
            raise ValueError(
                "the model's chat template has no tools: leave tools out, or set a template that "
                "has some."
            )
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        for names in (PROBES, PROBES[:1]):
            calls = [
                {"type": "function", "id": name, "function": {"name": name, "arguments": {}}}
                for name in names
            ]
            turn = {"role": "assistant", "content": CONTENT, "tool_calls": calls}
            try:
                opened = render_chat(tokenizer, [user], True)
                whole = render_chat(tokenizer, [user, turn], False)
            except ValueError:  # some templates refuse several calls at once
                continue
            _, shown, written = whole.rpartition(CONTENT)
            same = [*takewhile(lambda pair: pair[0] == pair[1], zip(opened, whole, strict=False))]
            written = written if shown else whole[len(same) :]
            if len(found := [*CALL.finditer(written)]) < len(names):
                continue
            end = written[found[-1].end() :]
            end = end[
                : min((place for token in special if (place := end.find(token)) >= 0), default=None)
            ].rstrip()
            between = written[found[0].end() : found[1].start()] if len(names) > 1 else None
            begin = written[: found[0].start()].lstrip()
            if not any(token in f"{begin}{between}" for token in special):
                return cls(begin, between, end, *found[0].groups())
        raise ValueError(
            "the model's chat template writes calls in a form that is not known here: leave tools "
            "out."
        )

    @property
    def marker(self) -> str:
        """The text by which the first call is recognised.

        It may stand anywhere in an answer; if calls have no frame, only at its beginning.
        """
        return self.begin.rstrip() or "{"

    def head(self, name: str) -> str:
        """Write a call of a tool up to its arguments."""
        return f'{{"{self.name}": {json.dumps(name)}, "{self.arguments}": '

    def grammar(self, ask: ChatRequest) -> str:
        """Write the grammar of an answer to a request with tools.

        The answer is text and then calls, or only calls if one has to be made. If calls have no
        frame, or the answer has a schema, it is either text or calls.

        Raises:
            ValueError: a tool has to be called that is not offered.
        """
        tools: list[Any] = [tool["function"] for tool in ask.tools]
        wanted: Any = ask.tool_choice
        named = not isinstance(wanted, str)
        if named:
            tools = [tool for tool in tools if tool["name"] == wanted["function"]["name"]]
        if not tools:
            raise ValueError("tool_choice: the tool that has to be called is none of tools.")
        several = self.between is not None and ask.parallel_tool_calls and not named
        more = f" ({json.dumps(self.between)} call)*" if several else ""
        calls = f"call{more} {_quoted(self.end)}"
        rules = [f"start: {_quoted(self.begin)} {calls}"]
        if wanted == "auto" and ask.answer_schema is not None:
            rules = [f"{rules[0]} | answer", f"answer: %json {spaced(ask.answer_schema)}"]
        elif wanted == "auto" and self.begin:
            rules = [
                f"start: TEXT | begin {calls}",
                f"begin: marker {_quoted(self.begin[len(self.marker) :])}",
            ]
            rules += [f"marker[lazy]: TEXT {_quoted(self.marker)}", r"TEXT: /(.|\n)*/"]
        elif wanted == "auto":
            rules = [f"start: TEXT | {calls}", r"TEXT: /([^{](.|\n)*)?/"]
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
        for number, tool in enumerate(tools):
            rules.append(f'call_{number}: {_quoted(self.head(tool["name"]))} args_{number} "}}"')
            rules.append(
                f"args_{number}: %json {spaced(tool.get('parameters') or {'type': 'object'})}"
            )
        return LLMatcher.grammar_from_lark("%llguidance {}\n" + "\n".join(rules) + "\n")


def _quoted(text: str) -> str:
    """Write a text as a string of a grammar; an empty one is left out."""
    return json.dumps(text) if text else ""
