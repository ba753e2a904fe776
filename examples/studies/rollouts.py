"""Rollouts with a drafter that is set: GRPO step by step without one, with a frozen one, with one that follows; three sizes.

python -m examples.studies.rollouts grpo plain|frozen|follow OUT.json [STEPS]
python -m examples.studies.rollouts sizes OUT.json
python -m examples.studies.rollouts draw PICTURE.png PLAIN.json FROZEN.json FOLLOW.json
"""

import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
from matplotlib import pyplot
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.grpo import Options, problems, run
from hf_paradraft import AutoDrafter, set_drafter
from hf_paradraft.demo import FAMILY


def grpo(drafter: str, output: str, steps: str = "200") -> None:
    """Train, and keep reward, tokens a round, and seconds of each step."""
    trainer, watch, follow = run(Options(steps=int(steps), drafter=drafter, sequences=8, tokens=112))
    log = [line for line in trainer.state.log_history if "reward" in line]
    Path(output).write_text(json.dumps({
        "reward": [line["reward"] for line in log],
        "loss": [line["loss"] for line in log],
        "seconds": [line["step_time"] for line in log],
        "tokens a round": watch.rounds,
        "lessons": [] if follow is None else [vars(lesson) for lesson in follow.lessons],
    }))  # fmt: skip


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
                    texts[name] = target.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=112)
                if repeat:  # the first warms up
                    seconds[name].append(time.perf_counter() - begun)
            assert torch.equal(texts["plain"], texts["drafted"])
        ratios = [plain / drafted for plain, drafted in zip(*seconds.values(), strict=True)]
        rows.append({"sequences": count, "speedup": median(ratios), "spread": [min(ratios), max(ratios)], **seconds})
        print(rows[-1])
    Path(output).write_text(json.dumps(rows))


def draw(picture: str, *files: str) -> None:
    """Draw the runs in one picture."""
    figure, axes = pyplot.subplots(3, 1, sharex=True, figsize=(8, 7))
    for file in files:
        said = json.loads(Path(file).read_text())
        for axis, name in zip(axes, ("reward", "tokens a round", "seconds"), strict=True):
            values = said[name]
            smooth = [sum(values[max(0, i - 9) : i + 1]) / len(values[max(0, i - 9) : i + 1]) for i in range(len(values))]
            axis.plot(smooth, label=Path(file).stem)
            axis.set_ylabel(name)
    axes[0].legend()
    axes[-1].set_xlabel("steps (means of the last ten)")
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    {"grpo": grpo, "sizes": sizes, "draw": draw}[sys.argv[1]](*sys.argv[2:])
