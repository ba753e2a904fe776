"""The README's moving picture, from a real answer of the embedded family with and without its
drafter: `make pictures`.
"""

import json
from html import escape
from pathlib import Path
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from hf_paradraft import AutoDrafter
from hf_paradraft.chat import encode_question
from hf_paradraft.demo import FAMILY, QUESTIONS
from hf_paradraft.report import BLUE, GREEN

CHARACTER, LINE, WIDTH, PAUSE = 7.8, 18, 860, 2.0  # pixels, and seconds at the end
Piece = tuple[float, str, bool]  # seconds, text, whether it was drafted


class Clock(BaseStreamer):
    """When each token came."""

    def __init__(self):
        self.begun, self.tokens, self.seen_prompt = perf_counter(), [], False

    def put(self, value: torch.Tensor) -> None:
        """New tokens; first the prompt's."""
        if self.seen_prompt:
            self.tokens += [
                (perf_counter() - self.begun, token) for token in value.flatten().tolist()
            ]
        self.seen_prompt = True

    def end(self) -> None:
        """Nothing is left to do."""


def answer(target, tokenizer, ids: torch.LongTensor, drafter=None) -> list[Piece]:
    """The answer in pieces."""
    for _ in range(2):  # the first one warms up
        clock = Clock()
        target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            streamer=clock,
            assistant_model=drafter,
        )
    drafted = [False] * len(clock.tokens)
    if drafter is not None:
        drafted = [
            token + 1 < len(one.emitted)
            for one in drafter.last_stats.trace
            for token in range(len(one.emitted))
        ]
    texts = [tokenizer.decode(token) for _, token in clock.tokens]
    return [
        (seconds, text, green)
        for (seconds, _), text, green in zip(clock.tokens, texts, drafted, strict=True)
        if text != "<|end|>"
    ]


def panel(pieces: list[Piece], top: float, title: str, total: float) -> str:
    """One answer, each piece of which appears when it came."""
    parts = [f'<text x="16" y="{top + 24}" class="title">{escape(title)}</text>']
    column, line = 0, 0
    for seconds, text, drafted in pieces:
        for index, part in enumerate(text.split("\n")):
            column, line = (0, line + 1) if index else (column, line)
            if part:
                x, y = 16 + CHARACTER * column, top + 48 + LINE * line
                place = f'x="{x:.1f}" y="{y}" fill="{GREEN if drafted else BLUE}"'
                times = f'values="0;1;1" keyTimes="0;{seconds / total:.4f};1"'
                show = f'{times} calcMode="discrete" dur="{total:.2f}s"'
                shown = f'<animate attributeName="opacity" {show} repeatCount="indefinite"/>'
                parts.append(f"<text {place}>{escape(part)}{shown}</text>")
                column += len(part)
    return "\n".join(parts)


def main() -> None:
    """Write the picture."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target")
    target = AutoModelForCausalLM.from_pretrained(FAMILY / "target", dtype=torch.float32).eval()
    target.generation_config.max_new_tokens = 110
    drafter = AutoDrafter.from_pretrained(FAMILY / "pard", dtype=torch.float32)
    drafter.speculation_config.trace = True
    question = json.loads(QUESTIONS.read_text().splitlines()[0])["turns"][0]
    ids = encode_question(tokenizer, question)
    plain, fast = answer(target, tokenizer, ids), answer(target, tokenizer, ids, drafter)
    assert "".join(text for _, text, _ in plain) == "".join(text for _, text, _ in fast)
    total, lines = plain[-1][0] + PAUSE, "".join(text for _, text, _ in plain).count("\n") + 1
    height = 44 + LINE * lines
    size = f'width="{WIDTH}" height="{2 * height}"'
    style = (
        "text{font:13px monospace;white-space:pre}.title{font:bold 14px sans-serif;fill:#57606a}"
    )
    speed = plain[-1][0] / fast[-1][0]
    panels = panel(plain, 0, "generate", total) + panel(
        fast, height, f"with a drafter: {speed:.1f} times as fast", total
    )
    background = '<rect width="100%" height="100%" rx="8" fill="#f6f8fa"/>'
    inside = f"<style>{style}</style>{background}{panels}"
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{inside}</svg>\n'
    (Path(__file__).parent / "demo.svg").write_text(svg)
    print(f"{speed:.2f} times as fast")


if __name__ == "__main__":
    main()
