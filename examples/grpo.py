"""GRPO whose rollouts draft, with TRL: the same completions, rewards and losses as without, sooner.

pip install 'hf-paradraft[rl]' python examples/grpo.py                                  # the
embedded family learns longer word problems, two steps python examples/grpo.py --steps 200 --drafter
follow     # plain, frozen or follow python examples/grpo.py --steps 200 --full               # all
weights instead of LoRA
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Literal

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from hf_paradraft import AutoDrafter, FollowTarget, set_drafter
from hf_paradraft.demo import FAMILY

NAMES = "Mia Tom Ana Ben Eva Leo Zoe Max".split()
GOODS = "apples books coins pens stamps shells".split()


@dataclass
class Options:
    """Of this run.

    Attributes:
        steps: of the trainer.
        drafter: none, one that stays as it is, or one that follows the target.
        full: train all weights instead of LoRA.
        sequences: completions of a step.
        every: steps from one lesson of a drafter that follows to the next.
        learning_rate: of the target.
        tokens: of a completion, at most.
        seed: of everything.
    """

    steps: int = 2
    drafter: Literal["plain", "frozen", "follow"] = "follow"
    full: bool = False
    sequences: int = 16
    every: int = 1
    learning_rate: float = 3e-4
    tokens: int = 128
    seed: int = 0


def problems(count: int, seed: int) -> Dataset:
    """Word problems with four or five events."""
    luck, rows = Random(seed), []
    for _ in range(count):
        name, goods, total = luck.choice(NAMES), luck.choice(GOODS), luck.randint(20, 60)
        story = [f"{name} has {total} {goods} in a box."]
        for _ in range(luck.randint(4, 5)):
            change = luck.randint(1, 9) * luck.choice((1, -1))
            story.append(
                f"Then {name} {'buys' if change > 0 else 'loses'} "
                f"{abs(change)}{' more' * (change > 0)} {goods}."
            )
            total += change
        prompt = " ".join([*story, f"How many {goods} are left?"])
        rows.append(
            {"prompt": [{"role": "user", "content": prompt}], "answer": f"Answer: {total} {goods}"}
        )
    return Dataset.from_list(rows)


def reward(completions: list, answer: list[str], **_: object) -> list[float]:
    """1 for the right last line; a little for every line that adds up."""
    rewards = []
    for completion, wanted in zip(completions, answer, strict=True):
        lines = completion[0]["content"].strip().splitlines() or [""]
        sums = [line.rpartition(": ")[2].rstrip(".").split() for line in lines]
        sums = [
            words
            for words in sums
            if len(words) == 5 and words[3] == "=" and all(words[i].isdigit() for i in (0, 2, 4))
        ]
        right = [int(w[4]) == int(w[0]) + int(w[2]) * (1 if w[1] == "+" else -1) for w in sums]
        rewards.append(
            float(lines[-1].strip() == wanted) + 0.2 * (sum(right) / len(right) if right else 0)
        )
    return rewards


def brevity(completions: list, **_: object) -> list[float]:
    """Up to 0.5 for few letters: the target moves away from the texts that its drafter knows."""
    return [0.5 * max(0.0, 1 - len(completion[0]["content"]) / 400) for completion in completions]


class Watch(TrainerCallback):
    """Notes tokens a round of every step's rollouts."""

    def __init__(self, drafter):
        self.drafter, self.rounds = drafter, []

    def on_step_end(self, args, state, control, **kwargs):
        """Note what the last call's statistics say."""
        self.rounds.append(
            self.drafter.last_stats.mean_emitted if self.drafter is not None else 1.0
        )


def run(options: Options, *more: TrainerCallback) -> tuple[GRPOTrainer, Watch, FollowTarget | None]:
    """Train; the trainer's log has reward, loss and seconds of every step."""
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target")
    # where texts are equal, token for token
    target = AutoModelForCausalLM.from_pretrained(FAMILY / "target", dtype=torch.float32)
    drafter = (
        None
        if options.drafter == "plain"
        else AutoDrafter.from_pretrained(FAMILY / "pard", dtype=torch.float32)
    )
    watch, follow = Watch(drafter), None
    callbacks: list[TrainerCallback] = [watch]
    if options.drafter == "follow":
        follow = FollowTarget(drafter, every=options.every)
        callbacks.append(follow)
    torch.manual_seed(options.seed)  # of LoRA's first weights
    arguments = GRPOConfig(
        output_dir=str(Path(mkdtemp())),
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        per_device_train_batch_size=options.sequences,
        num_generations=min(8, options.sequences),
        max_completion_length=options.tokens,
        temperature=1.5,  # the family is sure of itself, and GRPO learns from differences
        gradient_checkpointing=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=options.steps < 5,
        seed=options.seed,
    )
    lora = (
        None
        if options.full
        else LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    trainer = GRPOTrainer(
        model=target,
        reward_funcs=[reward, brevity],
        args=arguments,
        train_dataset=problems(512, options.seed),
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[*callbacks, *more],
    )
    with set_drafter(trainer.model, drafter):
        trainer.train()
    return trainer, watch, follow


if __name__ == "__main__":
    logging.getLogger("transformers").setLevel(logging.ERROR)
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses()
    trainer, watch, follow = run(options)
    for line, rounds in zip(trainer.state.log_history, watch.rounds, strict=False):
        print(
            f"reward {line['reward']:.3f}   loss {line['loss']:+.4f}   {line['step_time']:.1f} s   "
            f"{rounds:.2f} tokens a round"
        )
    if follow is not None:
        print(
            f"{sum(lesson.kept for lesson in follow.lessons)} of {len(follow.lessons)} lessons "
            "taught the drafter something."
        )
