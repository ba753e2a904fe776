"""Run every method on every prompt, in turn, so that a machine whose speed drifts is fair to
all.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import LongTensor, Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..chat import end_tokens, sampling, until_end
from .methods import Method, Replay
from .questions import Prompt

PROCESS = Path("/proc/self")
# of a `Measurement`, where ours are measured
STATISTICS = (
    "draft_seconds",
    "verify_seconds",
    "attempts",
    "successes",
)


@dataclass(frozen=True)
class Settings:
    """The settings of a benchmark: lengths, batches, temperatures, repeats.

    Attributes:
        max_new_tokens: the most new tokens; outputs end at the end-of-text token.
        batch_sizes: prompts answered together; methods that take one prompt at a time are left out
            of larger ones.
        temperatures: 0 is greedy.
        repeats: runs of each call; the median counts.
        seed: the seed that is set before every call.
        warm_up: prompts that every method answers before anything counts; one-time compilation
            and measuring happen there.
    """

    max_new_tokens: int = 128
    batch_sizes: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    repeats: int = 1
    seed: int = 0
    warm_up: int = 2


@dataclass
class Measurement:
    """One method on one prompt, or on one batch of prompts.

    Attributes:
        method: its name.
        category: the prompt's category.
        index: the number of the prompt, or of the batch.
        batch_size: prompts answered together.
        temperature: 0 is greedy.
        tokens: new tokens of all rows.
        forwards: the target's forwards, the prompt's included, counted for each row until it ended.
        seconds: the time of each repeat.
        same: whether the fp32 output is plain `generate`'s; None before that was asked, and for
            sampling.
        same_here: whether the output in the target's own dtype is; None for sampling.
        peak_bytes: the most memory in use (on a CPU the process's), or None where that is not
            known.
        draft_seconds, verify_seconds: the last repeat's time in the drafter and in the target's
            forwards; None for the peers.
        attempts, successes: how often each draft position was judged and accepted; empty for the
            peers.
    """

    method: str
    category: str
    index: int
    batch_size: int
    temperature: float
    tokens: int
    forwards: int
    seconds: list[float]
    same: bool | None = None
    same_here: bool | None = None
    peak_bytes: int | None = None
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    attempts: list[int] = field(default_factory=list)
    successes: list[int] = field(default_factory=list)


def run(
    target: PreTrainedModel,
    settings: Settings,
    pad_token_id: int | None,
    method: Method,
    batch: Sequence[Prompt],
    temperature: float,
    index: int = 0,
) -> tuple[LongTensor, Measurement]:
    """Generate with a method, drawn from the settings' seed, and measure the call.

    Args:
        target, settings, pad_token_id: those of `bench`.
        method, batch, temperature, index: those of this call.

    Returns:
        The new tokens, int64 `(rows, new)`, on the CPU, and the measurement without `same`.
    """
    inputs = _inputs(batch, pad_token_id or 0, target.device)
    arguments = {
        **inputs,
        **sampling(temperature),
        **({} if pad_token_id is None else {"pad_token_id": pad_token_id}),
        "max_new_tokens": settings.max_new_tokens,
        "stop_strings": None,  # they would need the tokenizer
    }
    forwards = 0

    def count(*_) -> None:
        nonlocal forwards
        forwards += 1

    # Hooks are no part of a compiled forward; our own rounds count themselves, and plain ones are
    # the tokens.
    handle = target.register_forward_pre_hook(count) if method.is_peer else None
    torch.manual_seed(settings.seed)
    reset_peak_memory(target.device)
    started = perf_counter()
    try:
        with method.using():
            output = target.generate(**arguments, **method.arguments)
    finally:
        if handle is not None:
            handle.remove()
    output = output[:, inputs["input_ids"].shape[1] :].cpu()
    seconds = perf_counter() - started
    ends = end_tokens(target)
    tokens = sum(len(until_end(row, ends)[0]) for row in output.tolist())
    stats = method.drafter.last_stats if method.drafter is not None else None
    if stats is not None:
        forwards = sum(row.num_rounds for row in stats.by_row or [stats])
    measured = Measurement(
        method=method.name,
        category=batch[0].category if len(batch) == 1 else f"batches of {len(batch)}",
        index=index,
        batch_size=len(batch),
        temperature=temperature,
        tokens=tokens,
        forwards=forwards if method.is_peer or stats else tokens,
        seconds=[seconds],
        peak_bytes=peak_memory(target.device),
        **{name: getattr(stats, name) for name in STATISTICS if stats is not None},
    )
    return output, measured


def _inputs(batch: Sequence[Prompt], padding: int, device: torch.device) -> dict[str, Tensor]:
    """Pad a batch of prompts on the left, and make its attention mask."""
    ids = [prompt.ids[0] for prompt in batch]
    padded = pad_sequence(ids, True, padding, "left")
    mask = pad_sequence([torch.ones_like(row) for row in ids], True, 0, "left")
    return {"input_ids": padded.to(device), "attention_mask": mask.to(device)}


def _batches(prompts: Sequence[Prompt], size: int) -> list[Sequence[Prompt]]:
    """Group prompts into batches of `size`, in order; a last, smaller one is left out."""
    if len(prompts) < size:
        raise ValueError(f"Batches of {size} need as many prompts, but there are {len(prompts)}.")
    return list(zip(*[iter(prompts)] * size, strict=False))


def bench(
    target: PreTrainedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    settings: Settings = Settings(),
    pad_token_id: int | None = None,
    done: Sequence[Measurement] = (),
    save: Callable[[list[Measurement]], None] = lambda _: None,
    progress: bool = True,
    enough: Callable[[], bool] = lambda: False,
) -> list[Measurement]:
    """Measure the time of every method on every prompt; the first method is the reference.

    Args:
        target: the target on its device, in its dtype, in evaluation mode.
        methods: the methods, plain first, with which the others are compared.
        prompts: the prompts; all methods answer one before the next, another one first each time.
        settings: lengths, batches, temperatures, repeats.
        pad_token_id: the padding of prompts of different lengths; needed for batches.
        done: measurements from before a stop, which are not made again.
        save: a function that is told all measurements after each prompt.
        progress: whether a bar is shown.
        enough: a function that is asked before each prompt but the first, whether to leave out the
            rest.

    Returns:
        Measurements in the order of prompts and methods. Where the target is fp32, greedy ones know
        whether they are the same.
    """
    call, made, warm = partial(run, target, settings, pad_token_id), list(done), set()
    finished = {(entry.batch_size, entry.temperature, entry.index) for entry in done}
    work = [
        (size, temperature, index, batch)
        for size in settings.batch_sizes
        for temperature in settings.temperatures
        for index, batch in enumerate(_batches(prompts, size))
        if (size, temperature, index) not in finished
    ]
    for size, temperature, index, batch in tqdm(
        work, f"bench, {target.dtype}", unit="prompt", disable=not progress
    ):
        able = [method for method in methods if size == 1 or not method.is_peer]
        if made and enough():
            break
        if (size, temperature) not in warm:
            warm.add((size, temperature))
            for warm_batch in _batches(prompts, size)[: settings.warm_up]:
                for method in able:
                    call(method, warm_batch, temperature)
        for replay in (method.drafter for method in able if isinstance(method.drafter, Replay)):
            answers, _ = call(able[0], batch, temperature)
            replay.texts = [
                torch.cat([prompt.ids[0].cpu(), answer])
                for prompt, answer in zip(batch, answers, strict=True)
            ]
        calls: dict[str, list[tuple[LongTensor, Measurement]]] = {
            method.name: [] for method in able
        }
        first = index % len(able)
        for _ in range(settings.repeats):
            for method in (*able[first:], *able[:first]):
                calls[method.name].append(call(method, batch, temperature, index))
        reference, _ = calls[able[0].name][-1]
        for repeats in calls.values():
            output, measured = repeats[-1]
            measured.seconds = [seconds for _, repeat in repeats for seconds in repeat.seconds]
            if temperature == 0:
                measured.same_here = torch.equal(output, reference)
                measured.same = measured.same_here if target.dtype == torch.float32 else None
            made.append(measured)
        save(made)
    return made


def check_equality(
    target: PreTrainedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    settings: Settings,
    measurements: list[Measurement],
    pad_token_id: int | None = None,
    save: Callable[[list[Measurement]], None] = lambda _: None,
    progress: bool = True,
) -> None:
    """Compare greedy outputs in fp32, and set `same` of measurements that lack it.

    Every greedy batch with such a measurement is run once more with the target in fp32. In 16-bit
    formats near-ties fall either way with the number of rows, so only fp32 outputs can be compared.
    The target comes back in its dtype.
    """
    greedy = [entry for entry in measurements if entry.temperature == 0]
    unknown = {
        (entry.batch_size, entry.index, entry.method): entry
        for entry in greedy
        if entry.same is None
    }
    known = [entry for entry in greedy if entry.same is not None]
    if not unknown:
        return

    def tell(again: list[Measurement]) -> None:
        """Take over the findings in fp32."""
        for entry in again[len(known) :]:
            unknown[entry.batch_size, entry.index, entry.method].same = entry.same
        save(measurements)

    once = replace(settings, temperatures=(0.0,), repeats=1, warm_up=0)
    with _in_float32(target):
        bench(target, methods, prompts, once, pad_token_id, known, tell, progress)


@contextmanager
def _in_float32(target: PreTrainedModel) -> Iterator[None]:
    """Run a block with the target in float32, then restore its dtypes and buffers.

    Every parameter gets its own dtype back; buffers are put back themselves, since rounding would
    change them.
    """
    dtypes = {name: parameter.dtype for name, parameter in target.named_parameters()}
    buffers = dict(target.named_buffers())
    try:
        target.float()
        yield
    finally:
        for name, parameter in target.named_parameters():
            parameter.data = parameter.data.to(dtypes[name])
        for name, buffer in buffers.items():
            owner, _, leaf = name.rpartition(".")
            setattr(target.get_submodule(owner), leaf, buffer)


def reset_peak_memory(device: torch.device) -> None:
    """Reset the measure of `peak_memory`, if the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # other systems have no such file
            (PROCESS / "clear_refs").write_text("5")  # the high-water mark of resident memory


def peak_memory(device: torch.device) -> int | None:
    """Read the most bytes in use since the reset; None if this is not known.

    A GPU's allocations are read, or the process's resident memory on Linux. Where the system allows
    no reset, the result is the most since the process began.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = (PROCESS / "status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)
