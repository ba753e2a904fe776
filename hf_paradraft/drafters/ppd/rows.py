"""Prompt tokens inserted at many positions of a text, all trained in one forward (PPD, section
4.4).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import BoolTensor, LongTensor, Tensor
from torch.nn.utils.rnn import pad_sequence


def insertion_points(
    length: int, num_prompt_tokens: int, count: int, generator: torch.Generator | None = None
) -> LongTensor:
    """Draw random positions where prompts are inserted, `count` or all that there are.

    Each has m + 1 tokens after it.

    Args:
        length: of the text, n.
        num_prompt_tokens: m.
        count: at most.
        generator: of the choice.

    Returns:
        int64 `(P,)`, sorted; prompt `i` (from 0) after point `t` stands at position `t + i + 1` and
        guesses what the text's row there does.
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
            generator = torch.Generator().manual_seed(
                hash((self.seed, self.epoch, *sample["input_ids"])) % 2**63
            )
            # A chat's prompt is never written, so there is nothing to guess in it.
            begin = max(0, next(t for t, label in enumerate(sample["labels"]) if label != -100) - 1)
            text_points = begin + insertion_points(
                len(sample["input_ids"]) - begin, self.m, self.points, generator
            )
            points.append(F.pad(text_points, (0, self.points - len(text_points)), value=-1))
        return {"input_ids": ids, "points": torch.stack(points)}
