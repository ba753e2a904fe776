"""Tool calls: a chat template's form for them, its grammar, and a reader of calls in a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any
from uuid import uuid4

from llguidance import LLMatcher
from transformers import PreTrainedTokenizerBase

from ..chat import render_chat
from .grammar import spaced
from .requests import ChatRequest
from .text import begun

PROBES = "paradraft_one", "paradraft_two"
CALL = re.compile(rf'\{{"(\w+)": "(?:{"|".join(PROBES)})", "(\w+)": \{{\}}\}}')
CONTENT = "paradraft says"


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


class ToolReader:
    """A reader of calls in a text that comes piece by piece.

    Text that may be the beginning of a call is held back.

    Args:
        form: the form of the calls.
    """

    def __init__(self, form: ToolForm):
        self.form, self.held, self.num_calls = form, "", 0
        self.begun = self.shown = False  # whether a call has begun; whether text came before it

    def push(self, text: str, over: bool = False) -> Iterator[dict[str, Any]]:
        """Read more text, and yield the message so far unsent, as OpenAI's deltas.

        Args:
            text: the new text.
            over: whether it is the last.
        """
        self.held += text
        if not self.begun:
            place = self.held.find(self.form.marker)
            keep = 0 if over else begun(self.held, self.form.marker)
            self.begun = place >= 0 if self.form.begin else place == 0 and not self.shown
            shown = self.held[: place if self.begun else len(self.held) - keep]
            self.held, self.shown = self.held[len(shown) :], self.shown or bool(shown)
            if shown:
                yield {"content": shown}
        while self.begun and (start := self.held.find("{")) >= 0:
            try:
                call, end = json.JSONDecoder().raw_decode(self.held, start)
            except (ValueError, RecursionError):  # not all of it is there yet
                return
            written, self.held = self.held[:end], self.held[end:]
            if (name := call.get(self.form.name)) is None or not written[start:].startswith(
                self.form.head(name)
            ):
                yield {"content": written}  # an answer in JSON
                continue
            function = {"name": name, "arguments": written[start + len(self.form.head(name)) : -1]}
            made = {
                "index": self.num_calls,
                "id": f"call_{uuid4().hex}",
                "type": "function",
                "function": function,
            }
            self.num_calls += 1
            yield {"tool_calls": [made]}
