"""Run every method on every prompt, in turn, so that a machine whose speed drifts is fair to all."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
import transformers
from torch import LongTensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..hardware import device_name
from .methods import Method


@dataclass
class Measurement:
    """One method on one prompt.

    Attributes:
        method: its name.
        category: of the prompt.
        tokens: new ones.
        seconds: median over the repeats.
        forwards: of the target, the prompt's included.
        same: whether the output is plain `generate`'s; None where sampling makes that no question.
    """

    method: str
    category: str
    tokens: int
    seconds: float
    forwards: int
    same: bool | None


def environment(model: PreTrainedModel) -> str:
    """What the figures were measured with: dtype, versions, device and threads."""
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{dtype}, transformers {transformers.__version__}, torch {torch.__version__}, {device_name(model.device)}"


@dataclass
class Prompt:
    """`ids` int64 `(1, n)`."""

    category: str
    ids: LongTensor


def encode_prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[tuple[str, str]]) -> list[Prompt]:
    """(category, user's text) pairs through the chat template, where there is one."""
    prompts = []
    for category, text in texts:
        if tokenizer.chat_template is not None:
            text = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        else:
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
        prompts.append(Prompt(category, ids))
    return prompts


def bench(
    target: PreTrainedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    repeats: int = 1,
    seed: int = 0,
    progress: bool = True,
) -> list[Measurement]:
    """Time every method on every prompt; the first method is the reference.

    Args:
        target: on its device, in its dtype, in evaluation mode.
        methods: the first one, plain, is what others are compared with.
        prompts: each run by all methods before the next.
        max_new_tokens: at most; outputs end at the end-of-text token.
        temperature: 0 is greedy.
        repeats: of each call; the median counts.
        seed: set before every call.
        progress: show a bar.
    """
    forwards = 0

    def count(*_) -> None:
        nonlocal forwards
        forwards += 1

    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    handle = target.register_forward_pre_hook(count)

    def run(method: Method, ids: LongTensor) -> tuple[LongTensor, float]:
        method.prepare()
        torch.manual_seed(seed)
        started = perf_counter()
        output = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **sampling, **method.arguments
        )[0, ids.shape[1] :].cpu()
        return output, perf_counter() - started

    results = []
    try:
        for method in methods:  # warm up
            run(method, prompts[0].ids.to(target.device))
        for prompt in tqdm(prompts, desc="bench", unit="prompt", disable=not progress):
            ids = prompt.ids.to(target.device)
            seconds: dict[str, list[float]] = {method.name: [] for method in methods}
            outputs, counts = {}, {}
            for _ in range(repeats):
                for method in methods:
                    forwards = 0
                    outputs[method.name], taken = run(method, ids)
                    seconds[method.name].append(taken)
                    counts[method.name] = forwards
            reference = outputs[methods[0].name]
            for method in methods:
                output = outputs[method.name]
                same = torch.equal(output, reference) if temperature == 0 else None
                results.append(
                    Measurement(
                        method.name,
                        prompt.category,
                        len(output),
                        median(seconds[method.name]),
                        counts[method.name],
                        same,
                    )
                )
    finally:
        handle.remove()
    return results
