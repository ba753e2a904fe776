"""What the embedded family reads: generated tasks and a little of the standard library, as token
batches.

Every batch is a function of `(seed, index)` alone, so a training run can stop and resume without
saving its data.
"""

import sysconfig
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from examples.family.tasks import CATEGORIES, is_held_out, tasks

USER, ASSISTANT, END, MASK, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|mask|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>' + "
    "message['content'] }}{% else %}{{ '<|assistant|>' }}{% generation %}{{ message['content'] + "
    "'<|end|>' }}{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|assistant|>' }}{% endif %}"
)
# Build paths, dead packages and giant generated tables teach a small model nothing but repetition.
LEFT_OUT = (
    "_sysconfigdata",
    "lib2to3",
    "idlelib",
    "encodings",
    "pydoc_data",
    "site-packages",
    "test",
)


def library_files(held_out: bool) -> list[Path]:
    """The running interpreter's own Python files on one side of the split; whole files, by the hash
    of their name.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in sorted(root.rglob("*.py"))
        if not any(part in str(file.relative_to(root)) for part in LEFT_OUT)
    ]
    return [file for file in files if is_held_out(str(file.relative_to(root))) == held_out]


def train_tokenizer(seed: int, vocab_size: int = 2048) -> PreTrainedTokenizerFast:
    """A byte-level BPE with single digits, learned from training tasks and standard-library
    files.
    """
    texts = [
        text
        for name in CATEGORIES
        for task in islice(tasks(name, seed, False), 3000)
        for text in (task.prompt, task.answer)
    ]
    texts += [file.read_text(errors="ignore") for file in library_files(False)[::12]]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    special = [PAD, END, USER, ASSISTANT, MASK]
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        mask_token=MASK,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


class Corpus:
    """Training batches of about `tokens_per_batch` tokens.

    Args:
        tokenizer: the family's own.
        seed: of the task streams.
        tokens_per_batch: rows times padded length stays at or under this.
        weights: how many times as often as others a category is drawn.
    """

    rounds = 16  # batches drawn together, sorted by length so that little is padding

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        seed: int,
        tokens_per_batch: int = 4096,
        weights: Mapping[str, int] = MappingProxyType({}),
    ):
        self.tokenizer, self.seed, self.tokens_per_batch = tokenizer, seed, tokens_per_batch
        self.lottery = [name for name in CATEGORIES for _ in range(weights.get(name, 1))]
        self.library = [file.read_text(errors="ignore") for file in library_files(False)]

    def batches(self, start: int) -> Iterator[dict[str, torch.Tensor]]:
        """From batch `start` on: int64 `(rows, length)` `input_ids`, and `labels` that are -100 on
        prompts and padding.
        """
        megabatch = start // self.rounds
        skip = start % self.rounds
        while True:
            yield from islice(self._megabatch(megabatch), skip, None)
            megabatch, skip = megabatch + 1, 0

    def _megabatch(self, index: int) -> list[dict[str, torch.Tensor]]:
        rng = Random(f"{self.seed}/{index}")
        streams = {name: tasks(name, rng.getrandbits(48), False) for name in CATEGORIES}
        samples, total = [], 0
        while total < self.rounds * self.tokens_per_batch * 1.1:
            if rng.random() < 0.03:
                samples.append(self._library_sample(rng))
            else:
                task = next(streams[rng.choice(self.lottery)])
                prompt = self.tokenizer(USER + task.prompt + ASSISTANT)["input_ids"]
                answer = self.tokenizer(task.answer + END)["input_ids"]
                samples.append((prompt + answer, [-100] * len(prompt) + answer))
            total += len(samples[-1][0])
        samples.sort(key=lambda sample: len(sample[0]))
        batches: list[Any] = []
        rows: list[Any] = []
        for sample in samples:
            if rows and (len(rows) + 1) * len(sample[0]) > self.tokens_per_batch:
                batches.append(self._pad(rows))
                rows = []
            rows.append(sample)
        rng.shuffle(batches)
        if len(batches) < self.rounds:
            raise ValueError("tokens_per_batch is too small for these samples")
        return batches[: self.rounds]

    def _library_sample(self, rng: Random) -> tuple[list[int], list[int]]:
        text = rng.choice(self.library)
        begin = rng.randrange(max(1, len(text) - 800))
        ids = self.tokenizer(text[begin : begin + 800])["input_ids"][:240]
        return ids, list(ids)

    def _pad(self, rows: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
        width = max(len(ids) for ids, _ in rows)
        return {
            "input_ids": torch.tensor(
                [ids + [self.tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows]
            ),
            "labels": torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows]),
        }
