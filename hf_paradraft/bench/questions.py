"""Questions of one or more turns, from a file or a Hub dataset, and the prompts that they
become.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import LongTensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..chat import check_room, encode_chat_prompt, stopping, whole_characters
from ..files import rows_of

# HumanEval has a prompt, GSM8K a question
TEXT_COLUMNS = (
    "prompt",
    "question",
    "instruction",
    "text",
)


PLACEHOLDER = (
    "FULL BENCHMARK DATA SHOULD BE FETCHED"  # in the place of what SPEED-Bench may not redistribute
)


@dataclass(frozen=True)
class Question:
    """A user's turns; the answers in between are the target's own."""

    category: str
    turns: tuple[str, ...]


@dataclass
class Prompt:
    """A prompt's category and its tokens, `ids` int64 `(1, n)`."""

    category: str
    ids: LongTensor


def load_questions(source: str | Path, per_category: int | None = None) -> list[Question]:
    """Load the questions of a JSON-lines file or of a Hub dataset.

    A row has `turns` (Spec-Bench, MT-Bench), `messages`, or one of `prompt`, `question`,
    `instruction` and `text`; its `category`, if there is none, is the source's name.

    Args:
        source: the file, or the dataset as `ID`, `ID:CONFIG` or `ID:CONFIG:SPLIT`; split `test` if
            none.
        per_category: the first so many of each; None for all.

    Raises:
        OSError: there is no such file or dataset.
        ValueError: a line that is not JSON, a row without a question, or no row at all.
    """
    source = str(source)
    rows = rows_of(source, "test")
    name = Path(source.split(":")[0]).stem
    questions: list[Question] = []
    taken: Counter[str] = Counter()
    for number, row in enumerate(rows, 1):
        question = _question(row, name, f"{source}, row {number}")
        taken[question.category] += 1
        if per_category is None or taken[question.category] <= per_category:
            questions.append(question)
    if not questions:
        raise ValueError(f"{source} has no questions.")
    return questions


def _question(row: Any, name: str, source: str) -> Question:
    category = str(row.get("category") or name)
    if row.get("turns"):
        turns = row["turns"] if isinstance(row["turns"], list) else [row["turns"]]
    elif row.get("messages"):
        listed = row["messages"] if isinstance(row["messages"], list) else []
        messages = [message if isinstance(message, Mapping) else {} for message in listed]
        if any(message.get("role") == "system" for message in messages):
            raise ValueError(
                f"{source}: system messages are not asked here; leave them out, or put them into "
                "the first turn."
            )
        turns = [message.get("content") for message in messages if message.get("role") == "user"]
    else:
        turns = [row[column] for column in TEXT_COLUMNS if row.get(column)][:1]
    if not turns or not all(isinstance(turn, str) for turn in turns):
        wanted = ", ".join(("turns", "messages", *TEXT_COLUMNS))
        raise ValueError(
            f"{source}: no question in it, wanted one of {wanted}, but it has {', '.join(row)}."
        )
    if any(turn.startswith(PLACEHOLDER) for turn in turns):
        raise ValueError(
            f"{source}: SPEED-Bench leaves this question to its publisher's script, which fetches "
            "it: give its file."
        )
    try:
        return Question(whole_characters(category), tuple(map(whole_characters, turns)))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def ask(
    questions: Sequence[Question],
    tokenizer: PreTrainedTokenizerBase,
    target: PreTrainedModel,
    max_new_tokens: int,
) -> list[Prompt]:
    """Make a prompt of every turn; `target` answers the turns before by plain greedy `generate`.

    Raises:
        ValueError: one has no place in the target's context.
    """
    prompts = []
    several = any(len(question.turns) > 1 for question in questions)
    for question in tqdm(questions, "earlier turns", unit="question", disable=not several):
        messages: list[dict[str, str]] = []
        for number, turn in enumerate(question.turns, 1):
            messages.append({"role": "user", "content": turn})
            ids = LongTensor([encode_chat_prompt(tokenizer, messages)])
            check_room(target, ids.shape[1], max_new_tokens)
            prompts.append(Prompt(question.category, ids))
            if number < len(question.turns):
                ids = ids.to(target.device)
                options = {
                    "attention_mask": torch.ones_like(ids),
                    "do_sample": False,
                    "max_new_tokens": max_new_tokens,
                }
                answer = target.generate(ids, **options, **stopping(target, tokenizer))[
                    0, ids.shape[1] :
                ]
                messages.append(
                    {
                        "role": "assistant",
                        "content": tokenizer.decode(answer, skip_special_tokens=True),
                    }
                )
    return prompts


def random_prompts(vocab_size: int, count: int = 8, length: int = 48) -> list[Prompt]:
    """Make prompts of random tokens, which are text of no kind."""
    generator = torch.Generator().manual_seed(0)
    return [
        Prompt("random tokens", torch.randint(vocab_size, (1, length), generator=generator))
        for _ in range(count)
    ]
