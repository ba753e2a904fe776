"""Forty clients at `paradraft serve`: ragged prompts, conversations, schemas, cancellations, bad,
huge and hostile requests.

Every text is compared. Then twelve requests at once, one after the other, and so without drafts:
tokens per second, and the time to the first one. Then ten turns of a conversation, with and without
kept prefixes: the time to the first token of each.

python -m examples.studies.serving clients OUT.json [SECONDS]
python -m examples.studies.serving together OUT.json PICTURE.png
python -m examples.studies.serving turns OUT.json PICTURE.png
"""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any

import httpx
import openai
import torch
from matplotlib import pyplot
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paradraft import AutoDrafter
from hf_paradraft.chat import encode_question
from hf_paradraft.demo import FAMILY, PUBLIC, QUESTIONS
from hf_paradraft.demo.public_model import get_public
from hf_paradraft.report import GREEN
from hf_paradraft.serve.scheduler import Job, News, Scheduler

CLIENTS, MODEL, NEW = 40, "paradraft-family", 64
BAD: list[dict[str, Any]] = [
    {"n": 2},
    {"model": "another"},
    {"max_tokens": 0},
    {"temperature": -1},
    {"messages": []},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"messages": [{"role": "user", "content": "word " * 5000}]},
    {"extra_body": {"unknown": 1}},
    {"stop": "a" * 200_000},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "king"}},
        }
    },
]
HOSTILE: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": [{}] * 300_000}),
    ("completions", {"prompt": "word " * 800_000}),
    ("chat/completions", {"messages": [1] * 1_000_000}),
    (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            **{f"field {number}": 1 for number in range(200_000)},
        },
    ),
]
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "date", "schema": {"type": "object", "properties": {
        "day": {"type": "integer", "minimum": 1, "maximum": 31}, "month": {"enum": ["May", "June",
        "July", "August"]}},
        "required": ["day", "month"], "additionalProperties": False}},
}  # fmt: skip


# by the turns before and the seed; None: greedy
Texts = dict[tuple[tuple[str, ...], int | None], str]


def texts_of(questions: list[str]) -> Texts:
    """Write every answer with plain `generate`: greedy (None), and with two seeds; and to a second
    question after a first one.
    """
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target")
    target = AutoModelForCausalLM.from_pretrained(FAMILY / "target", dtype=torch.float32)
    texts: Texts = {}

    def write(turns: tuple[str, ...], seed: int | None) -> None:
        ids = tokenizer.apply_chat_template(
            messages_of(turns), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        torch.manual_seed(seed or 0)
        rules = {"do_sample": False} if seed is None else {"do_sample": True, "temperature": 0.8}
        out = target.generate(**ids, **rules, max_new_tokens=NEW)
        texts[turns, seed] = tokenizer.decode(
            out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True
        )

    for question, second in zip(questions, [*questions[1:], questions[0]], strict=True):
        for seed in (None, 1, 2):
            write((question,), seed)
        write((question, texts[(question,), None], second), None)
    return texts


def messages_of(turns: tuple[str, ...]) -> list[dict[str, str]]:
    """Write turns as messages."""
    return [
        {"role": "assistant" if index % 2 else "user", "content": turn}
        for index, turn in enumerate(turns)
    ]


RUDE = "cancelled", "abandoned", "bad", "huge", "hostile"


class Client(Thread):
    """One of them: asks, gives up, and misbehaves until the time is over.

    Args:
        address: of the server.
        texts: that it should get.
        seed: of its choices.
        end: when it stops, by `time.monotonic`.
    """

    def __init__(self, address: str, texts: Texts, seed: int, end: float):
        super().__init__()
        self.client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120)
        self.address, self.texts, self.luck, self.end = address, texts, random.Random(seed), end
        self.counts: Counter[str] = Counter()
        self.wrong: list[tuple[str, str]] = []

    def run(self) -> None:
        """Go on until the end."""
        while time.monotonic() < self.end:
            what = self.luck.choice((*["whole"] * 3, *["stream"] * 5, "schema", "schema", *RUDE))
            try:
                self.counts[getattr(self, what)()] += 1
            except openai.RateLimitError:
                self.counts["queue full"] += 1
                time.sleep(0.5)

    def asked(self, **more: Any) -> tuple[Any, str]:
        """Ask something; gives the answer and the text that it should be."""
        turns, seed = self.luck.choice(list(self.texts))
        body: dict[str, Any] = (
            {"temperature": 0} if seed is None else {"temperature": 0.8, "seed": seed}
        )
        if self.luck.random() < 0.2:
            body["extra_body"] = {"speculation": {"enabled": False}}
        elif self.luck.random() < 0.2:
            body["prediction"] = {"type": "content", "content": self.texts[turns, None]}
        made = self.client.chat.completions.create(
            model=MODEL, messages=messages_of(turns), max_tokens=NEW, **body, **more
        )
        return made, self.texts[turns, seed]

    def judged(self, name: str, text: str, true: str) -> str:
        """Compare a text."""
        if text != true:
            self.wrong.append((text, true))
        return name

    def whole(self) -> str:
        """Wait for an answer."""
        made, true = self.asked()
        return self.judged("whole", made.choices[0].message.content, true)

    def stream(self) -> str:
        """Read it as it comes."""
        chunks, true = self.asked(stream=True)
        return self.judged(
            "stream", "".join(chunk.choices[0].delta.content or "" for chunk in chunks), true
        )

    def schema(self) -> str:
        """Ask for JSON."""
        turns, _ = self.luck.choice(list(self.texts))
        made = self.client.chat.completions.create(
            model=MODEL, messages=messages_of(turns), max_tokens=NEW, response_format=FORM
        )
        if set(json.loads(made.choices[0].message.content)) != {"day", "month"}:
            self.wrong.append((made.choices[0].message.content, "a date"))
        return "schema"

    def hostile(self) -> str:
        """Send a body that costs the server more than the client."""
        path, body = self.luck.choice(HOSTILE)
        said = httpx.post(f"{self.address}/{path}", json=body, timeout=120)
        if said.status_code != 400 or len(said.text) > 1000:
            self.wrong.append((said.text[:200], "refused in a few words"))
        return "hostile"

    def cancelled(self) -> str:
        """Hang up after some chunks."""
        chunks, true = self.asked(stream=True)
        text = ""
        for _, chunk in zip(range(self.luck.randint(1, 6)), chunks, strict=False):
            text += chunk.choices[0].delta.content or ""
        chunks.close()
        return self.judged("cancelled", text, true[: len(text)])

    def abandoned(self) -> str:
        """Lose patience before the answer."""
        try:
            self.asked(timeout=self.luck.uniform(0.01, 0.5))
        except openai.APITimeoutError:
            return "abandoned"
        return "in time"

    def bad(self) -> str:
        """Ask what is refused."""
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "x"}],
            **self.luck.choice(BAD),
        }
        with suppress(openai.BadRequestError, openai.NotFoundError):
            self.client.chat.completions.create(**body)
            self.wrong.append((str(body)[:200], "refused"))
        return "refused"

    def huge(self) -> str:
        """Send ten megabytes."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 10_000_000}]}
        with suppress(httpx.TransportError):  # it may hang up before it has read all
            assert (
                httpx.post(f"{self.address}/chat/completions", json=body, timeout=120).status_code
                == 413
            )
        return "huge"


def resident(pid: int) -> float:
    """How many MiB of memory a process has."""
    line = next(
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )
    return int(line.split()[1]) / 1024


def clients(output: str, seconds: str = "300") -> None:
    """Let them ask, and write what happened."""
    questions = [json.loads(line)["turns"][0] for line in QUESTIONS.read_text().splitlines()][:24]
    texts = texts_of(questions)
    command = [
        sys.executable,
        "-m",
        "hf_paradraft.cli",
        "serve",
        "--port",
        "0",
        "--dtype",
        "float32",
        "--threads",
        "1",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        end, memory, health = time.monotonic() + float(seconds), list[float](), list[float]()
        asking = [Client(address, texts, seed, end) for seed in range(CLIENTS)]
        for client in asking:
            client.start()
        while any(client.is_alive() for client in asking):
            time.sleep(1)
            begun = time.monotonic()
            assert httpx.get(address.replace("/v1", "/health"), timeout=60).status_code == 200
            health.append(time.monotonic() - begun)
            memory.append(resident(server.pid))
        time.sleep(1)
        metrics = httpx.get(address.replace("/v1", "/metrics")).text
        left = {
            line.split()[0]: float(line.split()[1])
            for line in metrics.splitlines()
            if line.startswith("num_requests")
        }
        server.terminate()
    counts = sum((client.counts for client in asking), Counter())
    said = {
        "counts": dict(counts),
        "wrong": [wrong for client in asking for wrong in client.wrong],
        "MiB": memory,
        "health, seconds": {"median": median(health), "most": max(health)},
        "left": left,
        "exit": server.returncode,
    }
    Path(output).write_text(json.dumps(said))
    print({**said, "MiB": [round(size) for size in memory[::30]], "wrong": len(said["wrong"])})


def together(output: str, picture: str, repeats: int = 3) -> None:
    """Time twelve requests in three ways, in turn, and draw who was served when in the first of
    them.
    """
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target")
    target = AutoModelForCausalLM.from_pretrained(FAMILY / "target", dtype=torch.float32)
    drafter = AutoDrafter.from_pretrained(FAMILY / "pard", dtype=torch.float32)
    questions = [json.loads(line)["turns"][0] for line in QUESTIONS.read_text().splitlines()][:12]
    prompts = [encode_question(tokenizer, question)[0].tolist() for question in questions]
    scheduler = Scheduler(target, drafter, max_batch_size=12)
    scheduler.start()

    def asked(
        at_once: bool, drafts: bool
    ) -> tuple[float, list[list[tuple[float, int]]], list[list[int]]]:
        """Seconds in all; of each request when so many tokens came; and its tokens."""
        begun, came, texts, over = time.perf_counter(), [], [], []

        def request(prompt: list[int]) -> None:
            times, tokens, ended = list[tuple[float, int]](), list[int](), Event()

            def tell(news: News) -> None:
                times.append((time.perf_counter() - begun, len(news.tokens)))
                tokens.extend(news.tokens)
                if news.over:
                    ended.set()

            came.append(times)
            texts.append(tokens)
            over.append(ended)
            options = {"max_new_tokens": 96, "do_sample": False, "pad_token_id": 0}
            scheduler.submit(Job(prompt, options, tell, drafts=drafts))
            if not at_once:
                ended.wait()

        for prompt in prompts:
            request(prompt)
        for ended in over:
            ended.wait()
        return time.perf_counter() - begun, came, texts

    ways = {
        "at once": (True, True),
        "one after the other": (False, True),
        "one after the other, without drafts": (False, False),
    }
    said: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        written = []
        for name, way in ways.items():
            seconds, came, texts = asked(*way)
            written.append(texts)
            if repeat:  # the first warms up
                count = sum(map(len, texts))
                starts = [0.0, *(0.0 if way[0] else times[-1][0] for times in came[:-1])]
                waited = [times[0][0] - start for times, start in zip(came, starts, strict=True)]
                said[name].append((count / seconds, median(waited)))
                if name == "at once" and repeat == 1:
                    _draw(came, picture)
        assert written[0] == written[1] == written[2]
    scheduler.stop()
    rows = {
        name: [median(column) for column in zip(*values, strict=True)]
        for name, values in said.items()
    }
    Path(output).write_text(
        json.dumps({"tokens a second, seconds to the first token": rows, "all": said})
    )
    print(rows)


def turns(output: str, picture: str, count: int = 10) -> None:
    """Ask ten turns behind a beginning of 2,000 tokens, with and without kept prefixes, and draw
    when first tokens came.
    """
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(get_public())
    target = AutoModelForCausalLM.from_pretrained(get_public(), dtype=torch.float32)
    drafter = AutoDrafter.from_pretrained(PUBLIC / "eagle3", dtype=torch.float32)
    pages = sorted(Path("docs").glob("*.md"))
    ids = tokenizer("".join(page.read_text() for page in pages))["input_ids"]
    seconds, texts, taus = {}, {}, {}
    for name, kept in (("read anew", 0), ("kept", 2**30)):
        scheduler = Scheduler(target, drafter, prefix_bytes=kept)
        scheduler.start()
        prompt = ids[:2000]
        seconds[name], texts[name], taus[name] = list[float](), list[list[int]](), list[float]()
        for turn in range(count):
            tokens, over, times = list[int](), Event(), list[float]()

            def tell(
                news: News,
                tokens: list[int] = tokens,
                over: Event = over,
                times: list[float] = times,
            ) -> None:
                times.append(time.perf_counter())
                tokens.extend(news.tokens)
                if news.over:
                    over.set()

            job, begun = (
                Job(
                    list(prompt),
                    {"max_new_tokens": 48, "do_sample": False, "pad_token_id": 0},
                    tell,
                ),
                time.perf_counter(),
            )
            scheduler.submit(job)
            over.wait()
            seconds[name].append(times[0] - begun)
            texts[name].append(tokens)
            taus[name].append(job.stats.mean_emitted)
            prompt = [*prompt, *tokens, *ids[2000 + 40 * turn : 2040 + 40 * turn]]
        scheduler.stop()
    same = texts["kept"] == texts["read anew"]
    Path(output).write_text(
        json.dumps({"seconds": seconds, "tokens a round": taus, "same texts": same})
    )
    print(seconds, taus, same)
    figure, axis = pyplot.subplots(figsize=(7, 3.2))
    for (name, values), colour in zip(seconds.items(), ("0.6", GREEN), strict=True):
        axis.plot(range(1, count + 1), values, marker="o", color=colour, label=name)
    axis.set_xlabel("turn of a conversation that begins with 2,000 tokens")
    axis.set_ylabel("seconds to the first token")
    axis.set_yscale("log")
    axis.set_xticks(range(1, count + 1))
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def _draw(came: list[list[tuple[float, int]]], picture: str) -> None:
    """A line for each request; a mark for each round, as large as the tokens that it brought."""
    figure, axis = pyplot.subplots(figsize=(9, 3.2))
    for row, times in enumerate(came):
        moments, counts = zip(*times, strict=True)
        axis.plot([0, moments[0]], [row, row], color="0.8", linewidth=1)
        axis.plot([moments[0], moments[-1]], [row, row], color="0.5", linewidth=3)
        axis.scatter(
            moments, [row] * len(moments), s=[8 * count for count in counts], color=GREEN, zorder=3
        )
    axis.invert_yaxis()
    axis.set_yticks(
        range(len(came)), [f"request {row + 1}" for row in range(len(came))], fontsize=8
    )
    axis.set_xlabel(
        "seconds; a mark is a round, as large as the tokens that it brought; thin lines wait for "
        "their prompt"
    )
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    {"clients": clients, "together": together, "turns": turns}[sys.argv[1]](*sys.argv[2:])
