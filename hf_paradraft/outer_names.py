"""The names of transformers that drafters, training, and the doors into `generate` rely on; those
of decoding are in `names`.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn
from transformers import CompileConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel

from .names import OUTPUT_CACHE, attention_of, attribute, inside, missing

# Parts of models that drafters are made of.
ACT2FN = inside("activations", "ACT2FN", "checks the activations of configs with")
Gemma4TextScaledWordEmbedding = inside(
    "models.gemma4.modeling_gemma4",
    "Gemma4TextScaledWordEmbedding",
    "makes the embeddings of Gemma 4 drafters of",
)
apply_rotary_pos_emb = inside(
    "models.llama.modeling_llama", "apply_rotary_pos_emb", "turns the keys of blocks with"
)
# Training and files.
find_adapter_config_file = inside("utils", "find_adapter_config_file", "recognises adapters with")
get_available_reporting_integrations = inside(
    "integrations", "get_available_reporting_integrations", "knows reporters by"
)
LengthGroupedSampler = inside(
    "trainer_pt_utils", "LengthGroupedSampler", "orders training samples with"
)
# since 5.24 assisted generation compiles its verification over static caches
ASSISTS_COMPILED = OUTPUT_CACHE == "cache"


def compiles_everywhere(config: CompileConfig) -> CompileConfig:
    """Let transformers compile on every device, where it would do so only on GPUs."""
    config._compile_all_devices = True
    return config


def innermost(target: nn.Module) -> PreTrainedModel:
    """Find the model of transformers inside of its wrappers.

    Raises:
        ValueError: there is none.
    """
    inner: Any = target
    while not isinstance(inner, PreTrainedModel):
        # of DDP, of torch.compile
        within = getattr(inner, "module", getattr(inner, "_orig_mod", None))
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else within
        if inner is None:
            raise ValueError(
                f"A drafter is set on a model of transformers, and {type(target).__name__} holds "
                "none."
            )
    return inner


# Methods that are wrapped (integration/hook.py), and the parameters that they must have for that;
# None: any.
WRAPPED: dict[str, set[str] | None] = {
    "_assisted_decoding": {
        "self", "input_ids", "logits_processor", "stopping_criteria", "generation_config",
        "synced_gpus", "streamer",
        "inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer", "model_kwargs",
    },
    "_validate_generation_mode": {"self", "generation_mode", "generation_config",
    "generation_mode_kwargs"},
    "_prepare_generation_config": {"self", "generation_config", "kwargs"},
    "generate": None,
}  # fmt: skip


def wrapped_methods() -> dict[str, Any]:
    """Look up the methods of `GenerationMixin` that are wrapped.

    Raises:
        ChangedTransformers: one is gone, or takes other arguments; the message names it.
    """
    methods = {
        name: attribute(GenerationMixin, name, "wraps for assistant_model=drafter")
        for name in WRAPPED
    }
    for name, method in methods.items():
        if WRAPPED[name] not in (None, set(inspect.signature(method).parameters)):
            missing(
                f"GenerationMixin.{name} with the arguments of 5.17 to 5.24",
                "wraps for assistant_model=drafter",
            )
    return methods


def plain_decoding(model: PreTrainedModel) -> Callable[..., Any]:
    """Look up the method that decodes prepared inputs greedily or by sampling."""
    return attribute(
        model, "_sample", "decodes with where a drafter that is set cannot serve a call"
    )


def attention_function(model: PreTrainedModel) -> Callable[..., Any] | None:
    """Look up the function of a model's attention implementation; None for eager.

    The eager one is the model's own.
    """
    return import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS.get(
        attention_of(model)
    )


def experts_of(config: PreTrainedConfig) -> str | None:
    """Name the kernel by which a target runs its experts, which an MTP layer takes over."""
    return attribute(config, "_experts_implementation", "runs the experts of MTP layers by")


def is_recurrent_model(model: PreTrainedModel) -> bool:
    """Tell whether transformers knows a model as one with recurrent states.

    Assisted generation of transformers refuses such models.
    """
    return attribute(model, "_is_stateful", "leaves transformers' assisted generation out by")


def keeps_logits(model: PreTrainedModel) -> bool:
    """Tell whether a model's forward takes `logits_to_keep`."""
    return attribute(model, "_supports_logits_to_keep", "reads a few rows of logits by")()


def has_ordinary_cache(model: PreTrainedModel) -> bool:
    """Tell whether a model reads from a `DynamicCache`, and not from a cache of its own kind."""
    return attribute(
        model, "_supports_default_dynamic_cache", "recognises caches that can be cropped by"
    )()


def drops_cache(model: PreTrainedModel) -> bool:
    """Tell whether a forward would drop the cache: gradient checkpointing in training mode does."""
    return any(
        part.training and vars(part).get("gradient_checkpointing", False)
        for part in model.modules()
    )


def commit_of(model: PreTrainedModel) -> str | None:
    """Look up the revision on the Hub that a model was loaded from; None for a folder."""
    return getattr(model.config, "_commit_hash", None)


def wrap_pipelines(is_drafter: Callable[[Any], bool]) -> None:
    """Let pipelines take drafters as `assistant_model`.

    Their loader asks an assistant for a config, which drafters need not have.

    Args:
        is_drafter: a function that tells whether an `assistant_model` is a drafter.
    """
    base = import_module("transformers.pipelines.base")
    load = getattr(base, "load_assistant_model", None)
    if load is None or hasattr(load, "paradraft"):
        return

    def load_assistant_model(
        model: Any, assistant_model: Any, assistant_tokenizer: Any
    ) -> tuple[Any, Any]:
        if is_drafter(assistant_model):
            return assistant_model, None
        return load(model, assistant_model, assistant_tokenizer)

    load_assistant_model.paradraft = True  # type: ignore[attr-defined]
    base.load_assistant_model = load_assistant_model  # type: ignore[attr-defined]
