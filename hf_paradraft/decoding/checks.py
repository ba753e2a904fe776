"""Refusals of calls that the loop cannot serve exactly, before any work."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import LongTensor, Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
)

from ..names import MODEL_FOR_MASKED_LM_MAPPING, BaseStreamer, MaxTimeCriteria, drops_cache, is_foreign, treats_rows_alike
from ..protocol import Drafter, SpeculationConfig
from .accept import Rule
from .cache import check_forgets


class Refused(ValueError):
    """A call that this loop does not serve, and plain decoding may; nothing has been done yet.

    Attributes:
        told: whether its own call has raised it: then it says nothing about one around it.
    """

    told = False


NOTES = "_paradraft_notes"  # where the hook on `generate` leaves them, in the call's `GenerationConfig`
STATES = "output_attentions", "output_hidden_states"


@dataclass(frozen=True)
class Notes:
    """Arguments of a call of `generate` that its defaults hide later.

    Attributes:
        num_assistant_tokens: K, of this call; None: as the drafter says.
        callers_cache: whether the cache is the caller's own, who will see it again.
        wants_states: whether the caller asks for attentions or hidden states, which a saved config may do for nobody.
    """

    num_assistant_tokens: int | None = None
    callers_cache: bool = True
    wants_states: bool = True


MORE_THAN_IDS = ("pixel", "inputs_embeds", "mm_encoder_outputs", "input_features")


def more_than_ids(model_kwargs: dict[str, Any]) -> bool:
    """Tell whether a call brings images, sound or embeddings: an argument of such a name that holds something."""
    return any(holds_something(value) and any(part in name for part in MORE_THAN_IDS) for name, value in model_kwargs.items())


def holds_something(value: Any) -> bool:
    """Tell whether an argument is there at all: some models are handed empty mappings for images that a call does not have."""
    return value is not None and not (isinstance(value, Mapping) and not value)


CALLS = "attach", "needs"
LOOP = "_sample", "_prefill", "_update_model_kwargs_for_generation"  # plain decoding's, in the place of which the loop stands


def check_drafter(drafter: Any) -> None:
    """Refuse what is no drafter, or one of the form that this library had before it brought the target to drafters.

    Raises:
        ValueError: with what to change.
    """
    if not callable(getattr(drafter, "start_drafting", None)):
        raise ValueError(
            f"{type(drafter).__name__} is no drafter: load one with AutoDrafter.from_pretrained, or pass an ordinary small model "
            "as assistant_model, without custom_generate."
        )
    missing = [f"{name}(target)" for name in CALLS if not callable(getattr(drafter, name, None))]
    if missing:
        raise ValueError(
            f"{type(drafter).__name__} lacks {', '.join(missing)}. A drafter derives from hf_paradraft.Drafter: "
            "docs/add-a-drafter.md."
        )
    if not isinstance(getattr(drafter, "speculation_config", None), SpeculationConfig):
        raise ValueError(f"{type(drafter).__name__} has no speculation_config: set it to a SpeculationConfig.")


def check_call(
    model: PreTrainedModel,
    input_ids: LongTensor,
    generation_config: GenerationConfig,
    logits_processor: LogitsProcessorList,
    drafter: Drafter | None,
    streamer: BaseStreamer | None,
    synced_gpus: bool,
    rule: Rule,
) -> None:
    """Refuse a kind of call that the loop does not serve.

    Raises:
        ValueError: with what to change.
    """
    if drafter is None:
        raise Refused("speculative_decoding needs a drafter: pass drafter=… to generate.")
    check_drafter(drafter)
    if model.config.model_type == "doge":
        raise Refused("Doge targets gave other output with drafts than without: generate without a drafter.")
    if own := [name for name in LOOP if is_foreign(getattr(model, name, None))]:
        raise Refused(
            f"{type(model).__name__} does steps of decoding itself ({', '.join(own)}), and drafts leave some out: generate "
            "without a drafter."
        )
    if model.config.is_encoder_decoder:
        raise Refused(f"{type(model).__name__} is an encoder-decoder model; drafters here serve decoder-only targets.")
    if type(model.config) in MODEL_FOR_MASKED_LM_MAPPING and getattr(model.config, "is_decoder", True) is False:
        raise Refused(
            f"{type(model).__name__} reads its prompt in both directions here: load it with is_decoder=True, or generate without "
            "a drafter."
        )
    try:
        check_forgets(model)
    except ValueError as error:
        raise Refused(str(error)) from None
    if input_ids.shape[0] > 1 and streamer is not None:
        raise Refused(f"A streamer shows one text, but there are {input_ids.shape[0]} prompts: leave the streamer out.")
    if input_ids.shape[1] == 0:
        raise Refused(
            "The drafter reads token ids and got none: pass input_ids beside inputs_embeds, or generate without a drafter."
        )
    if generation_config.num_beams > 1:
        raise Refused(f"Speculative decoding has no beams, but num_beams is {generation_config.num_beams}.")
    if synced_gpus:
        raise Refused("Speculative decoding does not run under synced_gpus (FSDP or ZeRO-3 generation).")
    notes: Notes = getattr(generation_config, NOTES, Notes())
    asked = notes.wants_states and generation_config.return_dict_in_generate
    if asked and any(getattr(generation_config, name) for name in STATES):
        raise Refused(
            "Speculative decoding does not collect attentions or hidden states: run model(sequences) for them afterwards."
        )
    if rule.looks_ahead and input_ids.shape[0] > 1 and not all(map(treats_rows_alike, logits_processor)):
        raise Refused(
            f"acceptance={drafter.speculation_config.acceptance!r} looks at texts that plain decoding never sees, and a logits "
            "processor of this batch may know its rows: leave acceptance at 'auto', or call generate once per prompt."
        )
    if drops_cache(model):
        raise Refused(
            "Gradient checkpointing in training mode drops the target's cache, which drafts are verified with: call eval() or "
            "gradient_checkpointing_disable() before generate."
        )


def check_lengths(
    model: PreTrainedModel, begin: int, limit: int, unread: int, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> None:
    """Refuse prompts whose parts do not fit together, and positions that change their meaning on the way.

    Args:
        model: the target.
        begin: tokens of the prompt.
        limit: tokens at most, the prompt's included.
        unread: tokens of the prompt that the cache lacks.
        generation_config: of this call.
        model_kwargs: of this call.

    Raises:
        ValueError: with what to change.
    """
    mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    described = getattr(generation_config, "_mask_length", begin) if mask is None else mask.shape[1]
    if described != begin or unread < 1:
        raise Refused(
            "With a cache (past_key_values), pass the whole input_ids, the cached ones and at least one more: the drafter reads "
            "them too."
        )
    if embeds is not None and embeds.shape[1] != begin:
        raise Refused(f"inputs_embeds has {embeds.shape[1]} positions and input_ids {begin}: the drafter needs one id each.")
    if (switch := changes_its_scale(model)) is not None:
        dynamic = "dynamic" in _rope_types(model)
        if limit > switch and (dynamic or begin <= switch):
            raise Refused(
                f"This target's rotary positions change their scale beyond {switch} tokens, and this call may reach {limit}: "
                f"keep prompt and new tokens within {switch}, or generate without a drafter."
            )


def _rope_types(model: PreTrainedModel) -> set[str]:
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}


def changes_its_scale(model: PreTrainedModel) -> int | None:
    """Look up how many tokens a target reads before its rotary positions change their scale; None: they never do."""
    if not _rope_types(model) & {"dynamic", "longrope"}:
        return None
    config = model.config.get_text_config()
    switch = config.rope_parameters.get("original_max_position_embeddings")
    return switch or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings


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
    if not bool(attention_mask.any(dim=1).all()):
        raise Refused("A row of the attention mask is all 0: leave prompts without a token out.")
    if not bool(attention_mask[:, -1].all()):
        raise Refused(
            "The prompts are padded on the right (the attention mask ends in 0): set the tokenizer's padding_side to 'left'."
        )
    return attention_mask.int().argmax(dim=1).tolist()


def give_time(stopping_criteria: Iterable, seconds: float) -> None:
    """Let `max_time` begin later by what was measured of a target that was new."""
    for stop in stopping_criteria:
        if type(stop) is MaxTimeCriteria:
            stop.initial_timestamp += seconds
