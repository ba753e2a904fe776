"""Thirty-two clients at `paradraft serve`: ragged prompts, cancellations, bad and huge requests; every text is compared.

python -m examples.studies.serving OUT.json [SECONDS]
"""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paradraft.demo import FAMILY, QUESTIONS

CLIENTS, MODEL, NEW = 32, "paradraft-family", 64
BAD: list[dict[str, Any]] = [
    {"n": 2},
    {"model": "another"},
    {"max_tokens": 0},
    {"temperature": -1},
    {"messages": []},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"messages": [{"role": "user", "content": "word " * 5000}]},
    {"extra_body": {"unknown": 1}},
]


def texts_of(questions: list[str]) -> dict[tuple[str, int | None], str]:
    """Write every answer with plain `generate`: greedy (None), and with two seeds."""
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target")
    target = AutoModelForCausalLM.from_pretrained(FAMILY / "target", dtype=torch.float32)
    texts = {}
    for question in questions:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        for seed in (None, 1, 2):
            torch.manual_seed(seed or 0)
            rules = {"do_sample": False} if seed is None else {"do_sample": True, "temperature": 0.8}
            out = target.generate(**ids, **rules, max_new_tokens=NEW)
            texts[question, seed] = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


class Client(Thread):
    """One of them: asks, gives up, and misbehaves until the time is over.

    Args:
        address: of the server.
        texts: that it should get.
        seed: of its choices.
        end: when it stops, by `time.monotonic`.
    """

    def __init__(self, address: str, texts: dict[tuple[str, int | None], str], seed: int, end: float):
        super().__init__()
        self.client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120)
        self.address, self.texts, self.luck, self.end = address, texts, random.Random(seed), end
        self.counts: Counter[str] = Counter()
        self.wrong: list[tuple[str, str]] = []

    def run(self) -> None:
        """Go on until the end."""
        while time.monotonic() < self.end:
            what = self.luck.choice(("whole", "stream", "stream", "cancelled", "abandoned", "bad", "huge"))
            try:
                self.counts[getattr(self, what)()] += 1
            except openai.RateLimitError:
                self.counts["queue full"] += 1
                time.sleep(0.5)

    def asked(self, **more: Any) -> tuple[Any, str]:
        """Ask something; gives the answer and the text that it should be."""
        question, seed = self.luck.choice(list(self.texts))
        body: dict[str, Any] = {"temperature": 0} if seed is None else {"temperature": 0.8, "seed": seed}
        if self.luck.random() < 0.2:
            body["extra_body"] = {"speculation": {"enabled": False}}
        elif self.luck.random() < 0.2:
            body["prediction"] = {"type": "content", "content": self.texts[question, None]}
        messages = [{"role": "user", "content": question}]
        made = self.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=NEW, **body, **more)
        return made, self.texts[question, seed]

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
        return self.judged("stream", "".join(chunk.choices[0].delta.content or "" for chunk in chunks), true)

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
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **self.luck.choice(BAD)}
        with suppress(openai.BadRequestError, openai.NotFoundError):
            self.client.chat.completions.create(**body)
            self.wrong.append((str(body)[:200], "refused"))
        return "refused"

    def huge(self) -> str:
        """Send ten megabytes."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 10_000_000}]}
        with suppress(httpx.TransportError):  # it may hang up before it has read all
            assert httpx.post(f"{self.address}/chat/completions", json=body, timeout=120).status_code == 413
        return "huge"


def resident(pid: int) -> float:
    """How many MiB of memory a process has."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def main(output: str, seconds: str = "300") -> None:
    """Run it, and write what happened."""
    questions = [json.loads(line)["turns"][0] for line in QUESTIONS.read_text().splitlines()][:24]
    texts = texts_of(questions)
    command = [sys.executable, "-m", "hf_paradraft.cli", "serve", "--port", "0", "--dtype", "float32", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        end, memory = time.monotonic() + float(seconds), []
        clients = [Client(address, texts, seed, end) for seed in range(CLIENTS)]
        for client in clients:
            client.start()
        while any(client.is_alive() for client in clients):
            time.sleep(5)
            memory.append(resident(server.pid))
        time.sleep(1)
        metrics = httpx.get(address.replace("/v1", "/metrics")).text
        left = {line.split()[0]: float(line.split()[1]) for line in metrics.splitlines() if line.startswith("num_requests")}
        server.terminate()
    counts = sum((client.counts for client in clients), Counter())
    said = {
        "counts": dict(counts),
        "wrong": [wrong for client in clients for wrong in client.wrong],
        "MiB": memory,
        "left": left,
        "exit": server.returncode,
    }
    Path(output).write_text(json.dumps(said))
    print({**said, "MiB": [round(size) for size in memory], "wrong": len(said["wrong"])})


if __name__ == "__main__":
    main(*sys.argv[1:])
