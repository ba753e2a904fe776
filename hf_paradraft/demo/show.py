"""Watch a drafter work: one answer, streamed."""

from time import perf_counter

import torch
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..chat import encode_question
from ..protocol import Drafter
from .differences import explain


class ColourStreamer(BaseStreamer):
    """Prints text as it comes: drafted and accepted tokens green, the target's own plain.

    Args:
        tokenizer: decodes.
        console: prints.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console):
        self.tokenizer, self.console = tokenizer, console
        self.prompt_seen = False
        self.ids: list[int] = []
        self.shown = ""

    def put(self, value: torch.Tensor) -> None:
        """A round's tokens `(1, n)`; the last is the target's own. The first call brings the prompt."""
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        *drafted, own = value[0].tolist()
        self._show(drafted, "green")
        self._show([own], "white")

    def _show(self, ids: list[int], style: str) -> None:
        self.ids += ids
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if text.endswith("\ufffd"):  # half a character: wait for the rest
            return
        self.console.print(Text(text[len(self.shown) :], style=style), end="")
        self.shown = text

    def end(self) -> None:
        """Finish the line."""
        self.console.print()


def stream_one(
    target: PreTrainedModel,
    drafter: Drafter,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    console: Console,
    max_new_tokens: int = 128,
) -> None:
    """Answer `prompt` with the drafter, coloured, and say how it compares with plain `generate`."""
    ids = encode_question(tokenizer, prompt).to(target.device)
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max_new_tokens, "do_sample": False}
    target.generate(ids, **{**arguments, "max_new_tokens": 2}, assistant_model=drafter)  # warm up
    console.rule("[bold]prompt")
    console.print(Text(prompt))
    console.rule("[bold]answer[/bold] · [green]drafted and accepted[/green] · the target's own")
    started = perf_counter()
    fast = target.generate(ids, **arguments, assistant_model=drafter, streamer=ColourStreamer(tokenizer, console))
    fast_seconds = perf_counter() - started
    started = perf_counter()
    slow = target.generate(ids, **arguments)
    slow_seconds = perf_counter() - started
    console.rule()
    console.print(str(drafter.last_stats))
    verdict = "identical to its output"
    if not torch.equal(fast, slow):
        begin = ids.shape[1]
        verdict = f"other than its output {explain(target, ids, slow[0, begin:].tolist(), fast[0, begin:].tolist())}"
    console.print(f"{slow_seconds / fast_seconds:.2f}× plain generate, and {verdict}\n")
