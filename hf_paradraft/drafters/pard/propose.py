"""One forward, K guesses: the new tokens, then K - 1 masks (PARD, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import LongTensor, Tensor
from transformers import (
    Cache,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils import logging

from ...decoding import Draft, Prefix
from ...decoding.cache import RaggedCache, check_forgets, empty_cache, takes, use_plain_layers
from ...decoding.compiled import compiled_forward, static_cache
from ...decoding.recurrent import check_continues
from ...decoding.states import MOST_UNREAD, copy_states, end_windows, is_recurrent, put_back
from ...decoding.tree_attention import TreeAttention, attention_windows, or_sdpa
from ...trees import best_first_tree, sampled_tree

if TYPE_CHECKING:
    from .model import PardDrafter

logger = logging.get_logger(__name__)

STATELESS = (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def draft_logits(drafter: PardDrafter, ids: LongTensor, cache: Cache, num_draft_tokens: int) -> Tensor:
    """Logits for the next K tokens; afterwards the cache holds `ids`, or some leading tokens of it where layers are recurrent.

    Args:
        drafter: run once, or twice where many tokens wait to be read behind a recurrent state.
        ids: int64 `(1, n)` on the drafter's device, the whole prefix.
        cache: holds fewer than `n` leading tokens of it, and no masks.
        num_draft_tokens: K, at least 1.

    Returns:
        `(K, V)` in the drafter's dtype; row `d` guesses the token at distance `d + 1`. `(1, V)` behind a recurrent drafter's
        very first token.
    """
    vocab_size = drafter.get_input_embeddings().num_embeddings
    known, recurrent = cache.get_seq_length(), is_recurrent(cache)
    new = ids[:, known:].where(ids[:, known:] < vocab_size, drafter.mask_token_id)

    def read(fed: LongTensor, logits_to_keep: int) -> Tensor:
        positions = torch.arange(known, known + fed.shape[1], device=fed.device)[None]
        inputs = {"input_ids": fed, "position_ids": positions, "past_key_values": cache, "use_cache": True}
        return drafter(**inputs, logits_to_keep=logits_to_keep).logits[0]

    if recurrent and new.shape[1] > (MOST_UNREAD if known else 1):
        read(new[:, :-1], 1)
        end_windows(cache)
        known, new = ids.shape[1] - 1, new[:, -1:]
    if recurrent and known == 0:
        num_draft_tokens = 1  # there is no state yet that could be put back
    fed = torch.cat([new, ids.new_tensor([drafter.mask_ids(num_draft_tokens - 1)])], dim=1)
    states = copy_states(cache)
    logits = read(fed, num_draft_tokens)
    if not recurrent:
        cache.crop(1 - num_draft_tokens)
    elif num_draft_tokens > 1:
        put_back(cache, states, fed.shape[1])
    else:
        end_windows(cache)
    return logits


def check_drafts(model: PreTrainedModel) -> None:
    """Refuse a model that cannot draft, whatever it was taught.

    Raises:
        ValueError: it cannot forget masks that it has read.
    """
    if attention_windows(model) is not None:
        return
    check_forgets(model)
    if not takes(type(model), "past_key_values"):
        raise ValueError(f"{type(model).__name__} has no attention layers, so nothing counts what it has read: it cannot draft.")
    if is_recurrent(empty_cache(model)):
        check_continues(model, "past_key_values")


def _stateless(logits_processor: LogitsProcessorList) -> list[LogitsProcessor]:
    return [processor for processor in logits_processor if isinstance(processor, STATELESS)]


def sequential_choice(
    logits: Tensor, ids: LongTensor, logits_processor: LogitsProcessorList, do_sample: bool
) -> tuple[LongTensor, Tensor]:
    """Choose one token per row, each row warped as if the earlier choices were the text.

    Only warpers without a memory are used: drafts may come from any distribution, but a processor that remembers its calls must
    see those of plain decoding alone.

    Args:
        logits: `(K, V)`.
        ids: int64 `(1, n)`, the prefix.
        logits_processor: the target's.
        do_sample: draw from the processed distribution, or take its maximum.

    Returns:
        Tokens int64 `(K,)` and the warped scores, float32 `(K, V)`.
    """
    rows = []
    length = ids.shape[1]
    warpers = _stateless(logits_processor)
    for row in logits.float().split(1):
        for warper in warpers:
            row = warper(ids, row)
        token = torch.multinomial(row.softmax(-1), 1) if do_sample else row.argmax(-1, keepdim=True)
        ids = torch.cat([ids, token], dim=1)
        rows.append(row)
    return ids[0, length:], torch.cat(rows)


class PardDrafting:
    """One call's drafting: a cache over the prefixes, refilled when the drafter's context runs out.

    Args:
        drafter: shared with other calls; nothing of it changes.
        max_length: tokens of a row at most.
    """

    def __init__(self, drafter: PardDrafter, max_length: int):
        self.drafter, self.max_length = drafter, max_length
        self.context = getattr(drafter.config.get_text_config(), "max_position_embeddings", None)
        self.windows = attention_windows(drafter)
        config = drafter.speculation_config
        self.compiled = config.compile and self.windows is not None
        self.num_draft_tokens = config.num_draft_tokens
        self.cache: RaggedCache | Cache | None = None
        self.begins: list[int] = []  # of each row, the first token that the cache knows
        self.known: list[int] = []  # of each row, the tokens before this one are in the cache

    def propose(self, prefixes: list[Prefix]) -> list[Draft]:
        """For each row a chain of at most `prefix.room` tokens, or a tree as deep; empty where the context is too short."""
        rows = [prefix.ids[0].to(self.drafter.device) for prefix in prefixes]
        room = self.num_draft_tokens if self.compiled else max(prefix.room for prefix in prefixes)
        self.begins = self.begins or [0] * len(rows)
        if self.context is not None:
            room = min(room, self.context // 2)
            if any(len(ids) - begin + room > self.context for ids, begin in zip(rows, self.begins, strict=True)):
                # Keep the newer half, and go on from there.
                self.begins = [max(begin, len(ids) - self.context // 2) for ids, begin in zip(rows, self.begins, strict=True)]
                self.cache = None
        if room < 1:
            return [Draft.chain(prefix.ids[0, :0]) for prefix in prefixes]
        logits = self._guess(rows, room, prefixes)
        self.known = [len(ids) for ids in rows]
        drafts = [self._choose(row, prefix) for row, prefix in zip(logits, prefixes, strict=True)]
        auto = self.drafter.speculation_config.tree_size == "auto" and prefixes[0].branches and not prefixes[0].sampled
        return prefixes[0].pace.cut(drafts) if auto else drafts

    def observe(self, outputs: Any, paths: list[list[int] | None]) -> None:
        """Nothing: the accepted tokens come back with the next prefixes."""

    def _guess(self, rows: list[LongTensor], room: int, prefixes: list[Prefix]) -> Sequence[Tensor]:
        """Logits `(K, V)` for what follows each row, K being `room`."""
        if self.windows is None:
            return self._read_as_usual(rows, room)
        logits = None
        if self.cache is not None:
            logits = self._read_new([ids[known:] for ids, known in zip(rows, self.known, strict=True)], room)
        if logits is None:
            logits = self._read_prefixes([ids[begin:] for ids, begin in zip(rows, self.begins, strict=True)], room)
        return logits

    def _fed(self, rows: list[LongTensor], num_draft_tokens: int, longest: int) -> tuple[LongTensor, LongTensor]:
        """The rows' ids `(B, longest + K - 1)`, padded on the left, with masks behind; and how long each row's padding is."""
        vocab_size = self.drafter.get_input_embeddings().num_embeddings
        fed = rows[0].new_full((len(rows), longest + num_draft_tokens - 1), self.drafter.mask_token_id)
        fed[:, longest:] = fed.new_tensor(self.drafter.mask_ids(num_draft_tokens - 1))
        for index, ids in enumerate(rows):
            fed[index, longest - len(ids) : longest] = ids.where(ids < vocab_size, self.drafter.mask_token_id)
        return fed, torch.tensor([longest - len(ids) for ids in rows], device=fed.device)[:, None]

    def _forward(self, cache: Cache, num_draft_tokens: int, compiled: bool = False, **inputs: Any) -> Tensor:
        forward = compiled_forward(self.drafter) if compiled else self.drafter
        return forward(past_key_values=cache, use_cache=True, logits_to_keep=num_draft_tokens, **inputs).logits

    def _read_as_usual(self, rows: list[LongTensor], num_draft_tokens: int) -> Tensor:
        """For models that take no explicit masks; logits `(1, K, V)`."""
        if len(rows) > 1:
            raise ValueError(
                f"{type(self.drafter).__name__} as it is loaded here takes no explicit masks, so it drafts for one prompt at a "
                f"time: call generate once per prompt{or_sdpa(self.drafter)}."
            )
        self.cache = self.cache or self.drafter.new_cache()
        return draft_logits(self.drafter, rows[0][None, self.begins[0] :], self.cache, num_draft_tokens)[None]

    def _read_prefixes(self, rows: list[LongTensor], num_draft_tokens: int) -> Tensor:
        """Fill a new cache; logits `(B, K, V)`."""
        length = max(map(len, rows))
        fed, padding = self._fed(rows, num_draft_tokens, length)
        slots = torch.arange(fed.shape[1], device=fed.device)[None]
        seen = slots >= padding
        if self.compiled:
            cache = static_cache(self.drafter, self.max_length + 2 * num_draft_tokens + 2)
        else:
            cache = self.drafter.new_cache()
            use_plain_layers(cache, 0)
        self.cache = RaggedCache(cache, len(rows), length)
        self.attention = TreeAttention(self.windows, seen[:, :length], length - 1 - padding[:, 0], self.drafter.dtype)
        logits = self._forward(
            cache,
            num_draft_tokens,
            input_ids=fed,
            attention_mask=None if bool(seen.all()) else seen.long(),
            position_ids=(slots - padding).clamp(min=0),
        )
        self.cache.keep([[]] * len(rows), num_draft_tokens - 1)
        return logits

    def _read_new(self, rows: list[LongTensor], num_draft_tokens: int) -> Tensor | None:
        """Read what was accepted since; logits `(B, K, V)`, or None where a static cache has no room for it."""
        usual = num_draft_tokens + 1  # after a round in which every draft was accepted
        longest = max(map(len, rows))
        compiled = self.compiled and longest <= usual
        fed, padding = self._fed(rows, num_draft_tokens, usual if compiled else longest)
        size = fed.shape[1]
        if self.cache.num_slots is not None and self.cache.end + size > self.cache.num_slots:
            return None
        depths = torch.arange(size, device=fed.device) - padding
        # A row sees the new tokens and masks before it, padding only itself.
        sees = ((depths[:, None] >= 0) & (depths[:, None] <= depths[:, :, None])) | torch.eye(
            size, dtype=torch.bool, device=fed.device
        )
        mask, positions = self.attention.inputs(self.cache.lengths, sees, depths.clamp(min=0), self.cache.num_slots)
        logits = self._forward(
            self.cache.cache, num_draft_tokens, compiled, input_ids=fed, attention_mask=mask, position_ids=positions
        )
        longest = size - num_draft_tokens + 1
        self.cache.keep([list(range(longest - len(ids), longest)) for ids in rows], size)
        return logits

    def _choose(self, logits: Tensor, prefix: Prefix) -> Draft:
        """One row's draft from its logits `(K, V)`; none from logits that are no numbers."""
        width = min(logits.shape[-1], prefix.vocab_size)
        logits = logits[: prefix.room, :width].to(prefix.ids.device)
        best, tokens = logits.max(-1)
        if prefix.room == 0 or bool(best.isnan().any()):
            if prefix.room:
                logger.warning_once("The drafter's logits are not numbers: going on without drafts where they are not.")
            return Draft.chain(prefix.ids[0, :0])
        tree_size = self.drafter.speculation_config.tree_size
        if prefix.branches and tree_size == "auto" and not prefix.sampled:
            return best_first_tree(logits, prefix.pace.most_nodes, prefix.pace.factors[1 : 1 + len(logits)])
        if prefix.branches and tree_size is not None and not prefix.sampled:
            return best_first_tree(logits, tree_size)
        if not prefix.sampled:
            return Draft.chain(tokens)
        logits = torch.nn.functional.pad(logits.float(), (0, prefix.vocab_size - width), value=-torch.inf)
        if prefix.branches and isinstance(tree_size, int):
            for warper in _stateless(prefix.logits_processor):
                logits = warper(prefix.ids.expand(len(logits), -1), logits)
            return sampled_tree(logits.softmax(-1), tree_size)
        tokens, scores = sequential_choice(logits, prefix.ids, prefix.logits_processor, True)
        return Draft.chain(tokens, scores.softmax(-1))
