"""Name everything that this library relies on inside transformers beyond its documented interface, each with the reason.

No other module imports from a submodule of transformers (but `utils.logging`) or reads a private attribute of its objects. What a
release has renamed or dropped is found here, by version, and nothing else stops working: a name that is gone raises
`ChangedTransformers`, which names it, at the first call that needs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib import import_module
from typing import Any, NoReturn

from torch import Tensor, nn
from transformers import (
    Cache,
    CompileConfig,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    GenerationConfig,
    GenerationMixin,
    PrefixConstrainedLogitsProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    __version__,
)


class ChangedTransformers(ImportError):
    """A name of transformers that the library relies on, and that the installed release does not have."""


def _missing(name: str, why: str) -> NoReturn:
    raise ChangedTransformers(
        f"transformers {__version__} has no {name}, which hf_paradraft {why}: install a release that docs/reference/versions.md "
        "lists, or a newer hf_paradraft."
    )


class _Absent(type):
    """The class of what stands in for a missing name: every use but an import raises."""

    name: str
    why: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        _missing(cls.name, cls.why)

    def __getattr__(cls, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # dataclasses, copies and documentation tools look for these
            raise AttributeError(attribute)
        _missing(cls.name, cls.why)

    def __instancecheck__(cls, instance: object) -> NoReturn:
        _missing(cls.name, cls.why)


# Libraries whose versions say what their code does.
KNOWN = {
    *"hf_paradraft transformers torch peft accelerate trl liger_kernel kernels fla mamba_ssm causal_conv1d flash_attn".split(),
    *"optimum bitsandbytes torchao gptqmodel auto_gptq awq compressed_tensors hqq eetq aqlm auto_round fbgemm_gpu".split(),
}


def is_foreign(code: Any) -> bool:
    """Tell whether a class, a function or one that it wraps is of none of the libraries whose versions say what it does."""
    while code is not None:
        inner = getattr(code, "__func__", getattr(code, "func", code))  # of a bound method, of a partial function
        module = getattr(inner, "__globals__", {}).get("__name__") or getattr(inner, "__module__", None) or ""
        if module.partition(".")[0] not in KNOWN:
            return True
        code = getattr(inner, "__wrapped__", None)  # which has lent the other one its name
    return False


def _inside(module: str, name: str, why: str) -> Any:
    """Import a name from a submodule of transformers, or make what stands in for it.

    Args:
        module: the submodule, without `transformers.`.
        name: the name in it.
        why: the end of a sentence, "which hf_paradraft …".
    """
    try:
        return getattr(import_module(f"transformers.{module}"), name)
    except (ImportError, AttributeError):
        return _Absent(name, (), {"name": f"{module}.{name}", "why": why})


def _attribute(owner: Any, name: str, why: str) -> Any:
    """Read a private attribute, or raise the sentence that names it."""
    try:
        return getattr(owner, name)
    except AttributeError:
        return _missing(f"{(owner if isinstance(owner, type) else type(owner)).__name__}.{name}", why)


# Layers of caches: rounds crop them, keep the accepted path of each row, and put recurrent states back.
DynamicLayer = _inside("cache_utils", "DynamicLayer", "crops after every round")
DynamicSlidingWindowLayer = _inside("cache_utils", "DynamicSlidingWindowLayer", "lets keep what a window pushes out")
StaticLayer = _inside("cache_utils", "StaticLayer", "puts in the place of a window's static layer")
StaticSlidingWindowLayer = _inside("cache_utils", "StaticSlidingWindowLayer", "replaces by a layer that keeps every token")
LinearAttentionCacheLayerMixin = _inside("cache_utils", "LinearAttentionCacheLayerMixin", "recognises recurrent states by")
LinearAttentionLayer = _inside("cache_utils", "LinearAttentionLayer", "recognises layers without masks by")
LinearAttentionAndFullAttentionLayer = _inside(
    "cache_utils", "LinearAttentionAndFullAttentionLayer", "recognises layers with a state and masks by"
)


def stores_nothing(layer: Any) -> bool:
    """Tell whether a layer of a cache is a place without keys: since 5.24 a model's layers have one that read another's."""
    return type(layer).__name__ == "DummyLayer"


# What generate hands to its loops, and gets back from them.
BaseStreamer = _inside("generation.streamers", "BaseStreamer", "streams to")
EosTokenCriteria = _inside("generation", "EosTokenCriteria", "reads the ends of a text from")
GenerateDecoderOnlyOutput = _inside("generation", "GenerateDecoderOnlyOutput", "returns")
GenerationMode = _inside("generation", "GenerationMode", "tells generate's own checks about a drafted call with")
MaxLengthCriteria = _inside("generation", "MaxLengthCriteria", "reads the longest text from")
MaxTimeCriteria = _inside("generation", "MaxTimeCriteria", "asks about each sequence by itself")
StopStringCriteria = _inside("generation", "StopStringCriteria", "asks about each sequence by itself")

_BY_ROW = (  # of transformers' own processors those that know which row of a batch they see
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


def treats_rows_alike(processor: Any) -> bool:
    """Tell whether a logits processor does the same to each row of a batch, by itself: of all others nobody can know it."""
    own = type(processor).__module__ == TemperatureLogitsWarper.__module__
    return own and not isinstance(processor, _BY_ROW)


# Tables of classes, by config or model type.
CONFIG_MAPPING_NAMES = _inside("models.auto.configuration_auto", "CONFIG_MAPPING_NAMES", "looks model types up in")
MODEL_FOR_CAUSAL_LM_MAPPING = _inside("models.auto.modeling_auto", "MODEL_FOR_CAUSAL_LM_MAPPING", "finds causal LMs in")
MODEL_FOR_MASKED_LM_MAPPING = _inside("models.auto.modeling_auto", "MODEL_FOR_MASKED_LM_MAPPING", "finds two-way readers in")
MODEL_MAPPING = _inside("models.auto.modeling_auto", "MODEL_MAPPING", "finds the classes of decoder layers in")

# Parts of models that drafters are made of.
ACT2FN = _inside("activations", "ACT2FN", "checks the activations of configs with")
ROPE_INIT_FUNCTIONS = _inside("modeling_rope_utils", "ROPE_INIT_FUNCTIONS", "checks the rotary embeddings of configs with")
Gemma4TextScaledWordEmbedding = _inside(
    "models.gemma4.modeling_gemma4", "Gemma4TextScaledWordEmbedding", "makes the embeddings of Gemma 4 drafters of"
)
apply_rotary_pos_emb = _inside("models.llama.modeling_llama", "apply_rotary_pos_emb", "turns the keys of blocks with")

# Training and files.
find_adapter_config_file = _inside("utils", "find_adapter_config_file", "recognises adapters with")
get_available_reporting_integrations = _inside("integrations", "get_available_reporting_integrations", "knows reporters by")
get_length_grouped_indices = _inside("trainer_pt_utils", "get_length_grouped_indices", "orders training samples with")


# The cache of a call. 5.24 calls it `cache` where older releases, and code that is loaded from the Hub, have one of two names.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_outputs = getattr(GenerateDecoderOnlyOutput, "__dataclass_fields__", CACHE_NAMES)
OUTPUT_CACHE = next(name for name in CACHE_NAMES if name in _outputs)  # what generate's own output calls it


ASSISTS_COMPILED = OUTPUT_CACHE == "cache"  # since 5.24 assisted generation compiles its verification over static caches


def compiles_everywhere(config: CompileConfig) -> CompileConfig:
    """Let transformers compile on every device, where it would do so on GPUs alone."""
    config._compile_all_devices = True
    return config


def innermost(target: nn.Module) -> PreTrainedModel:
    """Find the model of transformers inside of what is wrapped around it.

    Raises:
        ValueError: there is none.
    """
    inner: Any = target
    while not isinstance(inner, PreTrainedModel):
        within = getattr(inner, "module", getattr(inner, "_orig_mod", None))  # of DDP, of torch.compile
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else within
        if inner is None:
            raise ValueError(f"A drafter is set on a model of transformers, and {type(target).__name__} holds none.")
    return inner


@lru_cache  # every call of generate asks
def takes(model_type: Any, name: str) -> bool:
    """Tell whether the forward of this class, or of one that it is derived from, has an argument called `name`."""
    owners = [owner for owner in model_type.__mro__ if "forward" in vars(owner)]
    return any(name in inspect.signature(owner.forward).parameters for owner in owners)


def cache_argument(module: nn.Module) -> str | None:
    """Find what the forward of a model, or of a part of one, calls its cache; None: it takes none."""
    kind: Any = type(module)
    return next((name for name in CACHE_NAMES if takes(kind, name)), None)


def with_cache(module: nn.Module, cache: Cache) -> dict[str, Cache]:
    """Make the argument that hands `cache` to the forward of a model, or of a part of one."""
    return {cache_argument(module) or CACHE_NAMES[0]: cache}


def cache_in(model_kwargs: Mapping[str, Any]) -> Any:
    """Find the cache among the arguments of a call, whatever it is called there; None: there is none."""
    return next((model_kwargs[name] for name in CACHE_NAMES if model_kwargs.get(name) is not None), None)


# Methods that are wrapped (integration/hook.py), and the parameters that they must have for that; None: any.
WRAPPED: dict[str, set[str] | None] = {
    "_assisted_decoding": {
        "self", "input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer",
        "inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer", "model_kwargs",
    },
    "_validate_generation_mode": {"self", "generation_mode", "generation_config", "generation_mode_kwargs"},
    "_prepare_generation_config": {"self", "generation_config", "kwargs"},
    "generate": None,
}  # fmt: skip


def wrapped_methods() -> dict[str, Any]:
    """Look up the methods of `GenerationMixin` that are wrapped.

    Raises:
        ChangedTransformers: one is gone, or takes other arguments; the message names it.
    """
    methods = {name: _attribute(GenerationMixin, name, "wraps for assistant_model=drafter") for name in WRAPPED}
    for name, method in methods.items():
        if WRAPPED[name] not in (None, set(inspect.signature(method).parameters)):
            _missing(f"GenerationMixin.{name} with the arguments of 5.17 to 5.24", "wraps for assistant_model=drafter")
    return methods


def plain_decoding(model: PreTrainedModel) -> Callable[..., Any]:
    """Look up the method that decodes prepared inputs greedily or by sampling."""
    return _attribute(model, "_sample", "decodes with where a drafter that is set cannot serve a call")


def attention_of(model: PreTrainedModel) -> str:
    """Name the attention implementation of a model's text part: sdpa and eager take masks as they are given."""
    return _attribute(model.config.get_text_config(), "_attn_implementation", "decides about trees by")


def attention_function(model: PreTrainedModel) -> Callable[..., Any] | None:
    """Look up the function under the name of a model's attention implementation; None for its own (eager)."""
    return import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS.get(attention_of(model))


def supports_sdpa(model_type: type) -> bool:
    """Tell whether a class of models has SDPA attention: Gemma 2, which caps its scores, and gpt-oss have eager alone."""
    return _attribute(model_type, "_supports_sdpa", "chooses the attention of drafters by")


def experts_of(config: PreTrainedConfig) -> str | None:
    """Name the kernel by which a target runs its experts, which an MTP layer takes over."""
    return _attribute(config, "_experts_implementation", "runs the experts of MTP layers by")


def is_recurrent_model(model: PreTrainedModel) -> bool:
    """Tell whether transformers knows a model as one with recurrent states, which its own assisted generation refuses."""
    return _attribute(model, "_is_stateful", "leaves transformers' assisted generation out by")


def keeps_logits(model: PreTrainedModel) -> bool:
    """Tell whether a model's forward takes `logits_to_keep`."""
    return _attribute(model, "_supports_logits_to_keep", "reads a few rows of logits by")()


def has_ordinary_cache(model: PreTrainedModel) -> bool:
    """Tell whether a model reads from a `DynamicCache`, and not from a cache of its own kind."""
    return _attribute(model, "_supports_default_dynamic_cache", "recognises caches that can be cropped by")()


def pad_token_of(generation_config: GenerationConfig) -> Tensor | None:
    """Look up the padding token, as a tensor, that generate writes after texts that have ended; None: there is none."""
    return _attribute(generation_config, "_pad_token_tensor", "pads shorter texts with")


def commit_of(model: PreTrainedModel) -> str | None:
    """Look up the revision on the Hub that a model was loaded from; None for a folder."""
    return getattr(model.config, "_commit_hash", None)


def drops_cache(model: PreTrainedModel) -> bool:
    """Tell whether a forward would drop the cache: gradient checkpointing in training mode does."""
    return any(part.training and vars(part).get("gradient_checkpointing", False) for part in model.modules())


def decodes(model: PreTrainedModel) -> AbstractContextManager:
    """Enter the mode that `generate` decodes in: since 5.23 experts are run by another kernel then, on devices but CPUs."""
    optimise = getattr(model, "_optimize_model_for_decode", None)
    return nullcontext() if optimise is None else optimise()


def wrap_pipelines(is_drafter: Callable[[Any], bool]) -> None:
    """Let pipelines take drafters: their loader asks an assistant for a config, which drafters need not have.

    Args:
        is_drafter: tells whether an object given as `assistant_model` is a drafter.
    """
    base = import_module("transformers.pipelines.base")
    load = getattr(base, "load_assistant_model", None)
    if load is None or getattr(load, "paradraft", False):
        return

    def load_assistant_model(model: Any, assistant_model: Any, assistant_tokenizer: Any) -> tuple[Any, Any]:
        if is_drafter(assistant_model):
            return assistant_model, None
        return load(model, assistant_model, assistant_tokenizer)

    load_assistant_model.paradraft = True  # type: ignore[attr-defined]
    base.load_assistant_model = load_assistant_model  # type: ignore[attr-defined]
