"""What copied drafts bring where the answer is known: edits of source files, passages, and
questions that are asked again.

`python examples/studies/copies.py --target build/public/SmolLM2-135M-Instruct --drafter
hf_paradraft/demo/public/eagle3` prints a table, and writes the records with --output; with --curve
it times lookups in memories of all sizes instead.
"""

import calendar
import colorsys
import heapq
import inspect
import json
import random
import shlex
import statistics
import string
import textwrap
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paradraft import AutoDrafter, Memory, NgramDrafter, SpeculationConfig
from hf_paradraft.bench.measure import Settings, bench
from hf_paradraft.bench.methods import drafted, plain, prompt_lookup
from hf_paradraft.bench.questions import Question, ask
from hf_paradraft.bench.results import environment, records
from hf_paradraft.hardware import fast_dtype
from hf_paradraft.report.tables import table

FUNCTIONS = [  # and what is renamed in them
    (string.capwords, "sep", "separator"),
    (heapq.merge, "h_append", "push"),
    (colorsys.rgb_to_hls, "maxc", "highest"),
    (textwrap.indent, "prefixed_lines", "pieces"),
    (shlex.join, "split_command", "words"),
    (statistics.harmonic_mean, "weights", "shares"),
    (calendar.monthrange, "day1", "first_day"),
    (textwrap.shorten, "text", "paragraph"),
]
AGAIN = [
    "How is bread baked?",
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "What does a bank do?",
    "Explain what a computer's memory is for.",
    "Describe a day in autumn.",
]


def edits() -> list[str]:
    """Make questions for a source file with one name changed."""
    return [
        f"Rewrite this code with the variable {old} renamed to {new}. Change nothing else, and "
        f"answer with the code alone.\n\n```python\n{inspect.getsource(function)}```"
        for function, old, new in FUNCTIONS
    ]


def curve() -> None:
    """Print the microseconds of a lookup by the memory's size."""
    draw, memory = random.Random(0), Memory(1 << 21)
    for size in (10_000, 100_000, 1_000_000):
        while len(memory) < size:
            memory.add([int(2000 * draw.random() ** 3) for _ in range(256)])
        tails = [[int(2000 * draw.random() ** 3) for _ in range(32)] for _ in range(2000)]
        begun = perf_counter()
        for tail in tails:
            memory.following(tail, 32)
        print(f"{size:>9,} tokens: {(perf_counter() - begun) / len(tails) * 1e6:.1f} µs a lookup")


def main(
    target: Annotated[str, typer.Option(help="A chat model.")] = "",
    drafter: Annotated[str, typer.Option(help="A drafter for it.")] = "",
    passages: Annotated[
        Path | None,
        typer.Option(help="Questions with their passages, of Spec-Bench's category rag."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the records here.")] = None,
    max_new_tokens: int = 128,
    repeats: int = 1,
    curve_only: Annotated[bool, typer.Option("--curve", help="Time lookups alone.")] = False,
) -> None:
    """Measure on one model, all methods in one run."""
    if curve_only:
        return curve()
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=fast_dtype())
    memory = Memory()
    questions = [Question("edits", (text,)) for text in edits()]
    for text in edits():
        memory.add(tokenizer(text.split("```python\n")[1], add_special_tokens=False)["input_ids"])
    rows = [json.loads(line) for line in passages.read_text().splitlines()] if passages else []
    questions += [
        Question("passages", tuple(row["turns"])) for row in rows if row["category"] == "rag"
    ][:6]
    for prompt in ask(
        [Question("again", (text,)) for text in AGAIN], tokenizer, model, max_new_tokens
    ):
        out = model.generate(
            prompt.ids,
            attention_mask=torch.ones_like(prompt.ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
        memory.add(out[0, prompt.ids.shape[1] :])
    questions += [Question("again", (f"{text} Answer in plain words.",)) for text in AGAIN]
    guessing, knowing = (AutoDrafter.from_pretrained(drafter, dtype=model.dtype) for _ in range(2))
    knowing.memory = memory
    tree = SpeculationConfig(
        guessing.speculation_config.num_draft_tokens, "auto", prompt_lookup=True
    )
    chain = SpeculationConfig(32, None)
    methods = [
        plain(),
        prompt_lookup(),
        drafted("ngram-text-k10", NgramDrafter(), SpeculationConfig(10, None)),
        drafted("ngram-text-k32", NgramDrafter(), chain),
        drafted("ngram-memory-k32", NgramDrafter(memory=memory), chain),
        drafted(f"{guessing.kind}-tree-auto-text", guessing, tree),
        drafted(f"{guessing.kind}-tree-auto-memory", knowing, tree),
    ]
    prompts = ask(questions, tokenizer, model, max_new_tokens)
    rows = records(
        bench(
            model,
            methods,
            prompts,
            Settings(max_new_tokens, repeats=repeats),
            tokenizer.eos_token_id,
        )
    )
    Console().print(table(rows, environment(model)))
    if output is not None:
        kept = (
            "method",
            "tokens",
            "speedup",
            "speedup_quartiles",
            "tau",
            "matches_here",
            "by_category",
            "tau_by_category",
        )
        output.write_text(
            json.dumps([{name: row.get(name) for name in kept} for row in rows], indent=2) + "\n"
        )
        print(environment(model))


if __name__ == "__main__":
    typer.run(main)
