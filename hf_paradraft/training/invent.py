"""Invented prompts: what a chat model writes itself where its template opens the user's turn
(Magpie, section 2).
"""

import json
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..chat import end_tokens, render_chat, until_end
from ..files import rows_of, write_json
from .regenerate import check_same_run, cut_half_line
from .target import fingerprint

MARK = "\u241fWHAT THE USER SAYS\u241f"
BARREN = 128  # turns in a row without a new prompt, after which it is given up


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
        tokenizer: its, with a chat template.
        count: of prompts.
        output: grows by a batch at a time.
        max_tokens: of a prompt; turns that do not end by then are dropped, as are repeated and
            empty ones.
        batch_size: turns sampled together.
        temperature: of sampling.
        seed: of sampling.
        overwrite: begin anew, where the file has prompts of another run.

    Returns:
        How many turns were sampled by this call.

    Raises:
        ValueError: no chat template, prompts of another run are there, or hardly any turn ends.
    """
    if count < 1:
        raise ValueError(f"{count} prompts cannot be invented: ask for 1 at least.")
    opened, end = user_turn(tokenizer)
    stops = [end, *end_tokens(target)]
    run = output.with_name(f"{output.name}.run")
    settings = {
        "target": target.name_or_path,
        "weights": fingerprint(target),
        "dtype": str(target.dtype),
        "turn": [*opened, *stops],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "drawn": [batch_size, seed],
    }
    if output.exists() and not overwrite:
        check_same_run(output, run, settings)
        cut_half_line(output)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.unlink(missing_ok=True)  # first: old prompts must not be found next to new settings
        write_json(run, settings)
        output.touch()
    rows = list(rows_of(output, "train")) if output.stat().st_size else []
    seen = {row["messages"][0]["content"] for row in rows}
    fruitful = rows[-1].get("batch") if rows else -1
    if type(fruitful) is not int:
        raise ValueError(
            f"{output} was changed by others: pass --overwrite to invent prompts anew, or name "
            "another output."
        )
    batch = max(0, fruitful)  # it may be half written: what is not there of it is added
    bar, tried = tqdm(total=count, initial=min(count, len(seen)), desc="invent", unit="prompts"), 0
    ids = torch.tensor([opened], device=target.get_input_embeddings().weight.device).expand(
        batch_size, -1
    )
    with output.open("a", encoding="utf-8") as file:
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
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    bar.update(1)
            file.flush()
            batch += 1
    bar.close()
    return tried
