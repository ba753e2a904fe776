"""Prompt tokens inserted at many positions of a text: their rows, their guesses in one forward, and
how often these are right (PPD, sections 4.3 and 4.4).
"""

from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import PeftModel
from torch import BoolTensor, LongTensor, Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ...decoding.tree_attention import additive, attention_windows
from ...outer_names import keeps_logits
from ...training.rows import IGNORED, ChoosingCollator
from .adapter import check_takes_masks, prompt_embedding
from .drafting import MAX_RANKS

LEAST_POINTS = 50
POINTS, BATCH_SIZE = 32, 4  # the most places in each text, and texts in a forward


def insertion_points(
    length: int, num_prompt_tokens: int, count: int, generator: torch.Generator | None = None
) -> LongTensor:
    """Draw random positions where prompts are inserted, `count` or all that there are.

    Each has m + 1 tokens after it.

    Args:
        length: the text's length, n.
        num_prompt_tokens: m.
        count: the most points.
        generator: the source of random choices.

    Returns:
        int64 `(P,)`, sorted; prompt `i` (from 0) after point `t` stands at position `t + i + 1` and
        guesses the same token as the text's row there.
    """
    possible = max(0, length - num_prompt_tokens - 1)
    return torch.randperm(possible, generator=generator)[:count].sort().values


def prompt_rows(
    text: LongTensor, points: LongTensor, num_prompt_tokens: int, num_ensembles: int
) -> tuple[LongTensor, BoolTensor]:
    """Lay out the rows of texts with prompts after `points`: positions and attention mask.

    The texts' rows come first, in any order, then for each point its m·E prompts, the E of one
    prompt together. A text row sees the text up to itself; a prompt sees the text up to its point
    and the prompts of its own ensemble before it, and itself.

    Args:
        text: int64 `(B, n)`, positions of the texts' rows.
        points: int64 `(B, P)`.
        num_prompt_tokens: m.
        num_ensembles: E.

    Returns:
        Positions int64 `(B, R)` with `R = n + P·m·E`; and a mask, bool `(B, R, R)`, True = may
        attend.
    """
    per_point = num_prompt_tokens * num_ensembles
    prompt = torch.arange(points.shape[1] * per_point, device=text.device)
    anchors = points.repeat_interleave(per_point, dim=1)
    positions = torch.cat([text, anchors + 1 + prompt % per_point // num_ensembles], dim=1)
    last_seen = torch.cat([text, anchors], dim=1)[:, :, None]  # of the text
    # Prompts that see each other: those of one ensemble after one point. Text rows are of none, -1.
    lane = F.pad(
        prompt // per_point * num_ensembles + prompt % num_ensembles, (text.shape[1], 0), value=-1
    )
    is_text = lane < 0
    sees_text = is_text & (positions[:, None] <= last_seen)
    sees_prompts = (
        ~is_text & (lane[:, None] == lane) & (positions[:, None] <= positions[:, :, None])
    )
    return positions, sees_text | sees_prompts


class PromptCollator(ChoosingCollator):
    """A collator of encoded samples to a padded batch of texts with their insertion points.

    Args:
        num_prompt_tokens: m.
        points: the most points in each text.
        seed: the seed of their choice.
    """

    def __init__(self, num_prompt_tokens: int, points: int, seed: int = 0):
        super().__init__(num_prompt_tokens, seed)
        self.points = points

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Make a batch: texts padded on the right, and points padded with -1.

        Returns:
            `input_ids` int64 `(B, n)` and `points` int64 `(B, P)`, positions of labelled tokens or
            the one before.
        """
        ids = pad_sequence(
            [torch.tensor(sample["input_ids"]) for sample in samples], batch_first=True
        )
        points = []
        for sample in samples:
            # A chat's prompt is never written, so there is nothing to guess in it.
            first = next(t for t, label in enumerate(sample["labels"]) if label != IGNORED)
            begin = max(0, first - 1)
            text_points = begin + insertion_points(
                len(sample["input_ids"]) - begin, self.count, self.points, self.generator(sample)
            )
            points.append(F.pad(text_points, (0, self.points - len(text_points)), value=-1))
        return {"input_ids": ids, "points": torch.stack(points)}


def forward_with_prompts(
    forward: Callable, base: PreTrainedModel, ids: LongTensor, points: LongTensor
) -> tuple[Tensor, Tensor, LongTensor, BoolTensor]:
    """Insert an adapter's prompts after every point and run the model once.

    Texts are asked at different places, while a model's head is run on the same rows of all of
    them. So each text's rows are put in another order, those that are asked last; masks and
    positions go along, and nothing else changes.

    Args:
        forward: the model to call, as it may be wrapped for training.
        base: the model itself, with an active adapter.
        ids: int64 `(B, n)`.
        points: int64 `(B, P)`, -1 for none.

    Returns:
        For the T points there are: the prompts' guesses and their teachers, logits float32 `(T, m,
        V)`, the latter without gradient, the texts' own tokens `(T, m)`, and whether the token
        directly after is the model's own choice, `(T,)`.
    """
    embedding = prompt_embedding(base)
    config, length = embedding.config(), ids.shape[1]
    m, e = config.num_prompt_tokens, config.num_ensembles
    there = points >= 0
    row = there.nonzero()[:, :1]  # (T, 1), which text
    # (T, m + 1), positions in it
    column = points[there][:, None] + torch.arange(m + 1, device=ids.device)
    asked = torch.zeros_like(ids, dtype=torch.bool)
    asked[row, column] = True
    order = asked.int().argsort(dim=1, stable=True)  # (B, n)
    new_column = order.argsort(dim=1)[row, column]
    # K rows of every text: those that are asked, and some before them where others have more
    max_asked = int(asked.sum(1).max())
    positions, sees = prompt_rows(order, points.clamp(min=0), m, e)
    texts = embedding.base_layer(ids.gather(1, order))
    prompts = embedding.prompts().repeat(points.shape[1], 1).expand(len(ids), -1, -1)
    apart = positions[:, :, None] - positions[:, None]
    masks = {
        kind: additive(sees if window is None else sees & (apart < window), texts.dtype)[:, None]
        for kind, window in attention_windows(base).items()
    }
    heads = max_asked + prompts.shape[1]
    few = {"logits_to_keep": heads} if keeps_logits(base) else {}
    logits = forward(
        inputs_embeds=torch.cat([texts, prompts.to(texts.dtype)], dim=1),
        attention_mask=masks.popitem()[1] if len(masks) == 1 else masks,
        position_ids=positions,
        use_cache=False,
        **few,
    ).logits
    logits = logits[:, -heads:]
    said = logits[row, new_column - (length - max_asked)].detach().float()
    guesses = logits[:, max_asked:].unflatten(1, (points.shape[1], m, e))[there].float().mean(2)
    following = ids[row, column + 1]
    return guesses, said[:, 1:], following[:, 1:], said[:, 0].argmax(-1) == following[:, 0]


def rank_counts(
    guesses: Tensor, teachers: Tensor, tokens: Tensor, begins: Tensor, ranks: int
) -> tuple[Tensor, Tensor]:
    """Count right guesses where they would be judged.

    A guess at distance `d` counts only if the text up to there is the model's own, and if all
    guesses before it held the right token among their first ones, for no tree gets there otherwise.

    Args:
        guesses, teachers: logits `(T, m, V)`, from `forward_with_prompts`.
        tokens: int64 `(T, m)`, of the text.
        begins: bool `(T,)`, whether the token directly after the point is the model's own.
        ranks: R.

    Returns:
        Hits `(m, R)` and tries `(m,)`, float64.
    """
    chosen = teachers.argmax(-1)
    hits = guesses.topk(ranks, dim=-1).indices == chosen[..., None]
    follows = torch.nn.functional.pad(
        ((chosen == tokens) & hits.any(-1))[:, :-1].cumprod(1), (1, 0), value=1
    ).bool()
    follows &= begins[:, None]
    return (hits & follows[..., None]).double().sum(0).cpu(), follows.double().sum(0).cpu()


@torch.no_grad()
def calibrate(model: PeftModel, samples: Dataset) -> list[list[float]]:
    """Measure how often the active adapter's guesses are right, and set that in its config.

    The shares are `a[d][r]`, by distance and rank.

    Args:
        model: a model with an active PPD adapter.
        samples: encoded rows that the adapter was not trained on, best answered by the model
            itself.

    Raises:
        ValueError: a model that takes no masks, or too few places to count at.
    """
    base = model.get_base_model()
    check_takes_masks(base)
    model.eval()
    config = prompt_embedding(base).config()
    ranks = min(MAX_RANKS, config.vocab_size)
    collator = PromptCollator(config.num_prompt_tokens, POINTS)
    hits = torch.zeros(config.num_prompt_tokens, ranks)
    tries = torch.zeros(config.num_prompt_tokens)
    own = torch.Generator()  # the caller's seed stays as it is
    order = torch.tensor(list(samples["length"])).argsort(stable=True).tolist()
    batches = DataLoader(samples, BATCH_SIZE, sampler=order, collate_fn=collator, generator=own)
    for batch in tqdm(batches, desc="calibrate", leave=False):
        ids, points = (batch[name].to(base.device) for name in ("input_ids", "points"))
        more = rank_counts(*forward_with_prompts(base, base, ids, points), ranks)
        hits, tries = hits + more[0], tries + more[1]
    if tries[0] < LEAST_POINTS:
        raise ValueError(
            f"Only {int(tries[0])} places to count at: give more or longer rows ({LEAST_POINTS} "
            "places at least)."
        )
    rates = (hits / tries[:, None].clamp(min=1)).tolist()
    config.accuracy = [[round(rate, 5) for rate in falling(row)] for row in rates]
    return config.accuracy


def falling(rates: list[float]) -> list[float]:
    """Fit the falling row that is nearest to `rates`, by isotonic regression.

    A tree needs chances that fall with the rank. The value at a place is the least, over all
    beginnings up to it, of the greatest mean from there to an end after it.
    """
    count = len(rates)
    return [
        min(
            max(fmean(rates[begin:end]) for end in range(place + 1, count + 1))
            for begin in range(place + 1)
        )
        for place in range(count)
    ]
