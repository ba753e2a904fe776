"""Writers of answers: a target in this process, or a server that speaks OpenAI's protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..chat import (
    RefusedTurns,
    end_tokens,
    learned_context,
    render_chat,
    sampling,
    stopping,
    text_after,
    until_end,
)
from ..continuous import can_join, continuous_batching
from ..decoding.checks import Refused
from ..files import check_depth
from ..protocol import Drafter
from .data import tokenizer_hash
from .source import thought_of, turns_of
from .target import fingerprint, short_hash

logger = logging.get_logger(__name__)
TYPICAL_PROMPT = 256  # tokens of a prompt; a batch of longer ones has fewer rows
PATIENCE, RETRIES = 600.0, 5  # of a server: seconds for an answer, and further requests for it
MANY = 8  # prompts: if all of them are refused, that is no fault of theirs
# of a turn, as the protocol names them
SENT = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
)


def answered(
    row: Mapping[str, Any], answer: Mapping[str, Any], ended: bool, **more: Any
) -> dict[str, Any]:
    """Make a row of a prompt and its answer.

    Args:
        row: the prompt, with the tools that the target was offered.
        answer: the answer's turn, without its role: `content`, thoughts, calls of tools.
        ended: whether the answer came to an end.
        more: further columns: `ids` of prompt and answer, their `tokenizer`, `prompt_tokens`.
    """
    if "text" in row:
        whole = {"text": row["text"] + answer["content"]}
    else:
        whole = {**row, "messages": [*row["messages"], {"role": "assistant", **answer}]}
    return {**whole, "finished": ended, **more}


@dataclass
class Target:
    """A target in this process.

    Attributes:
        model: the causal LM that answers.
        tokenizer: the model's tokenizer; it pads on the left here.
        max_new_tokens: the tokens of an answer, at most.
        batch_size: the prompts answered together, at most.
        temperature: the temperature of sampling; 0 is greedy.
        seed: the seed of sampling.
        drafter: a drafter that makes the model faster; the answers stay the target's.
        joins: whether prompts may join a running batch, if target and drafter allow it.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    batch_size: int
    temperature: float = 0.0
    seed: int = 0
    drafter: Drafter | None = None
    joins: bool = True

    def __post_init__(self) -> None:
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.hash = tokenizer_hash(self.tokenizer)

    def settings(self) -> dict[str, Any]:
        """Collect the settings that decide the answers."""
        config = self.model.generation_config.to_diff_dict()
        config.pop("transformers_version", None)
        return {
            "target": self.model.name_or_path,
            "tokenizer": self.hash,
            "template": short_hash(str(self.tokenizer.chat_template)),
            "weights": fingerprint(self.model),
            "dtype": str(self.model.dtype),
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "generation_config": json.loads(json.dumps(config, default=str, sort_keys=True)),
            "drawn": [self.batch_size, self.seed]
            if self.temperature > 0
            else None,  # the batches and the seed decide the draws
        }

    def ids(self, row: Mapping[str, Any]) -> list[int]:
        """Encode a prompt."""
        if "text" in row:
            return self.tokenizer(row["text"])["input_ids"]
        text = render_chat(self.tokenizer, row["messages"], True, row.get("tools"))
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @property
    def context(self) -> int | None:
        """The tokens of prompt and answer, at most; None: any number."""
        return learned_context(self.model)

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Tell whether a prompt leaves room for an answer in the target's context.

        Raises:
            RefusedTurns: the chat template refuses it, or it has no tokens.
        """
        ids, size = self.ids(row), self.model.get_input_embeddings().weight.shape[0]
        if not ids:
            raise RefusedTurns("it has no tokens.")
        if max(ids) >= size:
            raise ValueError(
                f"A prompt has the token {max(ids)}, and the target's embedding {size} rows: its "
                "tokenizer is another's."
            )
        length = len(ids) + self.max_new_tokens
        return self.context is None or length <= self.context

    def answers(
        self, rows: Mapping[int, Mapping[str, Any]], done: set[int]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (number, answered row) for every row that is not in `done`, in any order.

        Args:
            rows: the prompts that are answered together, by their numbers.
            done: the numbers of the run's prompts that have answers; each yielded one joins them.
        """
        prompts = {index: self.ids(row) for index, row in rows.items()}
        lengths = {index: len(ids) for index, ids in prompts.items()}
        sizes = (
            self.max_new_tokens,
            self.batch_size,
            self.batch_size * (TYPICAL_PROMPT + self.max_new_tokens),
        )
        if self.joins and self.temperature == 0 and can_join(self.model, self.drafter):
            # short ones need not wait
            waiting = sorted(
                (index for index in prompts if index not in done), key=lengths.__getitem__
            )
            encoded = [prompts[index] for index in waiting]
            options = {
                "drafter": self.drafter,
                "pad_token_id": self.tokenizer.pad_token_id,
                **stopping(self.model, self.tokenizer),
            }
            try:
                for number, ids in continuous_batching(self.model, encoded, *sizes, **options):
                    index = waiting[number]
                    yield index, self._answered(rows[index], prompts[index], ids)
            except Refused as error:
                logger.warning_once(
                    "Prompts cannot join a running batch here (%s): they are answered batch by "
                    "batch.",
                    error,
                )
                self.joins = False
        for batch in batches(lengths, *sizes):
            if not done.issuperset(batch):
                for index, ids in zip(batch, self._together(batch, prompts), strict=True):
                    if index not in done:
                        yield index, self._answered(rows[index], prompts[index], ids)

    def _together(self, batch: list[int], prompts: dict[int, list[int]]) -> list[list[int]]:
        """Generate the new tokens of one batch, padding included.

        Sampling is seeded per batch, so that a repeated batch draws alike.
        """
        torch.manual_seed(self.seed + batch[0])
        inputs = self.tokenizer.pad(
            {"input_ids": [prompts[index] for index in batch]}, return_tensors="pt"
        )
        written = self.model.generate(
            **inputs.to(self.model.device),
            assistant_model=self.drafter,
            max_new_tokens=self.max_new_tokens,
            **sampling(self.temperature),
            **stopping(self.model, self.tokenizer),
        )
        return written[:, inputs["input_ids"].shape[1] :].tolist()

    def _answered(
        self, row: Mapping[str, Any], prompt: list[int], ids: list[int]
    ) -> dict[str, Any]:
        """Make a row of the new tokens up to the one that ends them, as text and as ids.

        The row has ids because templates do not reproduce them.

        Args:
            row: the prompt.
            prompt, ids: the prompt's tokens, and the new ones.
        """
        ids, ended = until_end(ids, end_tokens(self.model))
        while not ended and ids[-1:] == [self.tokenizer.pad_token_id]:  # after a stop string
            ids = ids[:-1]
        ended = ended or len(ids) < self.max_new_tokens
        unlabelled = {"prompt_tokens": len(prompt)} if "messages" in row else {}
        answer = {"content": text_after(self.tokenizer, prompt, ids)}
        return answered(row, answer, ended, ids=[*prompt, *ids], tokenizer=self.hash, **unlabelled)


def batches(
    lengths: dict[int, int], max_new_tokens: int, batch_size: int, num_slots: int
) -> Iterator[list[int]]:
    """Yield the numbers of prompts in batches of similar length.

    A long prompt would make a whole batch of short ones wait.

    Args:
        lengths: the lengths of the prompts, by their numbers.
        max_new_tokens: the tokens of an answer, at most.
        batch_size: the prompts of a batch, at most.
        num_slots: the tokens of a batch, at most; one prompt is always answered.
    """
    waiting: list[int] = []
    for index in sorted(lengths, key=lengths.__getitem__):
        if waiting and (
            len(waiting) == batch_size
            or (len(waiting) + 1) * (lengths[index] + max_new_tokens) > num_slots
        ):
            yield waiting
            waiting = []
        waiting.append(index)
    if waiting:
        yield waiting


@dataclass
class Server:
    """A server that speaks OpenAI's protocol: vLLM, llama.cpp, TGI, ….

    Attributes:
        base_url: the server's address, up to `/v1`.
        model: the target's name there.
        max_new_tokens: the tokens of an answer, at most.
        batch_size: the requests that are open at a time.
        temperature: the temperature of sampling; 0 is greedy.
        seed: the seed of sampling, to which the prompt's number is added.
        api_key: the key, if the server wants one; it goes nowhere else.
        tokenizer, context: None, for they are not known here.
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

    def __post_init__(self) -> None:
        import openai  # an extra, which is missed before files are touched

        self.openai = openai
        self.api_key = (self.api_key or "").strip()
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("The server's key has characters that no header can have.")
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"The server's address {self.base_url!r} has no http:// or https://.")
        try:
            self.client = openai.OpenAI(
                base_url=self.base_url,
                api_key=self.api_key or "none",
                timeout=PATIENCE,
                max_retries=RETRIES,
            )
        except Exception as error:  # InvalidURL, of whatever HTTP package it uses
            raise ValueError(f"The server's address {self.base_url!r} is none: {error}") from None
        # the environment's are for another server
        self.client.organization = self.client.project = None
        self.client._custom_headers = {}

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Return True for any prompt: only the server knows its context."""
        return True

    def settings(self) -> dict[str, Any]:
        """Collect the settings that decide the answers."""
        return {
            "target": self.model,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "drawn": [self.seed] if self.temperature > 0 else None,
        }

    def answers(
        self, rows: Mapping[int, Mapping[str, Any]], done: set[int]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Implement `Target.answers`.

        Raises:
            OSError: the server refuses, or does not answer.
        """
        with ThreadPoolExecutor(self.batch_size) as pool:
            asked = {
                pool.submit(self._ask, index, row): index
                for index, row in rows.items()
                if index not in done
            }
            failure: BaseException | None = None
            refused: list[int] = []
            # if all are refused, it may be the call that is wrong, or the server has changed
            takes_prompts = not done.isdisjoint(rows) or (bool(done) and len(rows) < MANY)
            try:
                for future in as_completed(asked):
                    if future.cancelled():
                        continue
                    if (error := future.exception()) is not None:
                        # requests under way are waited for, and no more are sent
                        failure = failure or error
                        for other in asked:
                            other.cancel()
                    elif (row := future.result()) is None:
                        refused.append(asked[future])
                    else:
                        takes_prompts = True
                        yield asked[future], row
                    while takes_prompts and refused:
                        index = refused.pop()
                        yield index, answered(rows[index], {"content": ""}, False)
            finally:
                pool.shutdown(cancel_futures=True)
        if failure is not None:
            raise failure
        if refused:
            raise OSError(
                f"{self.base_url} refuses every prompt, as the warnings say: look at --target "
                "and the options."
            )

    def _ask(self, index: int, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """Ask for one answer, and make its row; None if the server refuses the prompt."""
        turns: Any = [
            {name: turn[name] for name in SENT if name in turn} for turn in row["messages"]
        ]
        try:
            reply = self.client.chat.completions.create(
                model=self.model,
                messages=turns,
                max_tokens=self.max_new_tokens,
                temperature=self.temperature,
                seed=self.seed + index,
                extra_headers={} if self.api_key else {"Authorization": self.openai.Omit()},
                **({"tools": row["tools"]} if "tools" in row else {}),
            ).choices[0]
            choice = reply.to_dict(warnings=False)
            check_depth(choice["message"])
            message, reason = choice["message"], choice["finish_reason"]
            calls = message.get("tool_calls")
            text = message.get("content") if calls else message["content"]
            if text is None and not calls:
                text = ""
            said = {"reasoning_content": thought_of(message), "tool_calls": calls}
            turns_of([{"role": "assistant", "content": text, **said}])
            if (
                isinstance(text, list)
                or not isinstance(calls, list | None)
                or not isinstance(reason, str | None)
            ):
                raise ValueError("content, tool_calls or finish_reason is not the protocol's")
            if not all(isinstance(call["function"]["name"], str) for call in calls or ()):
                raise ValueError("it calls a tool without a name")
        except self.openai.BadRequestError as error:  # this prompt's own: it is too long, say
            logger.warning(
                "%s refuses prompt %d: %s", self.base_url, index + 1, self._reason(error)
            )
            return None
        except Exception as error:  # a foreign server fails in many ways
            raise OSError(
                f"{self.base_url.rstrip('/')}/chat/completions did not answer prompt {index + 1} "
                f"({self._reason(error)}). What it has answered is kept: the same call goes on."
            ) from error
        # all of its tokens may have gone into thoughts
        whole = reason in ("stop", "tool_calls") and bool(text or calls)
        more = {name: value for name, value in said.items() if value}
        return answered(row, {"content": text, **more}, whole)

    def _reason(self, error: Exception) -> str:
        """Describe in some words why a request failed."""
        text, cause = str(error), error.__cause__
        if isinstance(error, self.openai.APIStatusError):
            text = f"Error code: {error.status_code} - {error.response.text}"
        elif isinstance(error, self.openai.APIConnectionError):
            text = f"{type(cause).__name__}: {cause}"
        elif not isinstance(error, self.openai.OpenAIError | ValueError):  # of a look at its reply
            text = f"the reply is no completion, {text}"
        return f"{type(error).__name__}: {text[:200]}"
