"""Tree attention on unmodified models: an explicit mask and explicit positions set the tokens
that every row of a forward sees.
"""

import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import numpy
import torch
from numpy import ndarray
from torch import BoolTensor, LongTensor, Tensor
from transformers import DynamicCache, DynamicLayer, PreTrainedModel

from ..names import (
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    attention_of,
    cache_argument,
    is_foreign,
    stores_nothing,
)

GROUPED = "TRANSFORMERS_SDPA_FORCE_GQA"  # a switch of transformers, which reads it in each layer
# whether cuDNN's attention was on before, for each block that does without it now
_choice, _choices = (
    Lock(),
    list[bool](),
)
# Positions counted from the cache's length, whatever position_ids says: a tree's rows would be
# misplaced.
COUNT_FROM_CACHE = {"gpt_neo", "llama4", "llama4_text"}
READING = "forward", "prepare_inputs_for_generation", "create_masks_for_generate"
WITH_MASKS = DynamicLayer, DynamicSlidingWindowLayer
RECURRENT = LinearAttentionLayer, LinearAttentionAndFullAttentionLayer


def attention_windows(
    model: PreTrainedModel, recurrent: bool = False
) -> dict[str, int | None] | None:
    """Look up how many tokens back each kind of the model's attention layers sees.

    Args:
        model: the target, or a drafter.
        recurrent: whether layers with a recurrent state may stand among them; these see no mask.

    Returns:
        The window by the kind's name in `config.layer_types`, None for full attention; or None
        instead of the dict if the model does not take a mask and positions as they are given (flash
        attention, ALiBi, chunked or linear attention).
    """
    config = model.config.get_text_config()
    if (
        attention_of(model) not in ("sdpa", "eager")
        or config.model_type in COUNT_FROM_CACHE
        or getattr(config, "alibi", False)
        or cache_argument(model) is None
        or "position_ids" not in inspect.signature(model.forward).parameters
    ):
        return None
    layers = DynamicCache(config=config).layers
    classes = {type(layer) for layer in layers if not stores_nothing(layer)}
    if not classes <= {*WITH_MASKS, *(RECURRENT if recurrent else ())}:
        return None
    if DynamicSlidingWindowLayer in classes and not classes.isdisjoint(RECURRENT):
        return None
    kinds = getattr(config, "layer_types", None) or [
        str(getattr(layer, "sliding_window", None)) for layer in layers
    ]
    if "chunked_attention" in kinds:
        return None
    windows = {  # layers that share another's cache have a kind seen before, or no place at all
        kind: getattr(layer, "sliding_window", None)
        for kind, layer in zip(kinds, layers, strict=False)
        if type(layer) is not LinearAttentionLayer and not stores_nothing(layer)
    }
    return windows or None


def reads_its_own_way(model: PreTrainedModel) -> bool:
    """Tell whether foreign code makes a model's masks, positions or inputs.

    Such a model is asked for them, and serves only chains.
    """
    parts = (model, model.get_decoder())
    return any(
        is_foreign(getattr(part, name, part.forward))
        for part in parts
        if part is not None
        for name in READING
    )


def or_sdpa(model: PreTrainedModel) -> str:
    """Name the remedy where `attention_windows` is None, as the end of a sentence.

    The remedy is "" if there is none.
    """
    helps = attention_of(model) not in ("sdpa", "eager")
    return ", or load it with attn_implementation='sdpa'" if helps else ""


def additive(seen: BoolTensor, dtype: torch.dtype) -> Tensor:
    """Make a mask to add to attention scores: 0 where `seen`, else the least of `dtype`."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
        ~seen, torch.finfo(dtype).min
    )


def tree_shape(parents: Sequence[int], size: int) -> tuple[ndarray, ndarray]:
    """Compute which rows of one tree see each other, and their depths.

    Args:
        parents: the nodes' parents; nodes are rows 1 … N, and row 0 is the last known token, -1 as
            a parent.
        size: rows in all, at least N + 1; those beyond the tree are padding and see only
            themselves.

    Returns:
        Bool `(size, size)`, each node's own and its ancestors' columns, and depths int64 `(size,)`.
    """
    sees: ndarray = numpy.eye(size, dtype=bool)
    depths: ndarray = numpy.zeros(size, dtype=numpy.int64)
    for row, parent in enumerate(parents, 1):
        sees[row] |= sees[parent + 1]
        depths[row] = depths[parent + 1] + 1
    return sees, depths


class TreeAttention:
    """Masks and positions for forwards over a ragged cache.

    They are computed on the host and sent in one piece: a device would start a kernel for each of
    the small operations.

    Args:
        windows: the windows from `attention_windows`.
        prompt_mask: bool or int `(B, n)`, true for the prompts' visible tokens.
        positions: int64 `(B,)`, the positions of the prompts' last tokens.
        dtype, device: those of the masks.
    """

    def __init__(
        self,
        windows: dict[str, int | None],
        prompt_mask: Tensor,
        positions: LongTensor,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.windows, self.dtype, self.device = windows, dtype, device
        self.prompt_mask = prompt_mask.bool().numpy(force=True)
        self.offsets = (positions.numpy(force=True) - (prompt_mask.shape[1] - 1))[:, None]

    def inputs(
        self,
        lengths: list[int],
        sees: ndarray,
        depths: ndarray,
        num_slots: int | None = None,
        last: ndarray | int = sys.maxsize,
    ) -> tuple[Tensor | dict[str, Tensor] | None, LongTensor]:
        """Make mask and positions for M new rows after the longest row's end.

        C - M other rows that are not kept yet stand there too.

        Args:
            lengths: the lengths of the B rows, in slots.
            sees: bool `(B, M, C)`, the rows after the end that each new row sees, the new ones
                last.
            depths: int64 `(B, C)`, the distance of each of these from its row's end.
            num_slots: the width of a static cache.
            last: the greatest position that a row may have, where the model has no more, `(B, M)`
                or fewer axes; rows that are not read may be put there.

        Returns:
            An additive mask `(B, 1, M, slots)`, or a dict of them by kind where layers differ, or
            None for one row that sees everything; and positions int64 `(B, M)`.
        """
        end, (_, size, columns) = max(lengths), sees.shape
        ends = numpy.array(lengths)[:, None]
        stands = ends + depths
        query_positions = stands[:, columns - size :]
        possible = numpy.minimum(query_positions + self.offsets, last).clip(0)
        positions = torch.from_numpy(possible).to(self.device)
        alone = len(lengths) == size == 1 and num_slots is None
        full = set(self.windows.values()) == {None}
        if alone and full and sees.all() and self.prompt_mask.all():
            return None, positions
        slots = numpy.arange(num_slots or end + columns)
        known = slots < ends
        # the slots of a longer row that has left are gone
        prompt = min(self.prompt_mask.shape[1], len(slots))
        known[:, :prompt] &= self.prompt_mask[:, :prompt]
        visible = known[:, None].repeat(size, axis=1)
        visible[:, :, end : end + columns] = sees
        masks = {}
        for kind, window in self.windows.items():
            seen = visible
            if window is not None:
                slot_positions = slots[None].repeat(len(lengths), axis=0)
                slot_positions[:, end : end + columns] = stands
                seen = visible & (slot_positions[:, None] > query_positions[:, :, None] - window)
            masks[kind] = additive(torch.from_numpy(seen).to(self.device), self.dtype)[:, None]
        return masks.popitem()[1] if len(masks) == 1 else masks, positions


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Turn off cuDNN's attention kernels in a block, for forwards of varying lengths.

    On Hopper PyTorch prefers them. cuDNN plans them anew for every shape: on an H200 (torch 2.11)
    some 45 ms each, so that the layer of an EAGLE-3 drafter took 530 ms forward and backward, and
    without them 50 for twice as many texts. The choice is the process's: the first of its threads
    that enters makes it, and the last that leaves takes it back.
    """
    with _choice:
        _choices.append(torch.backends.cuda.cudnn_sdp_enabled() if not _choices else _choices[0])
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        with _choice:
            torch.backends.cuda.enable_cudnn_sdp(_choices.pop() and not _choices)


@contextmanager
def grouped_heads(rows: int) -> Iterator[None]:
    """Let attention read the keys and values of grouped heads without copying them.

    This serves forwards of several rows on a machine without a GPU.

    Where there is a mask transformers first copies keys and values for each head: at 4,000 tokens
    that is half of a forward of 16 rows (SmolLM2-135M, bf16). Kernels for GPUs take no mask
    otherwise, and a single row is fast as it is.
    """
    if rows == 1 or GROUPED in os.environ or torch.accelerator.is_available():
        yield
        return
    os.environ[GROUPED] = "1"
    try:
        yield
    finally:
        os.environ.pop(GROUPED, None)
