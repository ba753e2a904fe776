"""Training rows: every text seen as K prediction tasks at once (PARD, section 3.3; COD, section
3.4).

Row `(d, t)` has the id of token `t` (`d = 0`) or the mask (`d > 0`), position `t`, and the label
`x[t + 1]`. It stands for the draft of `x[t + 1]` when the real tokens end at `t - d`, so it attends
to the real tokens `s <= t - d` and to its own chain of masks `(1, t - d + 1), …, (d, t)`.

Worked example, K = 3: row `(2, 5)` sees the real tokens 0 … 3, the mask `(1, 4)` and itself.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import BoolTensor, LongTensor, Tensor
from torch.nn.utils.rnn import pad_sequence

IGNORED = -100  # the label of tokens that are not to be learned
# numbers of rows are multiples of it: for each new one a CPU compiles kernels, and keeps them
SHAPES = 64


class ChoosingCollator:
    """The base of collators whose random choices are the same for a sample in an epoch.

    Args:
        count: K, the depths of guesses.
        seed: the seed of the choices.

    Attributes:
        epoch: the number of the epoch, set by the trainer.
    """

    def __init__(self, count: int, seed: int):
        self.count, self.seed, self.epoch = count, seed, 0

    def generator(self, sample: dict[str, Any]) -> torch.Generator:
        """Make the generator of a sample's choices."""
        seed = hash((self.seed, self.epoch, *sample["input_ids"])) % 2**63
        return torch.Generator().manual_seed(seed)


def cod_keep_mask(
    seq_len: int,
    num_depths: int,
    ratio: float,
    min_ratio: float,
    generator: torch.Generator | None = None,
) -> BoolTensor:
    """Choose the rows to train on by conditional output dropping.

    Depth `d` keeps `⌊N · max(ratio^d, min_ratio)⌋` positions (or as many as there are) out of those
    whose whole chain is kept: `t` only if `t - 1` is kept at depth `d - 1`. Depth 0 keeps
    everything.

    Args:
        seq_len: N, the tokens of the text.
        num_depths: K, the tokens guessed.
        ratio: r, in (0, 1].
        min_ratio: r_min, in (0, 1].
        generator: the generator of the random choice.

    Returns:
        bool `(num_depths, seq_len)`.

    Raises:
        ValueError: an argument out of range.
    """
    for name, value in (("ratio", ratio), ("min_ratio", min_ratio)):
        if not 0 < value <= 1:
            raise ValueError(f"COD {name} must be in (0, 1], but is {value}.")
    if num_depths < 1 or seq_len < 1:
        raise ValueError(
            f"num_depths and seq_len must be at least 1, but are {num_depths} and {seq_len}."
        )
    keep = torch.zeros(num_depths, seq_len, dtype=torch.bool)
    keep[0] = True
    for depth in range(1, num_depths):
        candidates = keep[depth - 1, :-1].nonzero()[:, 0] + 1
        wanted = int(seq_len * max(ratio**depth, min_ratio))
        keep[depth, candidates[torch.randperm(len(candidates), generator=generator)[:wanted]]] = (
            True
        )
    return keep


def places_in(vocabulary: LongTensor, ids: LongTensor) -> LongTensor:
    """Look up ids in a vocabulary: their places in it, -100 for all others.

    Args:
        vocabulary: int64 `(V',)`, in any order.
        ids: int64 `(…)`.
    """
    rising = vocabulary.argsort()
    found = torch.searchsorted(vocabulary, ids, sorter=rising).clamp(max=len(vocabulary) - 1)
    places = rising[found]
    return torch.where(vocabulary[places] == ids, places, IGNORED)


def useful_rows(keep: BoolTensor, labels: LongTensor) -> BoolTensor:
    """Leave out masks without a label that no kept row with a label attends to.

    Such rows teach nothing.

    Args:
        keep: bool `(K, N)`.
        labels: int64 `(N,)`, -100 where a token is not to be learned; `labels[t]` belongs to token
            `t`.

    Returns:
        bool `(K, N)`; the loss over it is the loss over `keep`.
    """
    labelled = torch.zeros_like(keep[0])
    labelled[:-1] = labels[1:] != IGNORED
    useful = torch.empty_like(keep)
    needed = torch.zeros_like(labelled)  # position t + 1 of the next depth is useful
    for depth in reversed(range(1, len(keep))):
        useful[depth] = keep[depth] & (labelled | needed)
        needed = torch.zeros_like(labelled)
        needed[:-1] = useful[depth, 1:]
    useful[0] = keep[0]
    return useful


def may_attend(
    depth: Tensor, position: Tensor, other_depth: Tensor, other_position: Tensor
) -> BoolTensor:
    """Tell whether row `(depth, position)` attends to row `(other_depth, other_position)`.

    All four are integer tensors that broadcast. Padding, of depth -1, attends to nothing, and
    nothing to it.
    """
    # the last real token that the row knows
    start = (position - depth).where(depth >= 0, -1)
    real = (other_depth == 0) & (other_position <= start)
    chain = (other_depth > 0) & (other_depth <= depth) & (other_position - other_depth == start)
    return real | chain


def draft_rows(
    input_ids: LongTensor, labels: LongTensor, mask_token_id: int, keep: BoolTensor
) -> dict[str, Tensor]:
    """Make the rows of `parallel_draft_rows`, with `depths` instead of the mask.

    `depths` is int64 `(R,)`; `may_attend` computes the mask from it and the positions.
    """
    if input_ids.ndim != 1 or labels.shape != input_ids.shape or keep.shape[1:] != input_ids.shape:
        raise ValueError(
            f"input_ids and labels must be (N,) and keep (K, N), but are {tuple(input_ids.shape)}, "
            f"{tuple(labels.shape)} and {tuple(keep.shape)}."
        )
    depth, position = keep.nonzero(as_tuple=True)
    following = torch.cat([labels[1:], labels.new_full((1,), IGNORED)])
    return {
        "input_ids": torch.where(depth == 0, input_ids[position], mask_token_id),
        "position_ids": position,
        "labels": following[position],
        "depths": depth,
    }


def parallel_draft_rows(
    input_ids: LongTensor, labels: LongTensor, mask_token_id: int, keep: BoolTensor
) -> dict[str, Tensor]:
    """Make the kept training rows of one text, depth-major: all of depth 0, then of depth 1, ….

    Args:
        input_ids: int64 `(N,)`.
        labels: int64 `(N,)`; `labels[t]` belongs to token `t`, -100 where it is not to be learned.
        mask_token_id: the input of rows deeper than 0.
        keep: bool `(K, N)`.

    Returns:
        For R rows: `input_ids`, `position_ids` and `labels`, int64 `(R,)`, and `attention_mask`,
        bool `(R, R)`, True where the row may attend. A row's label is the token after it (-100
        where there is none): nothing shifts it again.

    Raises:
        ValueError: shapes that do not fit.
    """
    rows = draft_rows(input_ids, labels, mask_token_id, keep)
    depth, position = rows.pop("depths"), rows["position_ids"]
    return {
        **rows,
        "attention_mask": may_attend(depth[:, None], position[:, None], depth, position),
    }


@dataclass
class CodConfig:
    """Conditional output dropping (PARD, section 3.4).

    Args:
        num_depths: K, the tokens drafted in training.
        ratio: r; 1 drops nothing.
        min_ratio: r_min, the least share of rows of a depth.
    """

    num_depths: int = 8
    ratio: float = 0.7
    min_ratio: float = 0.2

    def __post_init__(self):
        # raises for numbers out of range
        cod_keep_mask(1, self.num_depths, self.ratio, self.min_ratio)


class RowCollator(ChoosingCollator):
    """A collator of encoded samples to one padded batch of rows.

    Args:
        mask_token_id: the id of the drafter's mask.
        cod: the rule of which rows to keep.
        seed: the seed of the choice.
        dense_masks: build boolean masks; without them the model's forward needs `block_mask`.
        vocabulary: int64 `(V',)`, the ids that the drafter can guess; labels are places in it, and
            others are not learned.
    """

    def __init__(
        self,
        mask_token_id: int,
        cod: CodConfig,
        seed: int = 0,
        dense_masks: bool = True,
        vocabulary: LongTensor | None = None,
    ):
        super().__init__(cod.num_depths, seed)
        self.mask_token_id, self.cod, self.dense_masks = mask_token_id, cod, dense_masks
        self.vocabulary = None if vocabulary is None else vocabulary.cpu()

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Pad to the longest.

        Returns:
            `input_ids`, `position_ids`, `labels` and `depths`, int64 `(B, R)`, padding rows with
            label -100 and depth -1, and with `dense_masks`, `attention_mask`, bool `(B, 1, R, R)`.
        """
        rows = [self.rows(sample) for sample in samples]

        def pad(name: str, value: int) -> Tensor:
            columns = pad_sequence([sample[name] for sample in rows], True, value)
            return F.pad(columns, (0, -columns.shape[1] % SHAPES), value=value)

        depths, positions = pad("depths", -1), pad("position_ids", 0)
        batch = {
            "input_ids": pad("input_ids", 0),
            "position_ids": positions,
            "labels": pad("labels", -100),
            "depths": depths,
        }
        if not self.dense_masks:
            return batch
        # padding rows see themselves: no empty softmax
        mask = torch.eye(depths.shape[1], dtype=torch.bool).repeat(len(rows), 1, 1)
        for index, sample in enumerate(rows):
            depth, position = sample["depths"], sample["position_ids"]
            seen = may_attend(depth[:, None], position[:, None], depth, position)
            mask[index, : len(depth), : len(depth)] = seen
        return {**batch, "attention_mask": mask[:, None]}

    def keep(self, seq_len: int, generator: torch.Generator) -> BoolTensor:
        """Choose which rows of a sample to train on, bool `(K, seq_len)`."""
        return cod_keep_mask(
            seq_len, self.cod.num_depths, self.cod.ratio, self.cod.min_ratio, generator
        )

    def rows(self, sample: dict[str, Any]) -> dict[str, Tensor]:
        """Make the training rows of one sample, with their `depths`."""
        ids, labels = torch.tensor(sample["input_ids"]), torch.tensor(sample["labels"])
        if self.vocabulary is not None:
            labels = places_in(self.vocabulary, labels)
        keep = useful_rows(self.keep(len(ids), self.generator(sample)), labels)
        return draft_rows(ids, labels, self.mask_token_id, keep)
