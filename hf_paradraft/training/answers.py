"""Who answers prompts: a target in this process, or a server that speaks OpenAI's protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.utils import http_backoff
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..chat import end_tokens, learned_context, render_chat, sampling, until_end
from ..decoding.continuous import can_join, continuous_batching
from ..protocol import Drafter
from .data import tokenizer_hash
from .fingerprint import fingerprint

USUAL = 256  # tokens of a prompt; a batch of longer ones has fewer rows
PATIENCE = 600.0  # seconds for one answer of a server


@dataclass
class Answer:
    """What was written to a prompt.

    Attributes:
        text: without special tokens.
        ended: whether it came to an end.
        more: what else its row says: `ids` of prompt and answer, their `tokenizer`, `prompt_tokens`.
    """

    text: str
    ended: bool
    more: dict[str, Any] = field(default_factory=dict)


@dataclass
class Target:
    """A target in this process.

    Attributes:
        model: answers.
        tokenizer: its own; padded on the left here.
        max_new_tokens: of an answer.
        batch_size: prompts answered together, at most.
        temperature: 0 is greedy.
        seed: of sampling.
        drafter: makes it faster; the answers stay the target's.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    batch_size: int
    temperature: float = 0.0
    seed: int = 0
    drafter: Drafter | None = None

    def __post_init__(self) -> None:
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.hash = tokenizer_hash(self.tokenizer)

    def settings(self) -> dict[str, Any]:
        """What decides the answers."""
        config = self.model.generation_config.to_diff_dict()
        config.pop("transformers_version", None)
        return {
            "target": self.model.name_or_path,
            "weights": fingerprint(self.model),
            "dtype": str(self.model.dtype),
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "generation_config": json.loads(json.dumps(config, default=str, sort_keys=True)),
            "drawn": [self.batch_size, self.seed] if self.temperature > 0 else None,  # what decides the draws
        }

    def ids(self, row: Mapping[str, Any]) -> list[int]:
        """Of a prompt."""
        if "text" in row:
            return self.tokenizer(row["text"])["input_ids"]
        return self.tokenizer(render_chat(self.tokenizer, row["messages"], True), add_special_tokens=False)["input_ids"]

    @property
    def context(self) -> int | None:
        """Tokens of prompt and answer, at most; None: any number."""
        return learned_context(self.model)

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Whether a prompt leaves room for an answer.

        Raises:
            ValueError: the chat template refuses it.
        """
        length = len(self.ids(row)) + self.max_new_tokens
        return self.context is None or length <= self.context

    def answers(self, rows: Mapping[int, Mapping[str, Any]], done: set[int]) -> Iterator[tuple[int, Answer]]:
        """Answers to prompts by their numbers, in any order.

        Args:
            rows: that are answered together.
            done: those of them that have their answers.
        """
        prompts = {index: self.ids(row) for index, row in rows.items()}
        order = sorted(prompts, key=lambda index: (len(prompts[index]), index))  # alike together: short ones need not wait
        num_slots = self.batch_size * (USUAL + self.max_new_tokens)
        if self.temperature == 0 and can_join(self.model):
            waiting = [index for index in order if index not in done]
            encoded = [prompts[index] for index in waiting]
            options = {"drafter": self.drafter, "pad_token_id": self.tokenizer.pad_token_id}
            for number, ids in continuous_batching(
                self.model, encoded, self.max_new_tokens, self.batch_size, num_slots, **options
            ):
                yield waiting[number], self._answer(rows[waiting[number]], encoded[number], ids)
            return
        for batch in batches({index: len(prompts[index]) for index in order}, self.batch_size, self.max_new_tokens, num_slots):
            if not done.issuperset(batch):
                for index, ids in zip(batch, self._together(batch, prompts), strict=True):
                    if index not in done:
                        yield index, self._answer(rows[index], prompts[index], ids)

    def _together(self, batch: list[int], prompts: dict[int, list[int]]) -> list[list[int]]:
        """New tokens of one batch of `generate`, padding included; what was drawn before is drawn alike."""
        torch.manual_seed(self.seed + batch[0])
        inputs = self.tokenizer.pad({"input_ids": [prompts[index] for index in batch]}, return_tensors="pt")
        options = {"max_new_tokens": self.max_new_tokens, **sampling(self.temperature)}
        if self.drafter is not None:
            options["assistant_model"] = self.drafter
        written = self.model.generate(**inputs.to(self.model.device), **options)
        return written[:, inputs["input_ids"].shape[1] :].tolist()

    def _answer(self, row: Mapping[str, Any], prompt: list[int], ids: list[int]) -> Answer:
        """New tokens up to the one that ends them, as text and as they are: templates do not give back what was written."""
        ids, ended = until_end(ids, end_tokens(self.model))
        more: dict[str, Any] = {"ids": [*prompt, *ids], "tokenizer": self.hash}
        if "messages" in row:
            more["prompt_tokens"] = len(prompt)
        return Answer(self.tokenizer.decode(ids, skip_special_tokens=True), ended, more)


def batches(lengths: dict[int, int], batch_size: int, max_new_tokens: int, num_slots: int) -> Iterator[list[int]]:
    """Prompts of similar length together: one long prompt would make a whole batch of short ones wait.

    Args:
        lengths: of the prompts, by their numbers.
        batch_size: prompts of a batch at most.
        max_new_tokens: of an answer.
        num_slots: tokens of a batch, at most; one prompt is always answered.
    """
    waiting: list[int] = []
    for index in sorted(lengths, key=lambda number: (lengths[number], number)):
        if waiting and (len(waiting) == batch_size or (len(waiting) + 1) * (lengths[index] + max_new_tokens) > num_slots):
            yield waiting
            waiting = []
        waiting.append(index)
    if waiting:
        yield waiting


@dataclass
class Server:
    """A server that speaks OpenAI's protocol: vLLM, llama.cpp, TGI, ….

    Attributes:
        base_url: up to `/v1`.
        model: its name there.
        max_new_tokens: of an answer.
        batch_size: requests that are open at a time.
        temperature: 0 is greedy.
        seed: of sampling, to which the prompt's number is added.
        api_key: if the server wants one; it goes nowhere else.
        tokenizer, context: not known here.
    """

    base_url: str
    model: str
    max_new_tokens: int
    batch_size: int
    temperature: float = 0.0
    seed: int = 0
    api_key: str | None = None
    tokenizer: None = None
    context: None = None

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Any prompt: the server knows its context."""
        return True

    def settings(self) -> dict[str, Any]:
        """What decides the answers."""
        return {
            "target": self.model,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "drawn": [self.seed] if self.temperature > 0 else None,
        }

    def answers(self, rows: Mapping[int, Mapping[str, Any]], done: set[int]) -> Iterator[tuple[int, Answer]]:
        """As `Target.answers`.

        Raises:
            OSError: the server refuses, or does not answer.
        """
        with ThreadPoolExecutor(self.batch_size) as pool:
            asked = {pool.submit(self._ask, index, row["messages"]): index for index, row in rows.items() if index not in done}
            try:
                for answered in as_completed(asked):
                    yield asked[answered], answered.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _ask(self, index: int, messages: list[dict[str, Any]]) -> Answer:
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "seed": self.seed + index,
        }
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        try:
            response = http_backoff("POST", url, json=body, headers=headers, timeout=PATIENCE)
            if response.status_code >= 400:
                raise ValueError(f"status {response.status_code}, {response.text[:200]}")
            choice = response.json()["choices"][0]
            text, reason = choice["message"]["content"], choice["finish_reason"]
            if not isinstance(text, str):
                raise ValueError(f"an answer without text: {str(choice)[:200]}")
        except Exception as error:  # a foreign server fails in many ways
            raise OSError(
                f"{url} did not answer prompt {index + 1} ({type(error).__name__}: {error}). What it has answered is "
                "kept: the same call goes on."
            ) from error
        return Answer(text, reason == "stop")
