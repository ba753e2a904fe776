"""Self-distillation: answers rewritten by the target, so that the drafter learns what it will be
judged by.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..chat import RefusedTurns
from ..files import other_settings, read_json, rows_of, write_json
from .answers import Server, Target
from .disjoint import WORDS, disjoint
from .source import leave_out, load_rows, text_of, tools_of, turns_of

logger = logging.get_logger(__name__)
WRITTEN = ("", ".run", ".part", ".former", ".part.former")  # after the output's name
WINDOW = 32  # batches within which prompts are put together by their lengths


def prompts_of(
    source: str | Path, prompt_tokens: int, tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[dict]:
    """Yield the prompt of each row: a chat's turns before the last answer, or a text's beginning.

    Prompts are `{"messages": turns before the last answer}`, with its tools, or `{"text": its first
    tokens}`.

    Raises:
        ValueError: a row is none of both, or a text where no tokenizer can cut it.
    """
    for count, row in enumerate(load_rows(source), 1):
        try:
            turns, text = turns_of(row["messages"]) if row.get("messages") else [], text_of(row)
            tools = tools_of(row)
        except ValueError as error:
            raise ValueError(f"{source}, row {count}: {error}") from None
        while turns and turns[-1]["role"] == "assistant":
            turns.pop()
        if turns:
            messages = [
                {k: v for k, v in turn.items() if v is not None or k == "content"} for turn in turns
            ]
            yield {"messages": messages, **({} if tools is None else {"tools": tools})}
        elif text and not row.get("messages"):
            if tokenizer is None:
                raise ValueError(
                    f"{source}, row {count}: a server answers conversations, give rows with "
                    "'messages'."
                )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"][:prompt_tokens]
            while (begun := tokenizer.decode(ids)).endswith("\ufffd") and len(ids) > 1:
                ids.pop()  # half a character
            yield {"text": begun}


def check_sources(output: Path, *sources: str | Path | None) -> None:
    """Refuse an output that is no file, or that would overwrite a source or foreign files.

    Foreign files are those that others have left next to it under names that are needed.

    Args:
        output: the answers; other files of theirs lie next to it, with more after its name.
        sources: prompts, and rows to avoid: files or Hub datasets; None for none.

    Raises:
        ValueError: it would.
    """
    if output.is_dir() or not output.name:
        raise ValueError(f"The output {str(output)!r} is a folder: name a file.")
    for source in sources:
        same_folder = (
            source is not None and Path(source).parent.resolve() == output.parent.resolve()
        )
        if same_folder and Path(source).name in {f"{output.name}{end}" for end in WRITTEN}:
            raise ValueError(
                f"{source} would be written to: name another one for the answers than {output}."
            )
    run, *others = (output.with_name(f"{output.name}{end}") for end in WRITTEN[1:])
    ours = run.is_file() and _is_of_a_run(run)
    if foreign := [file for file in (run, *others) if (file.is_dir() if ours else file.exists())]:
        raise ValueError(
            f"{foreign[0]} is none of this command's, which needs the name: move it, or name "
            "another output."
        )


def _is_of_a_run(file: Path) -> bool:
    """Tell whether a file says how answers were made."""
    try:
        return "max_new_tokens" in read_json(file)
    except OSError:
        return False


def check_same_run(output: Path, run: Path, settings: dict[str, Any]) -> None:
    """Refuse to go on with answers of another run.

    Args:
        output: the answers so far.
        run: next to them, how they were made.
        settings: of this run.

    Raises:
        ValueError: they were made otherwise, or it is not known how.
    """
    if not run.exists():
        raise ValueError(
            f"{output} exists, and no {run.name} says how it was made: pass --overwrite, or name "
            "another output."
        )
    made: dict[str, Any] = read_json(run)
    if other := other_settings(made, settings):
        raise ValueError(
            f"{output} was made with other settings ({other}): use those again to go on, pass "
            "--overwrite to begin anew, or name another output."
        )


def cut_half_line(file: Path) -> int:
    """Cut off the half line that a killed run may leave; the number of whole ones."""
    *whole, _ = file.read_bytes().split(b"\n")
    with file.open("r+b") as opened:
        opened.truncate(sum(len(line) + 1 for line in whole))
    return len(whole)


def waiting_in(part: Path, done: int) -> dict[int, dict[str, Any]]:
    """Read the finished answers, by number, that wait for earlier ones to reach the output.

    Args:
        part: next to the output; there may be none.
        done: rows of the output.
    """
    if not part.exists():
        return {}
    cut_half_line(part)
    rows = [
        row
        for row in rows_of(part, "train")
        if isinstance(row.get("row"), dict) and type(row.get("index")) is int
    ]
    return {row["index"]: row["row"] for row in rows if row["index"] >= done}


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
        raise OSError(
            f"Another process is writing {file}: wait for it, or name another output."
        ) from None


def regenerate(
    writer: Target | Server,
    source: str | Path,
    output: Path,
    prompt_tokens: int = 32,
    overwrite: bool = False,
    avoid: str | Path | None = None,
    count: int | None = None,
) -> int:
    """Write `source` again with a target's own answers, as JSON lines.

    An unfinished file is continued.

    Args:
        writer: answers.
        source: a JSON-lines file or a Hub dataset, as for training.
        output: grows in the order of the source; what is finished before its turn waits in
            `OUTPUT.part`. Rows that are there are not made again. Answers that were cut off are
            marked `"finished": false`.
        prompt_tokens: for `text` rows, how much of the text is the prompt.
        overwrite: begin anew, where the file has answers of another run.
        avoid: rows that drafters are measured on; prompts that share 13 words in a row with one of
            them are left out.
        count: prompts that are taken, the first ones; default: all.

    Returns:
        Rows written by this call.

    Raises:
        ValueError, OSError: something about the files is wrong; nothing has been written then. Or a
            server does not answer; what it had answered is kept.
    """
    check_sources(output, source, avoid)
    prompts = list(islice(prompts_of(source, prompt_tokens, writer.tokenizer), count))
    if avoid is not None and prompts:
        total, prompts = len(prompts), disjoint(prompts, rows_of(avoid, "train"))
        if len(prompts) < total:
            logger.warning(
                "%d of %d prompts share %d words with %s: left out.",
                total - len(prompts),
                total,
                WORDS,
                avoid,
            )
        if not prompts:
            raise ValueError(
                f"Every prompt of {source} shares {WORDS} words in a row with {avoid}: nothing is "
                "left to answer."
            )
    if not prompts:
        raise ValueError(
            f"{source} has no prompts: chats need a turn before the assistant's, and texts some "
            "tokens."
        )
    fits, refused = [], []
    for number, row in enumerate(prompts, 1):
        try:
            if writer.fits(row):
                fits.append(row)
        except RefusedTurns as error:
            refused.append(f"Prompt {number}: {error}")
    leave_out(refused, len(prompts))
    if not fits:
        raise ValueError(
            f"No prompt of {source} leaves room for {writer.max_new_tokens} tokens in the target's "
            f"context of {writer.context}."
        )
    if (long := len(prompts) - len(refused) - len(fits)) > 0:
        logger.warning(
            "%d of %d prompts leave no room in the context: left out.", long, len(prompts)
        )
    run, part = (output.with_name(f"{output.name}.{name}") for name in ("run", "part"))
    done = 0
    waiting: dict[int, dict[str, Any]] = {}
    settings = {
        **writer.settings(),
        "prompts": hashlib.sha256(json.dumps(fits, default=str).encode()).hexdigest()[:16],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    with only_writer(output):
        if output.exists() and not overwrite:
            check_same_run(output, run, settings)
            done = cut_half_line(output)
            if done > len(fits):
                raise ValueError(
                    f"{output} has {done} rows, and {source} only {len(fits)} prompts: name "
                    "another output."
                )
            waiting = waiting_in(part, done)
            if writer.states is not None and (done or waiting):
                logger.warning(
                    "%d answers are there already: trainings compute their states.",
                    done + len(waiting),
                )
        else:
            for old in (output, part):  # first: old answers must not be found next to new settings
                former = old.with_name(f"{old.name}.former")
                # one that is there is of answers that were finished
                if old.exists() and not former.exists():
                    old.replace(former)
                old.unlink(missing_ok=True)
            write_json(run, settings)
        before, window = done, WINDOW * writer.batch_size
        bar = tqdm(total=len(fits), initial=done + len(waiting), desc="regenerate", unit="rows")
        with output.open("a", encoding="utf-8") as file, part.open("a", encoding="utf-8") as ahead:

            def write_those_in_turn() -> int:
                count = done
                while count in waiting:
                    file.write(
                        json.dumps(waiting.pop(count), ensure_ascii=False, default=str) + "\n"
                    )
                    count += 1
                file.flush()
                return count

            for begin in range(done - done % window, len(fits), window):
                rows = {
                    index: fits[index] for index in range(begin, min(begin + window, len(fits)))
                }
                done = write_those_in_turn()
                for index, row in writer.answers(
                    rows, {index for index in rows if index < done or index in waiting}
                ):
                    waiting[index] = row
                    ahead.write(
                        json.dumps({"index": index, "row": row}, ensure_ascii=False, default=str)
                        + "\n"
                    )
                    ahead.flush()
                    bar.update(1)
                    done = write_those_in_turn()
                if not waiting:
                    ahead.truncate(0)
        for former in (part, *(old.with_name(f"{old.name}.former") for old in (output, part))):
            former.unlink(missing_ok=True)
        bar.close()
    return len(fits) - before
