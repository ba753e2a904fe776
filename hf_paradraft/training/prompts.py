"""Prompts of a dataset's rows, or invented by the target; none of them is measured on."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..chat import end_tokens, render_chat, until_end
from .journal import Journal, check_output_file
from .source import load_rows, text_of, tools_of, turns_of
from .target import fingerprint

WORDS = 13  # words of a run; no prompt shares one with measured rows (Brown et al., 2020, C)
SHORT = 5  # words of a text that is shorter and counts as a run; fewer are names and roles
# Chinese and Japanese have no spaces
WORD = re.compile(r"[\u3041-\u30ff\u3400-\u9fff]|[^\W\u3041-\u30ff\u3400-\u9fff]+")
MARK = "\u241fWHAT THE USER SAYS\u241f"
BARREN = 128  # turns in a row without a new prompt, after which it is given up


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
