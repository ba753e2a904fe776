"""Run every method on every prompt, in turn, so that a machine whose speed drifts is fair to all."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
import transformers
from torch import LongTensor, Tensor
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
        rows: prompts answered together.
    """

    method: str
    category: str
    tokens: int
    seconds: float
    forwards: int
    same: bool | None
    rows: int = 1


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
    batch_size: int = 1,
    pad_token_id: int | None = None,
) -> list[Measurement]:
    """Time every method on every prompt; the first method is the reference.

    Args:
        target: on its device, in its dtype, in evaluation mode.
        methods: the first one, plain, is what others are compared with; all must take batches if `batch_size` is above 1.
        prompts: each run by all methods before the next.
        max_new_tokens: at most; outputs end at the end-of-text token.
        temperature: 0 is greedy.
        repeats: of each call; the median counts.
        seed: set before every call.
        progress: show a bar.
        batch_size: prompts answered together; a last, smaller batch is left out.
        pad_token_id: for prompts of different lengths; needed for batches.
    """
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    ends = target.generation_config.eos_token_id
    ends = torch.tensor([] if ends is None else ends)
    batches = [prompts] if len(prompts) < batch_size else list(zip(*[iter(prompts)] * batch_size, strict=False))

    def run(method: Method, inputs: dict[str, Tensor]) -> tuple[LongTensor, float, int]:
        forwards = 0

        def count(*_) -> None:
            nonlocal forwards
            forwards += 1

        # Hooks are no part of a compiled forward; our own rounds and plain ones count themselves.
        counted = method.drafter is None and not method.name.startswith("plain")
        handle = target.register_forward_pre_hook(count) if counted else None
        method.prepare()
        torch.manual_seed(seed)
        started = perf_counter()
        output = target.generate(**inputs, max_new_tokens=max_new_tokens, **sampling, **method.arguments, **padding)
        output = output[:, inputs["input_ids"].shape[1] :].cpu()
        taken = perf_counter() - started
        if handle is not None:
            handle.remove()
        elif method.drafter is not None:
            forwards = method.drafter.last_stats.num_rounds
        else:
            forwards = output.shape[1]
        return output, taken, forwards

    padding = {} if pad_token_id is None else {"pad_token_id": pad_token_id}
    results = []
    for method in methods:  # warm up; what is compiled or measured once happens here
        for batch in batches[:2] if len(batches) > 1 else batches:
            run(method, _inputs(batch, pad_token_id, target.device))
    for batch in tqdm(batches, desc="bench", unit="prompt" if batch_size == 1 else "batch", disable=not progress):
        inputs = _inputs(batch, pad_token_id, target.device)
        seconds: dict[str, list[float]] = {method.name: [] for method in methods}
        outputs, counts = {}, {}
        for _ in range(repeats):
            for method in methods:
                outputs[method.name], taken, counts[method.name] = run(method, inputs)
                seconds[method.name].append(taken)
        reference = outputs[methods[0].name]
        category = batch[0].category if batch_size == 1 else f"batches of {batch_size}"
        for method in methods:
            output = outputs[method.name]
            same = torch.equal(output, reference) if temperature == 0 else None
            tokens = sum(_length(row, ends) for row in output)
            results.append(
                Measurement(method.name, category, tokens, median(seconds[method.name]), counts[method.name], same, len(batch))
            )
    return results


def _inputs(batch: Sequence[Prompt], pad_token_id: int | None, device: torch.device) -> dict[str, Tensor]:
    """Prompts padded on the left, with their mask."""
    longest = max(prompt.ids.shape[1] for prompt in batch)
    ids = [torch.nn.functional.pad(prompt.ids, (longest - prompt.ids.shape[1], 0), value=pad_token_id or 0) for prompt in batch]
    mask = [torch.nn.functional.pad(torch.ones_like(prompt.ids), (longest - prompt.ids.shape[1], 0)) for prompt in batch]
    return {"input_ids": torch.cat(ids).to(device), "attention_mask": torch.cat(mask).to(device)}


def _length(row: LongTensor, ends: LongTensor) -> int:
    """New tokens of one row, up to and with the one that ends it."""
    ended = torch.isin(row, ends).nonzero()
    return int(ended[0]) + 1 if len(ended) else len(row)
