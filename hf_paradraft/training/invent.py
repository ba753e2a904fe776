"""Invented prompts: what a chat model writes itself where its template opens the user's turn (Magpie, section 2)."""

import json
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..chat import render_chat
from ..files import rows_of

MARK = "\u241fWHAT THE USER SAYS\u241f"
MOST_TRIES = 20  # turns sampled for each prompt that is wanted, before it is given up


def user_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Ids of the template up to where the user's first words stand, and the token that ends them.

    Raises:
        ValueError: there is no chat template, or it does not show where a turn ends.
    """
    before, found, behind = render_chat(tokenizer, [{"role": "user", "content": MARK}], False).partition(MARK)
    ending = tokenizer(behind.lstrip(), add_special_tokens=False)["input_ids"] if found else []
    if not ending:
        raise ValueError("The chat template does not show where a user's turn begins and ends: prompts cannot be invented.")
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
) -> int:
    """Write `count` different prompts as JSON lines `{"messages": [the user's turn], "batch": its number}`, or go on writing.

    Args:
        target: a chat model.
        tokenizer: its, with a chat template.
        count: of prompts.
        output: grows by a batch at a time.
        max_tokens: of a prompt; turns that do not end by then are dropped, as are repeated and empty ones.
        batch_size: turns sampled together.
        temperature: of sampling.
        seed: of sampling.

    Returns:
        How many turns were sampled by this call.

    Raises:
        ValueError: no chat template, or hardly any turn ends.
    """
    if count < 1:
        raise ValueError(f"{count} prompts cannot be invented: ask for 1 at least.")
    opened, end = user_turn(tokenizer)
    ends = target.generation_config.eos_token_id
    stops = [end, *(ends if isinstance(ends, list) else [] if ends is None else [ends])]
    rows = list(rows_of(output, "train")) if output.exists() and output.stat().st_size else []
    batch = rows[-1]["batch"] if rows else 0  # the last one may be half written: it is drawn again
    rows = [row for row in rows if row["batch"] < batch]
    seen = {row["messages"][0]["content"] for row in rows}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    bar, tried = tqdm(total=count, initial=len(seen), desc="invent", unit="prompts"), 0
    ids = torch.tensor([opened], device=target.get_input_embeddings().weight.device).expand(batch_size, -1)
    with output.open("a", encoding="utf-8") as file:
        while len(seen) < count:
            if (batch + 1) * batch_size > MOST_TRIES * count + 4 * batch_size:
                raise ValueError(
                    f"Only {len(seen)} of {batch * batch_size} invented turns ended within {max_tokens} tokens and were new: "
                    "this is no chat model, or its template has another end of a turn. Give prompts of your own instead."
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
            )
            tried += batch_size
            for turn in made[:, ids.shape[1] :].tolist():
                ended = next((place for place, token in enumerate(turn) if token in stops), None)
                text = "" if ended is None else tokenizer.decode(turn[:ended], skip_special_tokens=True).strip()
                if text and text not in seen and len(seen) < count:
                    seen.add(text)
                    row = {"messages": [{"role": "user", "content": text}], "batch": batch}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    bar.update(1)
            file.flush()
            batch += 1
    bar.close()
    return tried
