"""Self-distillation: answers rewritten by the target, so that the drafter learns the texts that it
will be judged by.
"""

import json
from itertools import islice
from pathlib import Path

from tqdm.auto import tqdm
from transformers.utils import logging

from ..chat import RefusedTurns
from ..files import rows_of
from .answers import Server, Target
from .journal import Journal, check_output_file
from .prompts import WORDS, disjoint, prompts_of
from .source import leave_out
from .target import short_hash

logger = logging.get_logger(__name__)
NUMBER = "index"  # of a row's prompt, until all rows are there
WINDOW = 32  # batches within which prompts are put together by their lengths


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
