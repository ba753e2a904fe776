"""Rollouts with a drafter that is set, at three sizes; and drafters beside a target that learns
another way to answer.

python -m examples.studies.rollouts sizes OUT.json
python -m examples.studies.rollouts moving OUT.json [STEPS]
python -m examples.studies.rollouts draw OUT.json PICTURE.png
python -m examples.studies.rollouts grpo OUT.json [STEPS]
python -m examples.studies.rollouts draw_grpo OUT.json PICTURE.png
"""

import json
import multiprocessing
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any, Literal

import torch
from datasets import Dataset
from matplotlib import pyplot
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from examples.grpo import Options, problems, run
from hf_paradraft import AutoDrafter, FollowTarget, set_drafter
from hf_paradraft.demo import FAMILY
from hf_paradraft.training.data import encode_rows


def terse(story: str, answer: str) -> str:
    """Answer as the family never does: running counts alone."""
    total, *changes = [
        (word, int(word)) for word in story.replace(".", " ").split() if word.isdigit()
    ]
    signs = [1 if "buys" in sentence else -1 for sentence in story.split(". ")[1:-1]]
    lines, count = [f"have {total[0]}"], total[1]
    for sign, (_, change) in zip(signs, changes, strict=True):
        count += sign * change
        lines.append(f"{'up' if sign > 0 else 'down'} {change} to {count}")
    return "\n".join([*lines, answer.lower()])


class Rollouts(TrainerCallback):
    """Lets the target answer every few steps, with each drafter in turn, and notes tokens a round.

    Args:
        drafters: by name.
        inputs: of the calls, one after the other.
    """

    def __init__(self, drafters: dict[str, Any], inputs: list[Any]):
        self.drafters, self.inputs, self.rounds = drafters, inputs, {name: [] for name in drafters}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Answer in every second step."""
        if state.global_step % 2:
            return
        model.eval()
        for name, drafter in self.drafters.items():
            inputs = self.inputs[state.global_step // 2 % len(self.inputs)]
            with torch.random.fork_rng():
                model.generate(
                    **inputs, do_sample=True, top_k=0, max_new_tokens=112, assistant_model=drafter
                )
            self.rounds[name].append(drafter.last_stats.mean_emitted)
        model.train()


def moving(output: str, steps: str = "60") -> None:
    """Teach the target to answer tersely, with two drafters beside it: one frozen, one that
    follows.
    """
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target", padding_side="left")
    target = AutoModelForCausalLM.from_pretrained(FAMILY / "target", dtype=torch.float32)
    drafters = {
        name: AutoDrafter.from_pretrained(FAMILY / "pard", dtype=torch.float32)
        for name in ("frozen", "following")
    }
    rows = [
        {
            "messages": [
                *row["prompt"],
                {"role": "assistant", "content": terse(row["prompt"][0]["content"], row["answer"])},
            ]
        }
        for row in problems(512, 2)
    ]
    asked = [problems(8, 3)[start : start + 4]["prompt"] for start in (0, 4)]
    inputs = [
        tokenizer.apply_chat_template(
            [prompt for prompt in prompts for _ in range(2)], add_generation_prompt=True,
            padding=True, return_tensors="pt",
            return_dict=True,
        )
        for prompts in asked
    ]  # fmt: skip
    rollouts, follow = (
        Rollouts(drafters, inputs),
        FollowTarget(drafters["following"], every=4, max_tokens=4096, learning_rate=1e-3),
    )
    encoded = encode_rows(Dataset.from_list(rows), tokenizer, 320).remove_columns("length")
    arguments = TrainingArguments(
        output_dir=mkdtemp(), max_steps=int(steps), per_device_train_batch_size=8,
        learning_rate=2e-4, report_to="none",
        save_strategy="no", logging_steps=2, use_cpu=True,
    )  # fmt: skip
    collator = DataCollatorForSeq2Seq(tokenizer)
    Trainer(
        target,
        arguments,
        train_dataset=encoded,
        data_collator=collator,
        callbacks=[rollouts, follow],
    ).train()
    lessons = [vars(lesson) for lesson in follow.lessons]
    Path(output).write_text(json.dumps({"tokens a round": rollouts.rounds, "lessons": lessons}))
    print(rollouts.rounds, lessons)


class Turn(TrainerCallback):
    """Lets three trainers in three processes take their steps in turn, and notes the seconds of
    each step, lessons included.

    Args:
        mine: is free when it is this one's turn.
        next_one: is to be freed behind a step.
    """

    def __init__(self, mine: Any, next_one: Any):
        self.mine, self.next_one, self.seconds = mine, next_one, list[float]()

    def on_step_begin(self, args, state, control, **kwargs):
        """Wait for the turn."""
        self.mine.acquire()
        self.begun = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        """Hand it on."""
        self.seconds.append(time.perf_counter() - self.begun)
        self.next_one.release()


def one_way(options: Options, mine: Any, next_one: Any, output: str) -> None:
    """Train in one way, and write what happened in every step."""
    torch.set_num_threads(1)
    turn = Turn(mine, next_one)
    trainer, watch, follow = run(options, turn)
    lines = [line for line in trainer.state.log_history if "reward" in line]
    said = {
        "reward": [line["reward"] for line in lines],
        "loss": [line["loss"] for line in lines],
        "letters": [line["rewards/brevity/mean"] for line in lines],
        "tokens a round": watch.rounds,
        "seconds": turn.seconds,
        "lessons": [vars(lesson) for lesson in follow.lessons] if follow is not None else [],
    }
    Path(output).write_text(json.dumps(said))


def grpo(output: str, steps: str = "200") -> None:
    """GRPO without a drafter, with a frozen one, and with one that follows, a step of each in
    turn.
    """
    context = multiprocessing.get_context("spawn")
    ways: tuple[Literal["plain", "frozen", "follow"], ...] = ("plain", "frozen", "follow")
    turns = [context.Semaphore(index == 0) for index in range(len(ways))]
    files = [f"{output}.{way}" for way in ways]
    runs = [
        context.Process(
            target=one_way,
            args=(
                Options(
                    steps=int(steps),
                    drafter=way,
                    full=True,
                    sequences=8,
                    every=8,
                    learning_rate=2e-4,
                    tokens=112,
                ),
                turns[index],
                turns[(index + 1) % len(ways)],
                files[index],
            ),
        )
        for index, way in enumerate(ways)
    ]
    for process in runs:
        process.start()
    for process in runs:
        process.join()
    Path(output).write_text(
        json.dumps(
            {way: json.loads(Path(file).read_text()) for way, file in zip(ways, files, strict=True)}
        )
    )


def draw_grpo(output: str, picture: str) -> None:
    """Draw reward, tokens a round and seconds of every step, means of ten."""
    said = json.loads(Path(output).read_text())
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.5))
    # The rewards are the same to the last digit: lines that leave room for each other, so that all
    # are seen.
    drawn = {
        "follow": ("following drafter", "-"),
        "frozen": ("frozen drafter", "--"),
        "plain": ("no drafter", "k:"),
    }
    for axis, key in zip(axes, ("reward", "tokens a round", "seconds"), strict=True):
        for way, (name, style) in drawn.items():
            values = said[way][key]
            means = [sum(values[end - 10 : end]) / 10 for end in range(10, len(values) + 1)]
            axis.plot(range(10, len(values) + 1), means, style, label=name)
        axis.set_xlabel("step")
        axis.set_title(key)
        axis.set_ylim(bottom=0)
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def sizes(output: str, repeats: int = 3) -> None:
    """Rollout seconds with and without a drafter, at temperature 1, in turn."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target", padding_side="left")
    target = AutoModelForCausalLM.from_pretrained(FAMILY / "target", dtype=torch.float32)
    drafter = AutoDrafter.from_pretrained(FAMILY / "pard", dtype=torch.float32)
    rows = []
    for count in (8, 16, 32):
        prompts = [row["prompt"] for row in problems(count // 8, 1) for _ in range(8)]
        inputs = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        seconds, texts = {"plain": [], "drafted": []}, {}
        for repeat in range(repeats + 1):
            for name, used in (("plain", None), ("drafted", drafter)):
                torch.manual_seed(repeat)
                begun = time.perf_counter()
                with set_drafter(target, used):
                    texts[name] = target.generate(
                        **inputs, do_sample=True, top_k=0, max_new_tokens=112
                    )
                if repeat:  # the first warms up
                    seconds[name].append(time.perf_counter() - begun)
            assert torch.equal(texts["plain"], texts["drafted"])
        ratios = [plain / drafted for plain, drafted in zip(*seconds.values(), strict=True)]
        rows.append(
            {
                "sequences": count,
                "speedup": median(ratios),
                "spread": [min(ratios), max(ratios)],
                **seconds,
            }
        )
        print(rows[-1])
    Path(output).write_text(json.dumps(rows))


def draw(output: str, picture: str) -> None:
    """Draw tokens a round of both drafters while the target moves."""
    said = json.loads(Path(output).read_text())
    figure, axis = pyplot.subplots(figsize=(8, 3.5))
    for name, values in said["tokens a round"].items():
        axis.plot(range(2, 2 * len(values) + 1, 2), values, marker=".", label=name)
    for lesson in said["lessons"]:
        axis.axvline(lesson["step"], color="0.85" if lesson["kept"] else "1.0", zorder=0)
    axis.set_xlabel("steps of the target's training; grey lines: lessons that were kept")
    axis.set_ylabel("tokens a round")
    axis.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    {"moving": moving, "sizes": sizes, "draw": draw, "grpo": grpo, "draw_grpo": draw_grpo}[
        sys.argv[1]
    ](*sys.argv[2:])
