"""`paradraft demo`: watch a drafter work, then see the numbers."""

from collections.abc import Sequence
from itertools import islice
from time import perf_counter

import torch
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..bench import Method, bench, records, table
from ..bench.measure import Prompt, encode_prompts, environment
from ..drafters.pard import PardDrafter
from .tasks import CATEGORIES, tasks

# For models from the Hub, which were not taught the embedded family's tasks.
GENERAL_PROMPTS = (
    ("code", "Write a Python function that checks whether a string is a palindrome."),
    ("code", "Write a Python class for a bank account with deposit and withdraw."),
    ("maths", "A train travels 60 km in 45 minutes. What is its speed in km/h? Show the working."),
    ("maths", "What is the sum of the first 20 odd numbers? Explain."),
    ("writing", "Write a short letter that thanks a friend for a book."),
    ("writing", "Describe a rainy morning in a small town."),
    ("facts", "Why is the sky blue?"),
    ("facts", "How does a refrigerator work?"),
    ("reshaping", "Turn this into JSON: name Ada, born 1815, field mathematics."),
    ("reshaping", "Make a Markdown table of three fruits with colour and taste."),
)


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
    drafter: PardDrafter,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    console: Console,
    max_new_tokens: int = 128,
) -> None:
    """Answer `prompt` with the drafter, coloured, and say how it compares with plain `generate`."""
    ids = encode_prompts(tokenizer, [("", prompt)])[0].ids.to(target.device)
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
    verdict = "identical to" if torch.equal(fast, slow) else "[red]different from[/red]"
    console.print(f"{slow_seconds / fast_seconds:.2f}× plain generate, and {verdict} its output\n")


def demo_prompts(per_category: int, general: bool, seed: int = 0) -> list[tuple[str, str]]:
    """(category, prompt) pairs: held-out tasks, or general prompts for models from the Hub."""
    if general:
        return list(GENERAL_PROMPTS)
    return [(name, task.prompt) for name in CATEGORIES for task in islice(tasks(name, seed, True), per_category)]


def compare(
    target: PreTrainedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    console: Console,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    repeats: int = 1,
    batch_size: int = 1,
    pad_token_id: int | None = None,
) -> list[dict]:
    """Measure, print the table, and return its records."""
    options = {"batch_size": batch_size, "pad_token_id": pad_token_id}
    results = bench(target, methods, prompts, max_new_tokens, temperature, repeats, **options)
    rows = [{**row, "environment": environment(target), "batch_size": batch_size} for row in records(results)]
    if temperature == 0 and target.dtype != torch.float32:
        equal = fp32_equality(target, methods, prompts, max_new_tokens, **options)
        for row in rows:
            row["matches_reference"] = equal[row["method"]]
    kind = "greedy" if temperature == 0 else f"temperature {temperature}"
    dtype = str(target.dtype).removeprefix("torch.")
    console.print(table(rows, f"{len(prompts)} prompts, up to {max_new_tokens} tokens, {kind}, {dtype}"))
    return rows


def fp32_equality(target, methods, prompts, max_new_tokens, **options) -> dict[str, float]:
    """Share of prompts on which each method, in fp32, gives plain `generate`'s tokens; the target comes back as it was."""
    dtype = target.dtype
    target.float()
    try:
        rows = records(bench(target, methods, prompts, max_new_tokens, **options))
    finally:
        target.to(dtype)
    return {row["method"]: row["matches_reference"] for row in rows}
