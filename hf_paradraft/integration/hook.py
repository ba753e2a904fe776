"""How `model.generate` reaches our loop: `assistant_model=drafter`, `set_drafter(model, drafter)`,
or `custom_generate=…`.

Four methods of `GenerationMixin` are wrapped, and do as before unless the assistant is a drafter:
it has `start_drafting`, or is a model with prompt tokens. `generate` itself takes the drafter that
is set on the model; another one notes arguments of the caller that cannot be told later. If this
transformers has changed them, nothing is wrapped, and `custom_generate=` is the door.
"""

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import wraps
from time import perf_counter
from typing import Any

from torch import LongTensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.utils import logging

from .. import protocol
from ..admission import admit, check_decoder_only, check_positions, is_drafter
from ..decoding import loop
from ..decoding.checks import (
    ASKED,
    STATES,
    Asked,
    Refused,
    beyond_ids,
    more_than_ids,
    postpone_max_time,
)
from ..decoding.joining import leave_early
from ..drafters.ppd.model import PpdDrafter
from ..names import BaseStreamer, ChangedTransformers, GenerateDecoderOnlyOutput, cache_in
from ..outer_names import WRAPPED, plain_decoding, wrap_pipelines, wrapped_methods
from ..pearl.loop import decoding_of
from .look import check_more_than_text, check_reads
from .setting import check_same_tokenizer, drafter_on

logger = logging.get_logger(__name__)


def install() -> bool:
    """Wrap the methods of `GenerationMixin` and the loader of pipelines, once.

    It returns False, with a warning, if this transformers has changed a method.
    """
    wrap_pipelines(is_drafter)
    if any(hasattr(getattr(GenerationMixin, name, None), "paradraft") for name in WRAPPED):
        return True
    try:
        originals = wrapped_methods()
    except ChangedTransformers as error:
        warnings.warn(
            f"{error} Until then pass custom_generate=hf_paradraft.speculative_decoding, "
            "drafter=….",
            stacklevel=2,
        )
        return False
    for name, wrap in zip(
        WRAPPED,
        (_wrap_assisted_decoding, _wrap_validate, _wrap_prepare_config, _wrap_generate),
        strict=True,
    ):
        wrapped = wrap(originals[name])
        wrapped.paradraft = True
        setattr(GenerationMixin, name, wrapped)
    return True


class _SetDrafter:
    """The drafter that is set on a model, as the assistant of one call.

    A call that it cannot serve is decoded plainly.
    """

    def __init__(self, drafter: Any):
        self.drafter = drafter


def _drafter_of(target: PreTrainedModel, assistant: Any) -> protocol.Drafter | None:
    """Look up the drafter of an assistant; None if the assistant is none.

    It is the assistant itself, or that of a model with a PPD adapter.
    """
    assistant = assistant.drafter if isinstance(assistant, _SetDrafter) else assistant
    if (drafter := PpdDrafter.adopt(target, assistant)) is not None:
        return drafter
    return assistant if is_drafter(assistant) else None


def _decode(
    model: PreTrainedModel,
    input_ids: LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Any,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool = False,
    tokenizers: Sequence[Any] = (None, None),
    **kwargs: Any,
) -> Any:
    """Check the call, the pair and how the target reads, then decode by our loop or PEARL's."""
    own = logits_processor, stopping_criteria, generation_config
    terms = admit(model, input_ids, *own, drafter, streamer, synced_gpus)
    check_same_tokenizer(model, drafter, *tokenizers)
    check_positions(model, input_ids.shape[1], generation_config.max_length, kwargs)
    # other inputs than a text decide how a target reads, and one look cannot know them
    if beyond_ids(kwargs) - {"inputs_embeds"}:
        check_more_than_text(model, drafter)
    mask = kwargs.get("attention_mask")
    several = len(input_ids) > 1 or (mask is not None and not mask.all())
    begun = perf_counter()
    longest = input_ids[0] if mask is None else input_ids[int(mask.sum(-1).argmax())]
    args = several, more_than_ids(kwargs), longest, generation_config.max_length
    if not check_reads(model, *args):  # code of others may know rows by their places
        terms = replace(terms, leave=leave_early)
    postpone_max_time(stopping_criteria, perf_counter() - begun)
    decode = decoding_of(drafter, model)
    return decode(model, input_ids, *own, drafter, streamer, terms=terms, **kwargs)


@wraps(loop.speculative_decoding, assigned=("__doc__",))  # the module stays its own, for pickle
def speculative_decoding(model, *args, drafter=None, **kwargs):
    return _decode(model, *args, drafter=_drafter_of(model, drafter) or drafter, **kwargs)


def _wrap_assisted_decoding(original):
    @wraps(original)
    def assisted_decoding(self, input_ids, *args, assistant_model=None, **kwargs):
        drafter = _drafter_of(self, assistant_model)
        if drafter is None:
            return original(self, input_ids, *args, assistant_model=assistant_model, **kwargs)
        kwargs.pop("inputs_tensor", None)
        tokenizers = [kwargs.pop(name, None) for name in ("tokenizer", "assistant_tokenizer")]
        is_set = isinstance(assistant_model, _SetDrafter)
        try:
            made = _decode(self, input_ids, *args, drafter=drafter, tokenizers=tokenizers, **kwargs)
        except (Refused, ChangedTransformers) as reason:
            if not is_set or getattr(reason, "reported", False):
                raise
            _warn_undrafted(drafter, reason)
        else:
            if is_set and isinstance(made, loop.SpeculativeOutput):  # one field less is expected
                made = GenerateDecoderOnlyOutput(
                    **{name: value for name, value in made.items() if name != "speculation"}
                )
            return made
        return plain_decoding(self)(input_ids, *args, **kwargs)

    return assisted_decoding


def _wrap_validate(original):
    @wraps(original)
    def validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        if _drafter_of(self, generation_mode_kwargs.get("assistant_model")) is None:
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        # Samples, batches and recurrent states, which transformers' own assisted loop refuses, are
        # none of its business here.
        for name, own in (("num_beams", 1), ("dola_layers", None)):
            if (value := getattr(generation_config, name, None) or own) != own:
                raise Refused(
                    f"Drafters serve greedy decoding and sampling, but {name} is {value}."
                )

    return validate_generation_mode


def _wrap_prepare_config(original):
    @wraps(original)
    def prepare_generation_config(self, generation_config, **kwargs):
        # Whisper's own generate hands the assistant on, and then writes into its config
        if is_drafter(kwargs.get("assistant_model")):
            check_decoder_only(self)
        # a pipeline's is prepared already, and has every default
        before = getattr(generation_config, ASKED, generation_config)
        length = kwargs.get("num_assistant_tokens", getattr(before, "num_assistant_tokens", None))
        cache = cache_in(kwargs) is not None
        asks = (*STATES, "return_dict_in_generate")
        wants = any(kwargs.get(name, getattr(generation_config, name, None)) for name in asks)
        prepared, model_kwargs = original(self, generation_config, **kwargs)
        setattr(prepared, ASKED, Asked(length, cache, wants))
        return prepared, model_kwargs

    return prepare_generation_config


def _warn_undrafted(drafter: protocol.Drafter, reason: Exception) -> None:
    """Warn why a call is decoded without the set drafter, and clear the drafter's statistics."""
    drafter.last_stats = None
    logger.warning_once(
        f"{reason} Decoding plainly: the drafter is set, and this call has to be answered."
    )


# Ways to decode that a call asks for itself.
OWN_WAY = (
    "assistant_model",
    "custom_generate",
    "prompt_lookup_num_tokens",
    "use_mtp",
    "assistant_early_exit",
    "is_assistant",
)


def _wrap_generate(original):
    places = [*inspect.signature(original).parameters][1:]

    @wraps(original)
    def generate(self, *args, **kwargs):
        drafter, given = drafter_on(self), {**dict(zip(places, args, strict=False)), **kwargs}
        config = given.get("generation_config")
        asked = (given.get(name, getattr(config, name, None)) for name in OWN_WAY)
        own = any(value not in (None, False) for value in asked)
        # continuous batching, which only this argument asks for, takes no assistant
        paged = given.get("cache_implementation") == "paged"
        if drafter is not None and not own and not paged:
            try:
                return original(self, **{**given, "assistant_model": _SetDrafter(drafter)})
            except Refused as reason:  # before anything was decoded or streamed
                if reason.reported:
                    raise
                _warn_undrafted(drafter, reason)
        try:
            return original(self, *args, **kwargs)
        except Refused as reason:
            reason.reported = True
            raise

    return generate
