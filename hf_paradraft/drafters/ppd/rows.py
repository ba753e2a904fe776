"""Prompt tokens inserted at many positions of a text, all trained in one forward (PPD, section 4.4)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import BoolTensor, LongTensor, Tensor


def insertion_points(length: int, num_prompt_tokens: int, count: int, generator: torch.Generator | None = None) -> LongTensor:
    """Where prompts are inserted: `count` random positions (or all there are) that have m + 1 tokens behind them.

    Args:
        length: of the text, n.
        num_prompt_tokens: m.
        count: at most.
        generator: of the choice.

    Returns:
        int64 `(P,)`, sorted; prompt `i` (from 0) behind point `t` stands at position `t + i + 1` and guesses what the text's row
        there does.
    """
    possible = max(0, length - num_prompt_tokens - 1)
    return torch.randperm(possible, generator=generator)[:count].sort().values


def prompt_rows(length: int, points: LongTensor, num_prompt_tokens: int, num_ensembles: int) -> dict[str, Tensor]:
    """The rows of one text of `length` tokens with prompts behind `points`.

    The text's rows come first, then for each point its m·E prompts, the E of one prompt together. A text row sees the text up to
    itself; a prompt sees the text up to its point and the prompts of its own ensemble before it, and itself.

    Args:
        length: n.
        points: int64 `(P,)`.
        num_prompt_tokens: m.
        num_ensembles: E.

    Returns:
        `position_ids` int64 `(R,)` with `R = n + P·m·E`; `attention_mask` bool `(R, R)`, True = may attend; `prompts` int64
        `(P·m·E,)`, which prompt each of those rows is; `teachers` int64 `(P, m)`, the text row whose distribution each guess
        should have.
    """
    m, e = num_prompt_tokens, num_ensembles
    index = torch.arange(m * e)
    distance, ensemble = index // e, index % e
    teachers = points[:, None] + torch.arange(1, m + 1)
    positions = torch.cat([torch.arange(length), (points[:, None] + 1 + distance).flatten()])
    point = torch.cat([torch.arange(length), points.repeat_interleave(m * e)])  # how far into the text a row sees
    group = torch.cat([torch.full((length,), -1), torch.arange(len(points)).repeat_interleave(m * e)])
    lane = torch.cat([torch.full((length,), -1), ensemble.repeat(len(points))])
    text = group < 0
    sees_text: BoolTensor = text[None] & (positions[None] <= point[:, None])
    sees_prompts = (group[:, None] == group) & (lane[:, None] == lane) & (positions[None] <= positions[:, None]) & ~text[None]
    return {
        "position_ids": positions,
        "attention_mask": sees_text | (sees_prompts & ~text[:, None]),
        "prompts": index.repeat(len(points)),
        "teachers": teachers,
    }


class PromptCollator:
    """Encoded samples to a padded batch of texts with their insertion points.

    Args:
        num_prompt_tokens: m.
        points: at most, in each text.
        seed: of the choice; the same sample in the same epoch always gets the same points.
    """

    def __init__(self, num_prompt_tokens: int, points: int, seed: int = 0):
        self.m, self.points, self.seed, self.epoch = num_prompt_tokens, points, seed, 0

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Texts padded on the right, and points padded with -1.

        Returns:
            `input_ids` int64 `(B, n)` and `points` int64 `(B, P)`, positions of labelled tokens or the one before.
        """
        width = max(len(sample["input_ids"]) for sample in samples)
        ids = [F.pad(torch.tensor(sample["input_ids"]), (0, width - len(sample["input_ids"]))) for sample in samples]
        points = []
        for sample in samples:
            generator = torch.Generator().manual_seed(hash((self.seed, self.epoch, *sample["input_ids"])) % 2**63)
            # A chat's prompt is never written, so there is nothing to guess in it.
            begin = max(0, next(t for t, label in enumerate(sample["labels"]) if label != -100) - 1)
            text_points = begin + insertion_points(len(sample["input_ids"]) - begin, self.m, self.points, generator)
            points.append(F.pad(text_points, (0, self.points - len(text_points)), value=-1))
        return {"input_ids": torch.stack(ids), "points": torch.stack(points)}
