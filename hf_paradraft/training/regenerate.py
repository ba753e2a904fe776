"""Self-distillation: prompts of a dataset's rows, or invented by the target, and the target's own
answers, so that the drafter learns the texts that it will be judged by.
"""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..chat import RefusedTurns, end_tokens, render_chat, until_end
from ..files import rows_of
from .answers import Server, Target
from .journal import Journal, check_output_file
from .source import leave_out, prompts_of
from .target import fingerprint, short_hash

logger = logging.get_logger(__name__)
NUMBER = "index"  # of a row's prompt, until all rows are there
WINDOW = 32  # batches within which prompts are put together by their lengths
WORDS = 13  # words of a run; no prompt shares one with measured rows (Brown et al., 2020, C)
SHORT = 5  # words of a text that is shorter and counts as a run; fewer are names and roles
# Chinese and Japanese have no spaces
WORD = re.compile(r"[\u3041-\u30ff\u3400-\u9fff]|[^\W\u3041-\u30ff\u3400-\u9fff]+")
MARK = "\u241fWHAT THE USER SAYS\u241f"
BARREN = 128  # turns in a row without a new prompt, after which it is given up


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
        writer: the target, or a server, that answers.
        source: a JSON-lines file or a Hub dataset, as for training.
        output: the file of the answers, which grows as they are finished, each with its number, and
            has the order of the source once all are there. Rows that are there are not made again.
            Answers that were cut off are marked `"finished": false`.
        prompt_tokens: the length of the prompt of `text` rows, in tokens.
        overwrite: begin anew if the file has answers of another run.
        avoid: the rows that drafters are measured on; prompts that share 13 words in a row with one
            of them are left out.
        count: the number of prompts that are taken, the first ones; default: all.

    Returns:
        Rows written by this call.

    Raises:
        ValueError, OSError: something about the files is wrong; nothing has been written then. Or a
            server does not answer; its answers so far are kept.
    """
    check_output_file(output, source, avoid)
    prompts = list(islice(prompts_of(source, prompt_tokens, writer.tokenizer), count))
    if not prompts:
        raise ValueError(
            f"{source} has no prompts: chats need a turn before the assistant's, and texts some "
            "tokens."
        )
    if avoid is not None:
        kept = disjoint(prompts, rows_of(avoid, "train"))
        if not kept:
            raise ValueError(
                f"Every prompt of {source} shares {WORDS} words in a row with {avoid}: nothing is "
                "left to answer."
            )
        if shared := len(prompts) - len(kept):
            logger.warning(
                "%d of %d prompts share %d words with %s: left out.",
                shared,
                len(prompts),
                WORDS,
                avoid,
            )
        prompts = kept
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
    if long := len(prompts) - len(refused) - len(fits):
        logger.warning(
            "%d of %d prompts leave no room in the context: left out.", long, len(prompts)
        )
    settings = {**writer.settings(), "prompts": short_hash(json.dumps(fits, default=str))}
    with Journal.open(output, settings, overwrite) as journal:
        done = {row.get(NUMBER, place) for place, row in enumerate(journal.rows())}
        before, window = len(done), WINDOW * writer.batch_size
        bar = tqdm(total=len(fits), initial=before, desc="regenerate", unit="rows")
        for begin in range(0, len(fits), window):
            rows = dict(enumerate(fits[begin : begin + window], begin))
            if rows.keys() <= done:
                continue
            for number, row in writer.answers(rows, done):
                journal.add({NUMBER: number, **row})
                done.add(number)
                bar.update(1)
        bar.close()
        journal.put_in_order(NUMBER)
    return len(done) - before


def texts_in(row: Any) -> Iterator[str]:
    """Yield every text in a JSON value, at any nesting depth, except for system turns.

    All rows of a set may share system turns.
    """
    if isinstance(row, str):
        yield row
    elif isinstance(row, dict | list) and not (
        isinstance(row, dict) and "system" in (row.get("role"), row.get("from"))
    ):
        for part in row.values() if isinstance(row, dict) else row:
            yield from texts_in(part)


def runs_in(row: Any) -> set[tuple[str, ...]]:
    """Collect the runs of 13 consecutive words in a row's texts, and shorter texts whole.

    Case and punctuation do not count. Texts of fewer than `SHORT` words are left out.
    """
    runs: set[tuple[str, ...]] = set()
    for text in texts_in(row):
        words = WORD.findall(text.lower())
        if SHORT <= len(words) < WORDS:
            runs.add(tuple(words))
        runs.update(zip(*(words[begin:] for begin in range(WORDS)), strict=False))
    return runs


def disjoint(rows: Iterable[Any], measured: Iterable[Any]) -> list[Any]:
    """Keep the rows that share no run of 13 words with any row that drafters are measured on."""
    avoided = set().union(*map(runs_in, measured))
    return [row for row in rows if avoided.isdisjoint(runs_in(row))]


def user_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Find the template's ids before the user's first words, and the token that ends the turn.

    Raises:
        ValueError: there is no chat template, or it does not show where a turn ends, or ends it
            with ordinary text.
    """
    before, mark, after = render_chat(
        tokenizer, [{"role": "user", "content": MARK}], False
    ).partition(MARK)
    ending = tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"] if mark else []
    if not ending:
        raise ValueError(
            "The chat template does not show where a user's turn begins and ends: prompts cannot "
            "be invented."
        )
    # Ordinary tokens occur within a prompt too, and the same text can be other tokens: only one of
    # its own ends a turn for sure.
    if ending[0] not in {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}:
        raise ValueError(
            f"The chat template ends a user's turn with ordinary text ({after.strip()!r}), which a "
            "prompt may hold itself: prompts cannot be invented. Give prompts of your own instead, "
            "with --prompts."
        )
    return tokenizer(before, add_special_tokens=False)["input_ids"], ending[0]


@torch.no_grad()
def invent(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    output: Path,
    max_tokens: int = 160,
    batch_size: int = 32,
    temperature: float = 1.0,
    seed: int = 0,
    overwrite: bool = False,
) -> int:
    """Write `count` different prompts as JSON lines, or continue the file of a stopped run.

    A line is `{"messages": [the user's turn], "batch": its number}`. How the prompts are made is
    kept next to them. A file that has as many or more is left as it is: the first `count` are
    those.

    Args:
        target: a chat model.
        tokenizer: the target's tokenizer, with a chat template.
        count: the number of prompts.
        output: the file of the prompts, which grows by a batch at a time.
        max_tokens: the tokens of a prompt, at most; turns that do not end by then are dropped, as
            are repeated and empty ones.
        batch_size: the turns sampled together.
        temperature: the temperature of sampling.
        seed: the seed of sampling.
        overwrite: begin anew if the file has prompts of another run.

    Returns:
        How many turns were sampled by this call.

    Raises:
        ValueError: no chat template, prompts of another run are there, or hardly any turn ends.
    """
    if count < 1:
        raise ValueError(f"{count} prompts cannot be invented: ask for 1 at least.")
    check_output_file(output)
    opened, end = user_turn(tokenizer)
    stops = [end, *end_tokens(target)]
    settings = {
        "target": target.name_or_path,
        "weights": fingerprint(target),
        "dtype": str(target.dtype),
        "turn": [*opened, *stops],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "drawn": [batch_size, seed],
    }
    ids = torch.tensor([opened] * batch_size, device=target.device)
    tried = 0
    with Journal.open(output, settings, overwrite) as journal:
        rows = list(journal.rows())
        if any(type(row.get("batch")) is not int or not row.get("messages") for row in rows):
            raise ValueError(
                f"{output} was changed by others: pass --overwrite to invent prompts anew, or name "
                "another output."
            )
        seen = {row["messages"][0]["content"] for row in rows}
        fruitful = rows[-1]["batch"] if rows else -1
        batch = max(0, fruitful)  # it may be half written: the rest of it is added
        bar = tqdm(total=count, initial=min(count, len(seen)), desc="invent", unit="prompts")
        while len(seen) < count:
            if (barren := (batch - fruitful - 1) * batch_size) >= BARREN:
                raise ValueError(
                    f"None of the last {barren} invented turns ended within {max_tokens} tokens "
                    f"and was new; {len(seen)} prompts are there. A base model does not end turns, "
                    "and some models were taught another end than the template's: take a chat "
                    "model, or give prompts of your own with --prompts."
                )
            torch.manual_seed(1_000_003 * seed + batch)
            made = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=temperature,
                max_new_tokens=max_tokens,
                eos_token_id=stops,
                pad_token_id=end,
                stop_strings=None,
            )
            tried += batch_size
            for turn in made[:, ids.shape[1] :].tolist():
                written, ended = until_end(turn, stops)
                text = (
                    tokenizer.decode(written[:-1], skip_special_tokens=True).strip()
                    if ended
                    else ""
                )
                if text and text not in seen and len(seen) < count:
                    seen.add(text)
                    fruitful = batch
                    row = {"messages": [{"role": "user", "content": text}], "batch": batch}
                    journal.add(row)
                    bar.update(1)
            batch += 1
        bar.close()
    return tried
