"""Text of an answer as its tokens come, up to a stop text, and the calls of tools in it."""

import json
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from ..chat import Detokeniser
from .grammar import ToolForm


def begun(text: str, stop: str) -> int:
    """Return the length of the longest proper beginning of `stop` that `text` ends with."""
    return next(
        (
            size
            for size in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:size])
        ),
        0,
    )


class Writer:
    """A writer of text from tokens, which holds back a possible beginning of a stop text.

    Args:
        tokenizer: the target's tokenizer.
        stops: the texts that end the answer, special tokens among them; none of them is shown.
        prompt: the prompt's tokens.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], prompt: Sequence[int] = ()
    ):
        self.detokeniser, self.stops = Detokeniser(tokenizer, prompt), stops
        self.stop_ids = {
            index
            for index, token in tokenizer.added_tokens_decoder.items()
            if token.special and str(token) in stops
        }
        self.held = ""  # text that is not shown yet
        self.count = 0  # the number of tokens read
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> str:
        """Read tokens up to the end of a stop text, and return the text that may be shown."""
        for token in tokens:
            self.count += 1
            if token in self.stop_ids:
                self.stopped = True
                return self.rest()
            self.held += self.detokeniser.push(token)
            if found := [place for stop in self.stops if (place := self.held.find(stop)) >= 0]:
                self.held, self.stopped = self.held[: min(found)], True
                return self.rest()
        keep = max((begun(self.held, stop) for stop in self.stops), default=0)
        shown, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return shown

    def end(self) -> str:
        """Return the text held back after the last token, half a character included."""
        return self.rest() + self.detokeniser.rest()

    def rest(self) -> str:
        """Return the text that was held back."""
        shown, self.held = self.held, ""
        return shown


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
