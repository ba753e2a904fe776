"""Self-distillation: answers rewritten by the target, so that the drafter learns what it will be judged by."""

import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..chat import render_chat
from ..files import read_json, rows_of
from ..protocol import Drafter
from ..whole_files import write_whole
from .data import load_rows, text_of, turns_of
from .disjoint import WORDS, disjoint

logger = logging.get_logger(__name__)
WINDOW = 8  # batches within which prompts are put together by their lengths
USUAL = 256  # tokens of a prompt; a batch of longer ones has fewer rows


def prompts_of(source: str | Path, prompt_tokens: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict]:
    """`{"messages": turns before the last answer}` or `{"text": its first prompt_tokens tokens}` for every row."""
    for row in load_rows(source):
        if row.get("messages"):
            turns = turns_of(row["messages"])
            while turns and turns[-1]["role"] == "assistant":
                turns.pop()
            if turns:
                yield {"messages": [{k: v for k, v in turn.items() if v is not None or k == "content"} for turn in turns]}
        elif text := text_of(row):
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


def _answers(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], max_new_tokens: int, **arguments: Any
) -> list[tuple[str, bool]]:
    """The target's answer to each prompt, and whether it came to an end."""
    batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    ids = target.generate(**batch.to(target.device), max_new_tokens=max_new_tokens, **arguments)
    ids = ids[:, batch["input_ids"].shape[1] :]
    eos_token_id = target.generation_config.eos_token_id
    ends = torch.tensor([] if eos_token_id is None else eos_token_id, device=ids.device)
    return list(zip(tokenizer.batch_decode(ids, skip_special_tokens=True), torch.isin(ids, ends).any(1).tolist(), strict=True))


def _with_answer(prompt: dict, answer: str, ended: bool) -> dict[str, Any]:
    if "text" in prompt:
        return {"text": prompt["text"] + answer, "finished": ended}
    return {"messages": [*prompt["messages"], {"role": "assistant", "content": answer}], "finished": ended}


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
            are not made again. Answers that were cut off at `max_new_tokens` are marked `"finished": false`.
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
        "drawn": [batch_size, seed] if temperature > 0 else None,  # what decides the draws
    }
    if output.exists() and not overwrite:
        check_same_run(output, run, settings)
        done = cut_half_line(output)
        if done > len(prompts):
            raise ValueError(f"{output} has {done} rows, and {source} only {len(prompts)} prompts: name another output.")
        written = waiting_in(part, done)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        for old in (output, part):  # first: old answers must not be found beside new settings
            old.unlink(missing_ok=True)
        write_whole(run, json.dumps(settings, indent=1) + "\n")
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    before = done
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
                        written[index] = _with_answer(prompts[index], *new[index])
                        ahead.write(json.dumps({"index": index, "row": written[index]}, ensure_ascii=False) + "\n")
                    ahead.flush()
                    bar.update(len(missing))
                while done in written:  # the file's order stays
                    file.write(json.dumps(written.pop(done), ensure_ascii=False) + "\n")
                    done += 1
                file.flush()
            if not written:
                ahead.truncate(0)
    part.unlink()
    bar.close()
    return len(prompts) - before
