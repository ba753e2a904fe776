# /// script
# requires-python = ">=3.11"
# dependencies = ["hf-paradraft[train,bench]"]
# ///
"""From a model to a published drafter in one job: its own answers, an MTP layer trained on them, a
measurement, a push.

uv run examples/train_job.py                                     # the embedded family, a few steps,
nothing is pushed uv run examples/train_job.py --target org/model --prompts prompts.jsonl --repo
user/drafter --steps 4000 hf jobs uv run --flavor a10g-small --secrets HF_TOKEN
examples/train_job.py --target org/model --prompts org/prompts ...

Run again in the same folder, it goes on where it was stopped.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from transformers import HfArgumentParser

from hf_paradraft.demo import FAMILY

TIMES = (
    "Write 3 euros in cents.|Write 2 hours in minutes.|Write 5 weeks in days.|Write 7 metres in "
    "centimetres."
).split("|")


@dataclass
class Options:
    """Of this job.

    Attributes:
        target: the model to speed up: folder or Hub id.
        prompts: JSON lines with `messages`, or a Hub dataset.
        questions: others, for the measurement; default: the prompts.
        repo: where the drafter is published; nowhere if it is not named.
        folder: for all files.
        steps: of the training.
        tokens: of an answer, at most.
    """

    target: str = str(FAMILY / "target")
    prompts: str | None = None
    questions: str | None = None
    repo: str | None = None
    folder: str | None = None
    steps: int = 3
    tokens: int = 48


def paradraft(*arguments: object) -> None:
    """Run one command of the library."""
    print("paradraft", *arguments, flush=True)
    subprocess.run(
        [sys.executable, "-m", "hf_paradraft.cli", *map(str, arguments)],
        check=True,
        env={**os.environ, "COLUMNS": "120"},
    )


def main(options: Options) -> None:
    """Answer, train, measure, publish."""
    folder = Path(options.folder or mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    answers, drafter, prompts = folder / "answers.jsonl", folder / "drafter", options.prompts
    if prompts is None:
        prompts = folder / "prompts.jsonl"
        prompts.write_text(
            "\n".join(
                json.dumps({"messages": [{"role": "user", "content": text}]}) for text in TIMES
            )
        )
    target, tokens = ("--target", options.target), ("--max-new-tokens", options.tokens)
    again = ["--resume"] if drafter.exists() else []
    training = (
        "--max-steps",
        options.steps,
        "--cache-dir",
        folder / "states",
        "--learning-rate",
        2e-3,
        *again,
    )
    # of a dataset, whose questions are of another split otherwise
    name, config, split = (*str(prompts).split(":"), "", "")[:3]
    asked = prompts if Path(prompts).exists() else f"{name}:{config}:{split or 'train'}"
    others = (
        "--questions",
        options.questions or asked,
        "--per-category",
        4,
        "-k",
        3,
        "-n",
        "auto",
        "--repeats",
        1,
    )
    paradraft("regenerate", *target, "--prompts", prompts, "--output", answers, *tokens)
    paradraft("train", "mtp", *target, "--train-file", answers, "--output-dir", drafter, *training)
    paradraft(
        "bench", *target, "--drafter", drafter, *others, *tokens, "--json", drafter / "bench.json"
    )
    if options.repo is not None:
        paradraft("push", drafter, options.repo)
    print(f"{drafter}: AutoDrafter.from_pretrained(…), or paradraft generate … --drafter {drafter}")


if __name__ == "__main__":
    main(*HfArgumentParser(Options).parse_args_into_dataclasses())
