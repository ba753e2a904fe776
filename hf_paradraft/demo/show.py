"""Watch a drafter work: one answer, streamed, and where two answers differ."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import LongTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..bench.measure import Measurement, Settings, bench, check_equality
from ..bench.methods import Method
from ..bench.questions import Prompt, Question
from ..bench.results import environment, records
from ..chat import Detokeniser, check_room, encode_question, sampling, stopping
from ..protocol import Drafter, RoundStreamer
from ..report.tables import table

ROUNDING_STEPS = 8  # steps of rounding that may add up over layers


class ColourStreamer(RoundStreamer):
    """A streamer that prints text as it comes, accepted draft tokens in green.

    The target's own tokens are plain.

    Args:
        tokenizer: the target's tokenizer.
        console: the console to print on.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console):
        self.detokeniser, self.console = Detokeniser(tokenizer), console

    def put(self, value: torch.Tensor) -> None:
        """Leave the prompt out."""

    def put_round(self, tokens: list[int], num_accepted: int) -> None:
        """Print a round's tokens."""
        self._show(tokens[:num_accepted], "green")
        self._show(tokens[num_accepted:], "white")

    def _show(self, ids: list[int], style: str) -> None:
        for token in ids:
            self.console.print(Text(self.detokeniser.push(token), style=style), end="")

    def end(self) -> None:
        """Finish the line."""
        self.console.print()


def first_difference(ids: list[int], others: list[int]) -> int:
    """Find the index of the first token that differs between two outputs.

    It is the shorter one's length if the longer one begins with it.
    """
    return next(
        (i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b),
        min(len(ids), len(others)),
    )


@torch.no_grad()
def explain(
    target: PreTrainedModel, prompt: LongTensor, plain: list[int], drafted: list[int]
) -> str:
    """Describe where two greedy outputs part, and whether rounding can have decided it.

    The description is one clause; the two best logits at that place decide.
    """
    index = first_difference(plain, drafted)
    text = torch.cat([prompt, prompt.new_tensor([plain[:index]])], dim=1)
    best, second = target(text, logits_to_keep=1).logits[0, -1].float().topk(2).values.tolist()
    # of rounding, at the size of these logits
    step = max(abs(best), abs(second)) * torch.finfo(target.dtype).eps
    clause = f"from token {index + 1} on, where the two best logits are {best - second:.3g} apart"
    dtype = str(target.dtype).removeprefix("torch.")
    if best - second <= ROUNDING_STEPS * step:
        return (
            f"{clause}: a near-tie, which rounding to {dtype} (steps of {step:.2g}) decided. In "
            "float32 they are equal"
        )
    return (
        f"{clause}, more than rounding to {dtype} (steps of {step:.2g}) explains: please report it"
    )


MAX_SECONDS = 15.0  # for the plain answer that is compared with


def stream_one(
    target: PreTrainedModel,
    drafter: Drafter,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    console: Console,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
) -> float:
    """Answer `prompt` with the drafter, coloured, and compare with plain `generate`.

    Both start from the same seed. The result is the tokens per second of plain `generate`.
    """
    ids = encode_question(tokenizer, prompt).to(target.device)
    begin = ids.shape[1]
    check_room(target, begin, max_new_tokens)
    arguments = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": max_new_tokens,
        **sampling(temperature),
    }
    arguments |= stopping(target, tokenizer)
    target.generate(ids, **{**arguments, "max_new_tokens": 2}, assistant_model=drafter)  # warm up
    console.rule("[bold]prompt")
    console.print(Text(prompt))
    console.rule("[bold]answer[/bold] · [green]drafted and accepted[/green] · the target's own")

    def timed(**options: Any) -> tuple[list[int], float]:
        """Generate an answer: its new tokens, and how many of them a second."""
        torch.manual_seed(0)
        started = perf_counter()
        new = target.generate(ids, **arguments, **options)[0, begin:].tolist()
        return new, len(new) / (perf_counter() - started)

    fast, fast_rate = timed(assistant_model=drafter, streamer=ColourStreamer(tokenizer, console))
    slow, slow_rate = timed(max_time=MAX_SECONDS)  # its beginning, where it takes longer
    console.rule()
    console.print(str(drafter.last_stats))
    verdict = "identical to its output"
    if fast[: len(slow)] != slow:
        verdict = f"other than its output {explain(target, ids, slow, fast)}"
    elif len(slow) < len(fast):
        verdict = f"identical to its first {len(slow)} tokens, which took {MAX_SECONDS:.0f} seconds"
    console.print(f"{fast_rate / slow_rate:.2f}× plain generate, and {verdict}\n")
    return slow_rate


def by_turns(questions: Sequence[Question]) -> list[Question]:
    """Order questions so that categories take turns.

    Wherever the list is cut off after the first turn, all categories were asked.
    """
    asked: Counter[str] = Counter()

    def turn(question: Question) -> int:
        """Count the questions of its category so far."""
        asked[question.category] += 1
        return asked[question.category]

    return sorted(questions, key=turn)


DEMO_COST = 5  # the time of one prompt by all methods of the demo, in plain answers


def compare_within(
    target: PreTrainedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    console: Console,
    settings: Settings,
    seconds: float,
    plain_rate: float,
) -> None:
    """Measure as many prompts as fit into a time, with a table that fills as it goes.

    Then outputs are compared in a second pass in float32, if decoding is greedy and the target is
    neither in float32 nor quantised.

    Args:
        target: the target, as for `bench`.
        methods: the methods, plain first.
        prompts: the prompts, those first that are most worth asking.
        console: the console for the table.
        settings: those of `bench`; answers are cut shorter if the machine is so slow that not
            three prompts would fit.
        seconds: the time for everything; one prompt is always asked.
        plain_rate: plain decoding's tokens per second.
    """
    begun = perf_counter()
    second_pass = (
        target.dtype != torch.float32
        and getattr(target.config, "quantization_config", None) is None
    )
    share = 0.5 if second_pass else 0.9  # of the time is for what is timed
    most = max(16, int(share * seconds * plain_rate / (3 * DEMO_COST)))
    settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, most), warm_up=0)
    asked = [0.0]

    def title() -> str:
        return f"{len(asked) - 1} of {len(prompts)} prompts, up to {settings.max_new_tokens} tokens"

    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        live.update(Text("warming up …", style="dim"), refresh=True)
        bench(target, methods, prompts[:1], replace(settings, max_new_tokens=4), progress=False)

        def show(made: list[Measurement]) -> None:
            asked.append(perf_counter() - begun)
            live.update(table(records(made), title()), refresh=True)

        def enough() -> bool:
            return (
                asked[-1] + max(late - early for early, late in pairwise(asked)) > share * seconds
            )

        results = bench(
            target, methods, prompts, settings, save=show, progress=False, enough=enough
        )
        if second_pass:
            check_equality(
                target, methods, prompts[: len(asked) - 1], settings, results, progress=False
            )
        live.update(table(records(results), title()), refresh=True)
    console.print("\n" + environment(target), style="dim")
    if (count := len(asked) - 1) < len(prompts):
        console.print(
            f"{count} of {len(prompts)} prompts fitted into {seconds:.0f} seconds, and figures of "
            "few prompts move by a fifth: about --seconds "
            f"{asked[-1] / share / count * len(prompts):.0f} asks all; paradraft bench asks "
            "several times."
        )
