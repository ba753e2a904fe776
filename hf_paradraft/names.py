"""Name everything that this library relies on inside transformers beyond its documented interface,
each with the reason.

Here are those of decoding, in `outer_names` those of drafters, training and the doors. No other
module imports from a submodule of transformers (but `utils.logging`) or reads a private attribute
of its objects. A name that a release has changed or dropped is found here, and nothing else
stops working: a name that is gone raises `ChangedTransformers`, which names it, at the first call
that needs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib import import_module
from typing import Any, NoReturn

from torch import Tensor, nn
from transformers import (
    Cache,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    GenerationConfig,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    __version__,
)


class ChangedTransformers(ImportError):
    """An error for a name that the library needs, and the installed transformers lacks."""


def missing(name: str, why: str) -> NoReturn:
    raise ChangedTransformers(
        f"transformers {__version__} has no {name}, which hf_paradraft {why}: install a release "
        "that docs/reference/versions.md lists, or a newer hf_paradraft."
    )


class _Absent(type):
    """The class of a stand-in for a missing name: every use but an import raises."""

    name: str
    why: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        missing(cls.name, cls.why)

    def __getattr__(cls, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # dataclasses, copies and documentation tools look for these
            raise AttributeError(attribute)
        missing(cls.name, cls.why)

    def __instancecheck__(cls, instance: object) -> NoReturn:
        missing(cls.name, cls.why)


# Libraries whose versions tell their code.
KNOWN = {
    *(
        "hf_paradraft transformers torch peft accelerate trl liger_kernel kernels fla mamba_ssm "
        "causal_conv1d flash_attn"
    ).split(),
    *(
        "optimum bitsandbytes torchao gptqmodel auto_gptq awq compressed_tensors hqq eetq aqlm "
        "auto_round fbgemm_gpu"
    ).split(),
}


def is_foreign(code: Any) -> bool:
    """Tell whether a class or function, or one that it wraps, is of no library in `KNOWN`.

    The versions of those libraries tell their code.
    """
    while code is not None:
        # of a bound method, of a partial function
        inner = getattr(code, "__func__", getattr(code, "func", code))
        module = (
            getattr(inner, "__globals__", {}).get("__name__")
            or getattr(inner, "__module__", None)
            or ""
        )
        if module.partition(".")[0] not in KNOWN:
            return True
        code = getattr(inner, "__wrapped__", None)  # which has lent the other one its name
    return False


def inside(module: str, name: str, why: str) -> Any:
    """Import a name from a submodule of transformers, or make a stand-in for it.

    Args:
        module: the submodule, without `transformers.`.
        name: the name in it.
        why: the end of a sentence, "which hf_paradraft …".
    """
    try:
        return getattr(import_module(f"transformers.{module}"), name)
    except (ImportError, AttributeError):
        return _Absent(name, (), {"name": f"{module}.{name}", "why": why})


def attribute(owner: Any, name: str, why: str) -> Any:
    """Read a private attribute, or raise the sentence that names it."""
    try:
        return getattr(owner, name)
    except AttributeError:
        return missing(
            f"{(owner if isinstance(owner, type) else type(owner)).__name__}.{name}", why
        )


# Layers of caches: rounds crop them, keep the accepted path of each row, and put recurrent states
# back.
DynamicSlidingWindowLayer = inside(
    "cache_utils", "DynamicSlidingWindowLayer", "lets keep what a window pushes out"
)
LinearAttentionCacheLayerMixin = inside(
    "cache_utils", "LinearAttentionCacheLayerMixin", "recognises recurrent states by"
)
LinearAttentionLayer = inside(
    "cache_utils", "LinearAttentionLayer", "recognises layers without masks by"
)
LinearAttentionAndFullAttentionLayer = inside(
    "cache_utils",
    "LinearAttentionAndFullAttentionLayer",
    "recognises layers with a state and masks by",
)


def stores_nothing(layer: Any) -> bool:
    """Tell whether a layer of a cache is a place without keys.

    Since 5.24 layers of a model that read another layer's keys have one.
    """
    return type(layer).__name__ == "DummyLayer"


# The objects that generate hands to its loops, and gets back from them.
BaseStreamer = inside("generation.streamers", "BaseStreamer", "streams to")
GenerateDecoderOnlyOutput = inside("generation", "GenerateDecoderOnlyOutput", "returns")

_BY_ROW = (  # of transformers' own processors those that know which row of a batch they see
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


def treats_rows_alike(processor: Any) -> bool:
    """Tell whether a logits processor does the same to each row of a batch, by itself.

    This is known only of transformers' own processors.
    """
    own = type(processor).__module__ == TemperatureLogitsWarper.__module__
    return own and not isinstance(processor, _BY_ROW)


# The cache of a call. 5.24 calls it `cache` where older releases, and code that is loaded from the
# Hub, have one of two names.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_outputs = getattr(GenerateDecoderOnlyOutput, "__dataclass_fields__", CACHE_NAMES)
# its name in generate's own output
OUTPUT_CACHE = next(name for name in CACHE_NAMES if name in _outputs)


@lru_cache  # every call of generate asks
def takes(model_type: Any, name: str) -> bool:
    """Tell whether the forward of a class, or of one of its bases, has an argument `name`."""
    owners = [owner for owner in model_type.__mro__ if "forward" in vars(owner)]
    return any(name in inspect.signature(owner.forward).parameters for owner in owners)


def cache_argument(module: nn.Module) -> str | None:
    """Find the name of the cache argument in a module's forward; None: it has none.

    The module is a model or a part of one.
    """
    kind: Any = type(module)
    return next((name for name in CACHE_NAMES if takes(kind, name)), None)


def with_cache(module: nn.Module, cache: Cache) -> dict[str, Cache]:
    """Make the argument that hands `cache` to the forward of a model, or of a part of one."""
    return {cache_argument(module) or CACHE_NAMES[0]: cache}


def cache_in(model_kwargs: Mapping[str, Any]) -> Any:
    """Find the cache among a call's arguments, under any of its names; None: there is none."""
    return next(
        (model_kwargs[name] for name in CACHE_NAMES if model_kwargs.get(name) is not None), None
    )


def attention_of(model: PreTrainedModel) -> str:
    """Name the attention implementation of a model's text part.

    The implementations sdpa and eager take masks as they are given.
    """
    return attribute(
        model.config.get_text_config(), "_attn_implementation", "decides about trees by"
    )


def pad_token_of(generation_config: GenerationConfig) -> Tensor | None:
    """Look up the padding token that generate writes after ended texts, as a tensor.

    It is None if there is none.
    """
    return attribute(generation_config, "_pad_token_tensor", "pads shorter texts with")


def decodes(model: PreTrainedModel) -> AbstractContextManager:
    """Enter the mode that `generate` decodes in.

    Since 5.23 experts are run by another kernel in that mode, on devices but CPUs.
    """
    optimise = getattr(model, "_optimize_model_for_decode", None)
    return nullcontext() if optimise is None else optimise()
