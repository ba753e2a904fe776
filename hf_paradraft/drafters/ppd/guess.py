"""Prompts' guesses at many places of a text, and the model's own choices there: one forward, with
its head at those places.

Texts are asked at different places, while a model's head is run on the same rows of all of them. So
each text's rows are put in another order, those that are asked last; masks and positions go along,
and nothing else changes.
"""

from collections.abc import Callable

import torch
from torch import BoolTensor, LongTensor, Tensor
from transformers import PreTrainedModel

from ...decoding.tree_attention import additive, attention_windows, or_sdpa
from ...outer_names import keeps_logits
from .config import PpdConfig
from .rows import prompt_rows
from .tuner import prompt_embedding


def check_takes_masks(model: PreTrainedModel) -> None:
    """Refuse a model in which prompts cannot be hidden from the text.

    Raises:
        ValueError: it takes no explicit mask.
    """
    if attention_windows(model) is None:
        raise ValueError(
            "Prompt tokens need a model that takes a mask as given: use another "
            f"one{or_sdpa(model)}."
        )


def guess_at(
    forward: Callable, base: PreTrainedModel, config: PpdConfig, ids: LongTensor, points: LongTensor
) -> tuple[Tensor, Tensor, LongTensor, BoolTensor]:
    """Insert an adapter's prompts after every point and run the model once.

    Args:
        forward: the model to call, as it may be wrapped for training.
        base: the model itself, with an active adapter.
        config: of the adapter.
        ids: int64 `(B, n)`.
        points: int64 `(B, P)`, -1 for none.

    Returns:
        For the T points there are: the prompts' guesses and their teachers, logits float32 `(T, m,
        V)`, the latter without gradient, the texts' own tokens `(T, m)`, and whether the token
        directly after is the model's own choice, `(T,)`.
    """
    m, e, length = config.num_prompt_tokens, config.num_ensembles, ids.shape[1]
    embedding = prompt_embedding(base)
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
