"""Is the embedded target right, and is its text varied?"""

from dataclasses import dataclass
from itertools import islice

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from examples.family.tasks import CATEGORIES, Task, tasks
from hf_paradraft.chat import encode_question


@dataclass
class Quality:
    """Of one category's held-out tasks.

    Attributes:
        right: share of right answers.
        distinct: share of distinct token 4-grams among all 4-grams of all outputs together.
        finished: share of outputs that ended by themselves.
        tasks: how many.
    """

    right: float
    distinct: float
    finished: float
    tasks: int


@torch.no_grad()
def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    max_new_tokens: int = 128,
    batch_size: int = 64,
) -> list[str]:
    """Greedy answers, batched; prompts of similar length are padded together."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found: dict[int, str] = {}
    for begin in tqdm(range(0, len(order), batch_size), desc="answers", leave=False):
        some = order[begin : begin + batch_size]
        batch = tokenizer.pad(
            {
                "input_ids": [
                    encode_question(tokenizer, prompts[index])[0].tolist() for index in some
                ]
            },
            return_tensors="pt",
        )
        output = model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False)[
            :, batch["input_ids"].shape[1] :
        ]
        found.update(zip(some, tokenizer.batch_decode(output), strict=True))
    return [found[index] for index in range(len(prompts))]


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, per_category: int, seed: int = 0
) -> dict[str, Quality]:
    """Answer `per_category` held-out tasks of every category, greedily."""
    results = {}
    for category in CATEGORIES:
        held_out: list[Task] = list(islice(tasks(category, seed, True), per_category))
        outputs = answers(model, tokenizer, [task.prompt for task in held_out])
        ended = [output.split(tokenizer.eos_token)[0] for output in outputs]
        grams = [
            tuple(ids[i : i + 4])
            for ids in map(tokenizer.encode, ended[:8])
            for i in range(len(ids) - 3)
        ]
        results[category] = Quality(
            right=sum(task.is_right(output) for task, output in zip(held_out, ended, strict=True))
            / per_category,
            distinct=len(set(grams)) / max(1, len(grams)),
            finished=sum(tokenizer.eos_token in output for output in outputs) / per_category,
            tasks=per_category,
        )
    return results
