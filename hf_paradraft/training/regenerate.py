"""Self-distillation: answers rewritten by the target, so that the drafter learns what it will be judged by."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..chat import learned_context, render_chat
from ..files import read_json, rows_of
from ..protocol import Drafter
from ..whole_files import write_json
from .data import load_rows, text_of, tokenizer_hash, turns_of
from .disjoint import WORDS, disjoint

logger = logging.get_logger(__name__)
WINDOW = 8  # batches within which prompts are put together by their lengths
USUAL = 256  # tokens of a prompt; a batch of longer ones has fewer rows


def prompts_of(source: str | Path, prompt_tokens: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict]:
    """`{"messages": turns before the last answer}` or `{"text": its first prompt_tokens tokens}` for every row."""
    for count, row in enumerate(load_rows(source), 1):
        try:
            turns, text = turns_of(row["messages"]) if row.get("messages") else [], text_of(row)
        except ValueError as error:
            raise ValueError(f"{source}, row {count}: {error}") from None
        while turns and turns[-1]["role"] == "assistant":
            turns.pop()
        if turns:
            yield {"messages": [{k: v for k, v in turn.items() if v is not None or k == "content"} for turn in turns]}
        elif text and not row.get("messages"):
            yield {"text": tokenizer.decode(tokenizer(text)["input_ids"][:prompt_tokens], skip_special_tokens=True)}


def _prompt_ids(row: dict, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if "text" in row:
        return tokenizer(row["text"])["input_ids"]
    return tokenizer(render_chat(tokenizer, row["messages"], True), add_special_tokens=False)["input_ids"]


def fingerprint(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> str:
    """A few numbers of every weight, hashed: another model of the same shape has another.

    Args:
        model: some of its weights may be offloaded.
        dtype: that they are rounded to first.
    """
    digest = hashlib.sha256()
    for name, tensor in model.named_parameters():
        digest.update(name.encode())
        if tensor.device.type != "meta":
            some = tensor.detach().flatten()[:: max(1, tensor.numel() // 8)][:8]
            digest.update(some.to(dtype).float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def check_same_run(output: Path, run: Path, settings: dict[str, Any]) -> None:
    """Refuse to go on with answers of another run.

    Args:
        output: the answers so far.
        run: beside them, how they were made.
        settings: of this run.

    Raises:
        ValueError: they were made otherwise, or nobody knows how.
    """
    if not run.exists():
        raise ValueError(f"{output} exists, and no {run.name} says how it was made: pass --overwrite, or name another output.")
    made: dict[str, Any] = read_json(run)
    if other := [f"{name}: {made.get(name)} there, {value} now" for name, value in settings.items() if made.get(name) != value]:
        raise ValueError(
            f"{output} was made with other settings ({'; '.join(other)}): use those again to go on, pass --overwrite to begin "
            "anew, or name another output."
        )


def cut_half_line(file: Path) -> int:
    """Cut off the half line that a killed run may leave; the number of whole ones."""
    *whole, _ = file.read_bytes().split(b"\n")
    with file.open("r+b") as opened:
        opened.truncate(sum(len(line) + 1 for line in whole))
    return len(whole)


def waiting_in(part: Path, done: int) -> dict[int, dict[str, Any]]:
    """Finished answers that are not in the output yet, for others stand before them: by their numbers.

    Args:
        part: beside the output; there may be none.
        done: rows of the output.
    """
    if not part.exists():
        return {}
    cut_half_line(part)
    return {row["index"]: row["row"] for row in rows_of(part, "train") if row["index"] >= done}


def batches(lengths: dict[int, int], batch_size: int, max_new_tokens: int) -> Iterator[list[int]]:
    """Prompts of similar length together: one long prompt would make a whole batch of short ones wait.

    Args:
        lengths: of the prompts, by their numbers.
        batch_size: prompts of a batch at most; long ones are fewer, so that a batch has no more tokens than a usual one has.
        max_new_tokens: of an answer.
    """
    most = batch_size * (USUAL + max_new_tokens)
    waiting: list[int] = []
    for index in sorted(lengths, key=lambda one: (lengths[one], one)):
        if waiting and (len(waiting) == batch_size or (len(waiting) + 1) * (lengths[index] + max_new_tokens) > most):
            yield waiting
            waiting = []
        waiting.append(index)
    if waiting:
        yield waiting


@dataclass
class Answer:
    """What the target wrote to a prompt.

    Attributes:
        ids: its tokens, the one that ended it last.
        text: without special tokens.
        ended: whether it came to an end.
    """

    ids: list[int]
    text: str
    ended: bool


def _answers(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], max_new_tokens: int, **arguments: Any
) -> list[Answer]:
    """The target's answer to each prompt."""
    batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    written = target.generate(**batch.to(target.device), max_new_tokens=max_new_tokens, **arguments)
    ends = target.generation_config.eos_token_id
    ends = {*ends} if isinstance(ends, list) else {ends}
    answers = []
    for ids in written[:, batch["input_ids"].shape[1] :].tolist():
        last = next((place for place, token in enumerate(ids) if token in ends), None)
        ids = ids if last is None else ids[: last + 1]
        answers.append(Answer(ids, tokenizer.decode(ids, skip_special_tokens=True), last is not None))
    return answers


def _with_answer(row: dict, prompt: list[int], answer: Answer, tokenizer: str) -> dict[str, Any]:
    """The row, answered: as text for people and other tokenizers, and as the tokens that were written."""
    written = {"finished": answer.ended, "ids": [*prompt, *answer.ids], "tokenizer": tokenizer}
    if "text" in row:
        return {"text": row["text"] + answer.text, **written}
    messages = [*row["messages"], {"role": "assistant", "content": answer.text}]
    return {"messages": messages, **written, "prompt_tokens": len(prompt)}


def _decided_by(target: PreTrainedModel) -> dict[str, Any]:
    """What of a target's own generation config decides its answers, as JSON has it."""
    config = target.generation_config.to_diff_dict()
    config.pop("transformers_version", None)
    return json.loads(json.dumps(config, default=str, sort_keys=True))


@contextmanager
def only_writer(file: Path) -> Iterator[None]:
    """Keep other processes from writing the same file, for the time of the block.

    Raises:
        OSError: one is writing it.
    """
    try:
        with FileLock(file.with_name(f".{file.name}.lock"), timeout=0):
            yield
    except Timeout:
        raise OSError(f"Another process is writing {file}: wait for it, or name another output.") from None


@torch.no_grad()
def regenerate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str | Path,
    output: Path,
    max_new_tokens: int = 256,
    batch_size: int = 16,
    prompt_tokens: int = 32,
    temperature: float = 0.0,
    seed: int = 0,
    overwrite: bool = False,
    drafter: Drafter | None = None,
    avoid: str | Path | None = None,
    count: int | None = None,
) -> int:
    """Write `source` again with the target's own answers, as JSON lines; an unfinished file is continued.

    Args:
        target: answers.
        tokenizer: the target's; padded on the left here.
        source: a JSON-lines file or a Hub dataset, as for training.
        output: grows in the order of the source; what is finished before its turn waits in `OUTPUT.part`. Rows that are there
            are not made again. Answers that were cut off at `max_new_tokens` are marked `"finished": false`. Each row has the
            tokens too, for templates do not give back what was written.
        max_new_tokens: of an answer.
        batch_size: prompts answered together.
        prompt_tokens: for `text` rows, how much of the text is the prompt.
        temperature: 0 is greedy.
        seed: of sampling.
        overwrite: begin anew, where the file has answers of another run.
        drafter: makes it faster; the answers stay the target's.
        avoid: rows that drafters are measured on; prompts that share 13 words in a row with one of them are left out.
        count: prompts that are taken, the first ones; default: all.

    Returns:
        Rows written by this call.

    Raises:
        ValueError, OSError: something about the files is wrong; nothing has been written then.
    """
    if output.exists() and Path(source).exists() and output.samefile(source):
        raise ValueError(f"{output} is the file with the prompts: name another one for the answers.")
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    prompts = list(islice(prompts_of(source, prompt_tokens, tokenizer), count))
    if avoid is not None and prompts:
        found, prompts = len(prompts), disjoint(prompts, rows_of(avoid, "train"))
        if len(prompts) < found:
            logger.warning("%d of %d prompts share %d words with %s: left out.", found - len(prompts), found, WORDS, avoid)
        if not prompts:
            raise ValueError(f"Every prompt of {source} shares {WORDS} words in a row with {avoid}: nothing is left to answer.")
    if not prompts:
        raise ValueError(f"{source} has no prompts: chats need a turn before the assistant's, and texts some tokens.")
    encoded = [_prompt_ids(row, tokenizer) for row in prompts]
    if (context := learned_context(target)) is not None:
        fits = [place for place, ids in enumerate(encoded) if len(ids) + max_new_tokens <= context]
        if not fits:
            raise ValueError(
                f"No prompt of {source} leaves room for {max_new_tokens} tokens in the target's context of {context}."
            )
        if len(fits) < len(encoded):
            logger.warning("%d of %d prompts leave no room in the context: left out.", len(encoded) - len(fits), len(encoded))
        prompts, encoded = [prompts[place] for place in fits], [encoded[place] for place in fits]
    run, part = (output.with_name(f"{output.name}.{name}") for name in ("run", "part"))
    done = 0
    written: dict[int, dict[str, Any]] = {}
    settings = {
        "target": target.name_or_path,
        "weights": fingerprint(target),
        "dtype": str(target.dtype),
        "prompts": hashlib.sha256(json.dumps(encoded).encode()).hexdigest()[:16],
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "generation_config": _decided_by(target),
        "drawn": [batch_size, seed] if temperature > 0 else None,  # what decides the draws
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    with only_writer(output):
        if output.exists() and not overwrite:
            check_same_run(output, run, settings)
            done = cut_half_line(output)
            if done > len(prompts):
                raise ValueError(f"{output} has {done} rows, and {source} only {len(prompts)} prompts: name another output.")
            written = waiting_in(part, done)
        else:
            for old in (output, part):  # first: old answers must not be found beside new settings
                if old.exists():
                    old.replace(old.with_name(f"{old.name}.former"))
            write_json(run, settings)
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        before, ours = done, tokenizer_hash(tokenizer)
        bar = tqdm(total=len(prompts), initial=done + len(written), desc="regenerate", unit="rows")
        arguments: dict[str, Any] = sampling if drafter is None else {**sampling, "assistant_model": drafter}
        window = WINDOW * batch_size
        with output.open("a", encoding="utf-8") as file, part.open("a", encoding="utf-8") as ahead:
            for begin in range(done - done % window, len(prompts), window):  # what was drawn before is drawn alike
                lengths = {index: len(encoded[index]) for index in range(begin, min(begin + window, len(prompts)))}
                for some in batches(lengths, batch_size, max_new_tokens):
                    if missing := [index for index in some if index >= done and index not in written]:
                        torch.manual_seed(seed + some[0])
                        made = _answers(target, tokenizer, [encoded[index] for index in some], max_new_tokens, **arguments)
                        new = dict(zip(some, made, strict=True))
                        for index in missing:
                            written[index] = _with_answer(prompts[index], encoded[index], new[index], ours)
                            ahead.write(json.dumps({"index": index, "row": written[index]}, ensure_ascii=False) + "\n")
                        ahead.flush()
                        bar.update(len(missing))
                    while done in written:  # the file's order stays
                        file.write(json.dumps(written.pop(done), ensure_ascii=False) + "\n")
                        done += 1
                    file.flush()
                if not written:
                    ahead.truncate(0)
        for former in (part, *(old.with_name(f"{old.name}.former") for old in (output, part))):
            former.unlink(missing_ok=True)
        bar.close()
    return len(prompts) - before
