"""Text of an answer as its tokens come, up to a stop text."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ..chat import Detokeniser


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
