"""Which kinds of call are served: all others are refused here, once, before any work."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import LongTensor
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    DynamicCache,
    DynamicLayer,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)

from .copies import copies_of
from .decoding.budget import Budget, RowLatency
from .decoding.call import Terms
from .decoding.checks import ALONE, ASKED, STATES, Asked, Refused, changes_its_scale, context_of
from .decoding.latency import row_latency
from .decoding.sequence import Processors
from .names import BaseStreamer, cache_argument, is_foreign, treats_rows_alike
from .notes import of_pair
from .outer_names import drops_cache, has_ordinary_cache
from .protocol import Drafter, SpeculationConfig
from .rules import rule_of
from .rules.in_step import advance_in_step

CALLS = "attach", "needs"
# criteria that look at each sequence by itself
BY_SEQUENCE = (*ALONE, EosTokenCriteria, MaxLengthCriteria)
# plain decoding's, in the place of which the loop stands
LOOP = "_sample", "_prefill", "_update_model_kwargs_for_generation"


def check_forgets(model: PreTrainedModel) -> None:
    """Refuse a model without a cache that can drop its last tokens.

    Raises:
        Refused: it has none, or one of a kind of its own.
    """
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    if (
        cache_argument(model) is None
        or not has_ordinary_cache(model)
        or any(type(layer).__module__ != DynamicLayer.__module__ for layer in layers)
    ):
        raise Refused(
            f"{type(model).__name__} has no cache, or one of its own kind, that cannot drop tokens "
            "again: it can neither verify drafts nor make them."
        )


def is_drafter(assistant: Any) -> bool:
    """Tell whether an `assistant_model` is a drafter.

    If it is not, it is a model that transformers serves itself.
    """
    return callable(getattr(assistant, "start_drafting", None))


def check_decoder_only(model: PreTrainedModel) -> None:
    """Refuse an encoder-decoder target.

    Raises:
        Refused: it is one.
    """
    if model.config.is_encoder_decoder:
        raise Refused(
            f"{type(model).__name__} is an encoder-decoder model; drafters here serve decoder-only "
            "targets."
        )


def check_drafter(drafter: Any) -> None:
    """Refuse an object that lacks the methods or the `speculation_config` of a drafter.

    Drafters of the form before `attach(target)` and `needs(target)` are refused too.

    Raises:
        ValueError: with what to change.
    """
    if not is_drafter(drafter):
        raise ValueError(
            f"{type(drafter).__name__} is no drafter: load one with AutoDrafter.from_pretrained, "
            "or pass an ordinary small model as assistant_model, without custom_generate."
        )
    missing = [f"{name}(target)" for name in CALLS if not callable(getattr(drafter, name, None))]
    if missing:
        raise ValueError(
            f"{type(drafter).__name__} lacks {', '.join(missing)}. A drafter derives from "
            "hf_paradraft.Drafter: docs/add-a-drafter.md."
        )
    if not isinstance(getattr(drafter, "speculation_config", None), SpeculationConfig):
        raise ValueError(
            f"{type(drafter).__name__} has no speculation_config: set it to a SpeculationConfig."
        )


def admit(
    model: PreTrainedModel,
    input_ids: LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter | None,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool = False,
) -> Terms:
    """Return the `Terms` of a call, or refuse a call that the loop does not serve.

    Raises:
        ValueError: with what to change.
    """
    if drafter is None:
        raise Refused("speculative_decoding needs a drafter: pass drafter=… to generate.")
    check_drafter(drafter)
    rule = rule_of(drafter, generation_config)
    if model.config.model_type == "doge":
        raise Refused(
            "Doge targets gave other output with drafts than without: generate without a drafter."
        )
    if own := [name for name in LOOP if is_foreign(getattr(model, name, None))]:
        raise Refused(
            f"{type(model).__name__} does steps of decoding itself ({', '.join(own)}), and drafts "
            "leave some out: generate without a drafter."
        )
    check_decoder_only(model)
    if (
        type(model.config) in MODEL_FOR_MASKED_LM_MAPPING
        and getattr(model.config, "is_decoder", True) is False
    ):
        raise Refused(
            f"{type(model).__name__} reads its prompt in both directions here: load it with "
            "is_decoder=True, or generate without a drafter."
        )
    check_forgets(model)
    if input_ids.shape[0] > 1 and streamer is not None:
        raise Refused(
            f"A streamer shows one text, but there are {input_ids.shape[0]} prompts: leave the "
            "streamer out."
        )
    if input_ids.shape[1] == 0:
        raise Refused(
            "The drafter reads token ids and got none: pass input_ids with inputs_embeds, or "
            "generate without a drafter."
        )
    if generation_config.num_beams > 1:
        raise Refused(
            f"Speculative decoding has no beams, but num_beams is {generation_config.num_beams}."
        )
    if synced_gpus:
        raise Refused(
            "Speculative decoding does not run under synced_gpus (FSDP or ZeRO-3 generation)."
        )
    asked: Asked = getattr(generation_config, ASKED, Asked())
    wanted = asked.wants_states and generation_config.return_dict_in_generate
    if wanted and any(getattr(generation_config, name) for name in STATES):
        raise Refused(
            "Speculative decoding does not collect attentions or hidden states: run "
            "model(sequences) for them afterwards."
        )
    # A processor that may know the rows of a batch is shown all of them; and a criterion may draw,
    # or write, where texts are drawn in turn.
    knows_rows = not all(map(treats_rows_alike, logits_processor))
    if not rule.same_text and len(input_ids) > 1 and knows_rows:
        raise Refused(
            f"acceptance={drafter.speculation_config.acceptance!r} looks at texts that plain "
            "decoding never sees, and a logits processor of this batch may know its rows: leave "
            "acceptance at 'auto', or call generate once per prompt."
        )
    if drops_cache(model):
        raise Refused(
            "Gradient checkpointing in training mode drops the target's cache, which drafts are "
            "verified with: call eval() or gradient_checkpointing_disable() before generate."
        )
    together = knows_rows or (
        rule.in_turn and any(type(stop) not in BY_SEQUENCE for stop in stopping_criteria)
    )
    in_step = None
    if together and len(input_ids) > 1:
        in_step = partial(advance_in_step, Processors(logits_processor))
    return Terms(
        rule, copies_of(drafter, rule.draws is not None), in_step, partial(budget_of, model)
    )


def check_positions(
    model: PreTrainedModel, begin: int, limit: int, model_kwargs: dict[str, Any]
) -> None:
    """Refuse a call's own positions where they may pass a bound that its tokens do not.

    Args:
        model: the target.
        begin: tokens of the prompt.
        limit: tokens at most, the prompt's included.
        model_kwargs: the call's, with `position_ids` `(…, n)`, if any.

    Raises:
        ValueError: they run ahead of the tokens, beyond the target's positions or to another scale.
    """
    given, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if given is None:
        return
    tokens, reach = begin if mask is None else mask.sum(-1), int(given.max()) + 1 + limit - begin
    bound = changes_its_scale(model) or context_of(model)
    if reach > bound and (given[..., -1] >= tokens).any():
        raise Refused(
            f"The position_ids of this call run ahead of its tokens, and may pass {bound}: leave "
            "them out, or generate without a drafter."
        )


def budget_of(
    model: PreTrainedModel,
    drafter: Drafter,
    decides: bool,
    depth: int,
    row_counts: Sequence[int] | None,
    use: tuple[object, ...],
    batch_size: int,
) -> Budget:
    """Look up or make the `Budget` that calls of a target and a drafter share.

    Only calls with the same options share one.

    Args:
        model, drafter: the pair.
        decides: whether the budget is asked; if not, nothing has to be measured.
        depth, row_counts: those of `Budget`.
        use: further options that calls may differ in.
        batch_size: the number of sequences, rounded up to a power of two here.
    """
    batch_size = 1 << (batch_size - 1).bit_length()
    latency = row_latency(model) if decides else RowLatency([1], [1.0])
    key = depth, *latency.seconds, *use
    budgets = of_pair(model, drafter).setdefault(key, {})
    if batch_size not in budgets:
        known = next(iter(budgets.values()), None)
        budgets[batch_size] = (
            known.for_batch(batch_size) if known else Budget(latency, depth, batch_size, row_counts)
        )
    return budgets[batch_size]
