"""A published layout: how a publisher's config describes a drafter. Every key is obeyed, without
effect, or refused by name.

A drafter that ignores a key of its file drafts, and is wrong without a sign: it costs acceptance,
which is not compared.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig

from ...protocol.drafter import FeatureKey
from ..layers import QWEN35
from .layer_configs import PAIRED, ROPE, layers_config, with_draft_layers

# the titles of published kinds
DFLASH, DFLASH2, XPRESS = "DFlash drafter", "DFlash2 drafter", "XPress drafter"
DSPARK, DSPINE = "DSpark drafter", "DSpine drafter"
EAGLE3, PEAGLE, MTP = "EAGLE-3 drafter", "P-EAGLE drafter", "MTP drafter"
PARD2 = "PARD-2 drafter"
WINDOWS = {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"}
# of Gemma 4, whose newer configs have them by layer
FULL_LAYERS = {
    "global_head_dim",
    "num_global_key_value_heads",
}
GATED = "enable_qwen35_gated_q_proj"
# Switches of which one position is served. No tensor's name tells the meaning of the other.
SERVED: dict[str, tuple[Any, ...]] = {
    "attention_sink_bias": (False,),
    GATED: (False,),
    "gated_q_proj": (False,),
    "log_snr_conditioning": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (0, 1),
    "projector_type": ("dflash", "dspark"),
    "shift_label": (False,),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
}
# Keys of its training, keys that the tensors make superfluous, and copies from the target's own
# config.
NO_DIFFERENCE = set(
    "num_jacobi_passes xpress_num_passes xpress_topc xpress_compile_head num_speculative_steps "
    "speculators_version num_anchors max_anchors step_loss_decay loss_decay_gamma ttt_length "
    "confidence_head_alpha pure_draft_prefix_len target_model_type target_text_model_type "
    "target_model_name_or_path embed_requires_grad num_eagle_features "
    "parallel_draft_heads_num_layers attention_mode has_lm_head min_log_snr max_log_snr paradraft "
    "kind attn_output_gate full_attention_interval mamba_ssm_dtype mtp_num_hidden_layers "
    "mtp_use_dedicated_embeddings is_llama_config pretraining_tp unk_token_id unsloth_version "
    "unsloth_fixed transformers.js_config auto_map torch_dtype attn_implementation "
    "_attn_implementation _attn_implementation_autoset tie_word_embeddings head_type torchscript "
    "use_bfloat16 tf_legacy_loss pruned_heads cross_attention_hidden_size add_cross_attention "
    "is_decoder tie_encoder_decoder finetuning_task tokenizer_class prefix sep_token_id "
    "task_specific_params per_layer_config model_type speculators_model_type speculators_config "
    "transformer_layer_config parallel_drafting_mask draft_num_hidden_layers ce_weight "
    "alignment_weight alignment_warmup_steps replacement_layers replacement_probability "
    "replacement_hold_ratio replacement_end_ratio candidate_mass_threshold".split()
)
NO_DIFFERENCE |= PreTrainedConfig().to_dict().keys() | GenerationConfig().to_dict().keys()
# of configs, in addition to the one that describes layers
PARTS = (
    "dflash_config",
    "eagle_config",
    "dspine_config",
)
KINDS_OF_LAYERS = {"full_attention", "sliding_attention"}  # which may turn heads differently
ROPE_KEYS = set(
    "rope_theta rope_type type factor original_max_position_embeddings attention_factor beta_fast "
    "beta_slow mscale mscale_all_dim truncate short_factor long_factor low_freq_factor "
    "high_freq_factor partial_rotary_factor finetuned mrope_section mrope_interleaved".split()
)


class DrafterConfig(PreTrainedConfig):
    """The fields of a drafter's config, which layouts fill in, and no others."""

    has_no_defaults_at_init = True

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(kwargs))}.")
        super().__post_init__()


@dataclass(frozen=True)
class Layout:
    """A publisher's way to write the drafters of a family.

    Attributes:
        name: the publisher's name, for people.
        when: tells whether a config is written so; of a family's layouts the first one that says so
            counts.
        fields: the fields of the drafter's config, each a value, or a function of `Said` that gives
            it. They are read in this order.
        part: the part of the config that is looked into before its top, as "dflash_config"; "" for
            none.
        described: finds the part of the config that describes layers.
        layer_names: the publisher's names of the keys that describe layers, and transformers' own.
        classes: classes that its configs name, and the titles of their kinds.
        tensors: beginnings of tensors' names that the family's layouts before it do not have, and
            ours.
    """

    name: str
    when: Callable[[Mapping[str, Any]], bool]
    fields: Mapping[str, Any]
    part: str = ""
    described: Callable[[Mapping[str, Any]], Mapping[str, Any]] = with_draft_layers
    layer_names: Mapping[str, str] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)

    def read(self, config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
        """Read the fields of a drafter's config from its files.

        Args:
            config: the config as it was read.
            names: our names of the folder's tensors.

        Raises:
            ValueError: something is missing that may not be assumed, a variant that is not served,
                or a key that nothing obeys.
        """
        said = Said(self, config, names)
        values = {
            name: value(said) if callable(value) else value for name, value in self.fields.items()
        }
        check_keys(said)
        return {"layout": self.name, **values}


def matching(layouts: Sequence[Layout], config: Mapping[str, Any]) -> Layout:
    """Choose the layout that a config is written in; the last one takes all others."""
    return next(layout for layout in layouts if layout.when(config))


@dataclass
class Said:
    """A folder's word on its drafter; keys that were asked for are obeyed, where they stand.

    Attributes:
        layout: the layout in which it is written.
        config: the config as it was read.
        names: our names of the folder's tensors.
        asked: the keys that were asked for, by the part in which: "" is the top.
    """

    layout: Layout
    config: Mapping[str, Any]
    names: Collection[str]
    asked: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def __call__(self, *keys: str, default: Any = None) -> Any:
        """Look up the first of some keys that is said, in the layout's own part or at the top."""
        values = [self.only(part, *keys) for part in dict.fromkeys((self.layout.part, ""))]
        return next((value for value in values if value is not None), default)

    def only(self, part: str, *keys: str) -> Any:
        """Look up the first of some keys that is said in one part of the config.

        The part "" is its top. None: none of the keys is said there.
        """
        self.asked[part].update(keys)
        said = (self.config.get(part) or {}) if part else self.config
        return next((said[key] for key in keys if said.get(key) is not None), None)

    @cached_property
    def described(self) -> Mapping[str, Any]:
        """The part of the config that describes layers, by transformers' names."""
        names = self.layout.layer_names
        described = self.layout.described(self.config)
        return {names.get(name, name): value for name, value in described.items()}

    @cached_property
    def layers(self) -> PreTrainedConfig:
        """The config of the drafter's own layers."""
        return layers_config(self.described, self.names)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of attention that its layers have."""
        return tuple(dict.fromkeys(getattr(self.layers, "layer_types", None) or ["full_attention"]))

    def has(self, beginning: str) -> bool:
        """Tell whether there is a tensor whose name begins so."""
        return any(name.startswith(beginning) for name in self.names)


def architecture(config: Mapping[str, Any]) -> str:
    """Look up the first class that a config names; "" for none."""
    return str((config.get("architectures") or [""])[0])


def key(*keys: str, default: Any = None) -> Callable[[Said], Any]:
    """Make a field that reads the first of some keys.

    `default` also stands for 0 and False.
    """
    return lambda said: said(*keys) or default


def outputs(
    *keys: str, offset: int = 0, needed: bool = False
) -> Callable[[Said], tuple[FeatureKey, ...] | None]:
    """Make a field that turns a file's numbers of layers into feature keys.

    Args:
        keys: the names that the numbers may have.
        offset: is added to the numbers, which count outputs then.
        needed: whether there have to be numbers; else None stands for none.

    Raises:
        ValueError: there have to be numbers, or a number is below the first one.
    """

    def read(said: Said) -> tuple[FeatureKey, ...] | None:
        if not (ids := said(*keys)):
            if needed:
                raise ValueError(
                    f"This {said.layout.name} drafter names no layers ({keys[0]}), and there is no "
                    "default: save or download it again."
                )
            return None
        if min(ids) + offset < -1:
            raise ValueError(
                f"The drafter's layer list is {ids}, which counts from {-1 - offset}: save or "
                "download it again."
            )
        return tuple(index + offset for index in ids)

    return read


def check_keys(said: Said) -> None:
    """Refuse a config with a key or a switch that is not served.

    A key is served if its layout obeys it, a switch in some positions only.

    Args:
        said: the word of a published drafter, after all that counts was asked for.

    Raises:
        ValueError: it has one.
    """
    gated = {GATED} if said.layers.model_type == QWEN35 else ()  # as these layers are
    config = without(said.config, gated)
    described = config.get("transformer_layer_config")
    of_layers = ROPE | WINDOWS | FULL_LAYERS | type(said.layers)().to_dict().keys()
    of_layers |= said.layout.layer_names.keys()
    parts = {*PARTS, said.layout.part} - {""}
    everywhere = NO_DIFFERENCE | PAIRED.keys() | parts
    top = everywhere | said.asked[""]
    if isinstance(described, Mapping):
        _check(described, top | of_layers | _copied(described), "transformer_layer_config.")
    else:
        top |= of_layers | _copied(config)
    _check(config, top, "")
    for name in parts:
        _check(config.get(name) or {}, everywhere | said.asked[name], f"{name}.")
    check_rope(config)
    check_rope(described or {})


def check_rope(config: Mapping[str, Any]) -> None:
    """Refuse rotary parameters of a name that transformers does not have.

    Raises:
        ValueError: it has one.
    """
    for name in ("rope_parameters", "rope_scaling"):
        turned = config.get(name) or {}
        _check(turned, ROPE_KEYS | KINDS_OF_LAYERS, f"{name}.")
        for kind in KINDS_OF_LAYERS:
            _check(turned.get(kind) or {}, ROPE_KEYS, f"{name}.")


def check_described(config: Mapping[str, Any], known: set[str]) -> None:
    """Refuse unknown keys of a config whose layers the target's own class reads.

    Arguments as for `check_keys`, and the keys that are obeyed.

    Raises:
        ValueError: it has one.
    """
    _check(config, known | NO_DIFFERENCE | PAIRED.keys() | ROPE, "")
    check_rope(config)


def without(config: Mapping[str, Any], ignored: Iterable[str]) -> dict[str, Any]:
    """Leave keys out of a config and of its parts, whose user knows that they make no difference.

    Args:
        config: the config as it was read.
        ignored: names, as `check_keys` says them, or their last parts.
    """
    last = {name.split(".")[-1] for name in ignored}
    return {
        name: without(value, last) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in last
    }


def _copied(config: Mapping[str, Any]) -> set[str]:
    """List the fields of the model that a config was copied from.

    The publishers' layers (Qwen3's, Llama's) do not use them.
    """
    if (model_type := config.get("model_type")) not in CONFIG_MAPPING:
        return set()
    return set(inspect.signature(CONFIG_MAPPING[model_type]).parameters)


def _check(config: Mapping[str, Any], known: set[str], inside: str) -> None:
    for name, value in config.items():
        if value is None:
            continue
        if name in SERVED and value not in SERVED[name]:
            raise ValueError(
                f"This drafter's config says {inside}{name} = {value!r:.50}, a variant that is not "
                "served."
            )
        if name not in known and name not in SERVED:
            raise ValueError(
                f"This drafter's config has a key that nothing here obeys: {inside}{name} = "
                f"{value!r:.50}. Ignored, it may make the drafter guess wrongly without a sign. "
                f"Where it makes no difference, pass ignore_keys=[{name!r}]."
            )
