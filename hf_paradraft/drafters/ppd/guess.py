"""What prompts guess at many places of a text, and what the model says there: one forward, with its head at those places.

Texts are asked at different places, while a model's head is run on the same rows of all of them. So each text's rows are put in
another order, those that are asked last; masks and positions go along, and nothing else changes.
"""

from collections.abc import Callable

import torch
from torch import BoolTensor, LongTensor, Tensor
from transformers import PreTrainedModel

from ...decoding.tree_attention import additive, attention_windows, or_sdpa
from .config import PpdConfig
from .rows import prompt_rows
from .tuner import prompt_embedding


def check_takes_masks(model: PreTrainedModel) -> None:
    """Refuse a model in which prompts cannot be hidden from the text.

    Raises:
        ValueError: it takes no explicit mask.
    """
    if attention_windows(model) is None:
        raise ValueError(f"Prompt tokens need a model that takes a mask as given: use another one{or_sdpa(model)}.")


def guess_at(
    forward: Callable, base: PreTrainedModel, config: PpdConfig, ids: LongTensor, points: LongTensor
) -> tuple[Tensor, Tensor, LongTensor, BoolTensor]:
    """Insert an adapter's prompts behind every point and run the model once.

    Args:
        forward: the model to call, as it may be wrapped for training.
        base: the model itself, with an active adapter.
        config: of the adapter.
        ids: int64 `(B, n)`.
        points: int64 `(B, P)`, -1 for none.

    Returns:
        For the T points there are: the prompts' guesses and their teachers, logits float32 `(T, m, V)`, the latter without
        gradient, the texts' own tokens `(T, m)`, and whether the token directly behind is the model's own choice, `(T,)`.
    """
    m, e, (batch_size, length) = config.num_prompt_tokens, config.num_ensembles, ids.shape
    rows = [prompt_rows(length, text_points.clamp(min=0).cpu(), m, e) for text_points in points]
    embedding = prompt_embedding(base)
    prompts = embedding.prompts()[rows[0]["prompts"]].expand(batch_size, -1, -1)
    there = points.cpu() >= 0
    row = there.nonzero(as_tuple=True)[0][:, None]  # (T, 1), which text
    behind = torch.stack([own["teachers"] for own in rows])[there]
    column = torch.cat([points.cpu()[there][:, None], behind], dim=1)  # (T, m + 1), places of the text
    asked = torch.zeros(batch_size, length, dtype=torch.bool).index_put_((row, column), torch.tensor(True))
    order = asked.int().argsort(dim=1, stable=True)  # (B, n)
    new_column = order.argsort(dim=1)[row, column]
    max_asked = int(asked.sum(1).max())  # K rows of every text: those that are asked, and some before them where others have more
    prompt_places = torch.arange(length, rows[0]["position_ids"].shape[0]).expand(batch_size, -1)
    whole = torch.cat([order, prompt_places], dim=1)
    texts = embedding.base_layer(ids.gather(1, order.to(ids.device)))
    sees = torch.stack([own["attention_mask"][new][:, new] for own, new in zip(rows, whole, strict=True)])[:, None].to(ids.device)
    positions = torch.stack([own["position_ids"][new] for own, new in zip(rows, whole, strict=True)]).to(ids.device)
    apart = positions[:, None, :, None] - positions[:, None, None]
    masks = {}
    for kind, window in attention_windows(base).items():
        seen = sees if window is None else sees & (apart < window)
        masks[kind] = additive(seen, texts.dtype)
    heads = max_asked + prompt_places.shape[1]
    few = {"logits_to_keep": heads} if base._supports_logits_to_keep() else {}
    logits = forward(
        inputs_embeds=torch.cat([texts, prompts.to(texts.dtype)], dim=1),
        attention_mask=next(iter(masks.values())) if len(masks) == 1 else masks,
        position_ids=positions,
        use_cache=False,
        **few,
    ).logits
    logits = logits[:, -heads:]
    said = logits[row, new_column - (length - max_asked)].detach().float()
    guesses = logits[:, max_asked:].unflatten(1, (points.shape[1], m, e))[there].float().mean(2)
    following = ids[row, column + 1]
    return guesses, said[:, 1:], following[:, 1:], said[:, 0].argmax(-1) == following[:, 0]
