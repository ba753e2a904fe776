"""Checks of a call's inputs before any work; `admission` says which kinds of call are served."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from sys import maxsize
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, MaxTimeCriteria, PreTrainedModel, StopStringCriteria

from ..names import CACHE_NAMES


class Refused(ValueError):
    """A call that this loop does not serve, and plain decoding may; nothing has been done yet.

    Attributes:
        reported: whether a call of `generate` has raised it: then it says nothing about a call
            around that one.
    """

    reported = False


ASKED = "_paradraft_asked"  # the attribute of the call's `GenerationConfig` that the hook sets
# criteria without a memory, which judge each sequence by itself
ALONE = StopStringCriteria, MaxTimeCriteria
STATES = "output_attentions", "output_hidden_states"


@dataclass(frozen=True)
class Asked:
    """Arguments of a `generate` call that later cannot be told from defaults.

    Attributes:
        num_assistant_tokens: this call's K; None: the drafter's own.
        callers_cache: whether the caller passed the cache, and so sees it again.
        wants_states: whether the caller asks for attentions or hidden states, not only a saved
            config.
    """

    num_assistant_tokens: int | None = None
    callers_cache: bool = True
    wants_states: bool = True


# arguments of a call that brings nothing but ids
IDS_ALONE = {*CACHE_NAMES, "attention_mask", "position_ids", "use_cache", "logits_to_keep"}
MORE_THAN_IDS = ("pixel", "inputs_embeds", "mm_encoder_outputs", "input_features")


def beyond_ids(model_kwargs: Mapping[str, Any]) -> set[str]:
    """List the arguments of a call that bring something next to its ids.

    Some models are handed empty mappings for images that a call does not have.
    """
    given = {
        name
        for name, value in model_kwargs.items()
        if value is not None and not (isinstance(value, Mapping) and not value)
    }
    return given - IDS_ALONE


def more_than_ids(model_kwargs: dict[str, Any]) -> bool:
    """Tell whether a call has images, sound or embeddings as inputs, by its arguments' names."""
    return any(part in name for name in beyond_ids(model_kwargs) for part in MORE_THAN_IDS)


def context_of(model: PreTrainedModel) -> int:
    """Return the number of positions that a model has, `sys.maxsize` if its config names none."""
    text = model.config.get_text_config()
    return getattr(text, "max_position_embeddings", None) or maxsize


def check_lengths(
    model: PreTrainedModel,
    begin: int,
    limit: int,
    unread: int,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """Refuse inputs of different lengths, and positions that change their scale on the way.

    Args:
        model: the target.
        begin: the number of the prompt's tokens.
        limit: the most tokens, the prompt's included.
        unread: the number of the prompt's tokens that the cache lacks.
        generation_config: this call's generation config.
        model_kwargs: this call's inputs for the target.

    Raises:
        ValueError: the inputs are refused; the message says what to change.
    """
    mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    described = getattr(generation_config, "_mask_length", begin) if mask is None else mask.shape[1]
    if described != begin or unread < 1:
        raise Refused(
            "With a cache (past_key_values), pass the whole input_ids, the cached ones and at "
            "least one more: the drafter reads them too."
        )
    if embeds is not None and embeds.shape[1] != begin:
        raise Refused(
            f"inputs_embeds has {embeds.shape[1]} positions and input_ids {begin}: the drafter "
            "needs one id each."
        )
    if (switch := changes_its_scale(model)) is not None:
        dynamic = "dynamic" in _rope_types(model)
        if limit > switch and (dynamic or begin <= switch):
            raise Refused(
                f"This target's rotary positions change their scale beyond {switch} tokens, and "
                f"this call may reach {limit}: keep prompt and new tokens within {switch}, or "
                "generate without a drafter."
            )


def _rope_types(model: PreTrainedModel) -> set[str]:
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}


def changes_its_scale(model: PreTrainedModel) -> int | None:
    """Look up after how many tokens a target's rotary positions change their scale.

    Returns:
        The number of tokens; None: the scale never changes.
    """
    if not _rope_types(model) & {"dynamic", "longrope"}:
        return None
    config = model.config.get_text_config()
    switch = config.rope_parameters.get("original_max_position_embeddings")
    return (
        switch
        or getattr(config, "original_max_position_embeddings", None)
        or config.max_position_embeddings
    )


def left_padding(attention_mask: Tensor | None, batch_size: int) -> list[int]:
    """Count the padding tokens before each row's prompt.

    Args:
        attention_mask: `(B, n)`, or None for no padding.
        batch_size: B.

    Raises:
        ValueError: there is padding on the right, or a row has nothing but padding.
    """
    if attention_mask is None:
        return [0] * batch_size
    if not attention_mask.any(dim=1).all():
        raise Refused("A row of the attention mask is all 0: leave prompts without a token out.")
    if not attention_mask[:, -1].all():
        raise Refused(
            "The prompts are padded on the right (the attention mask ends in 0): set the "
            "tokenizer's padding_side to 'left'."
        )
    return attention_mask.int().argmax(dim=1).tolist()


def postpone_max_time(stopping_criteria: Iterable, seconds: float) -> None:
    """Move the begin of `max_time` on by the seconds that preparing the call has taken."""
    for stop in stopping_criteria:
        if type(stop) is MaxTimeCriteria:
            stop.initial_timestamp += seconds
