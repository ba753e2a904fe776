"""One record for every published layout of DFlash and DSpark: what a file's numbers mean, settled when it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from ...protocol.drafter import FeatureKey
from ..config_file import transformers_config
from ..gemma4 import gemma4_config, is_gemma4
from ..published import DEEPSPEC

MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
PROJECTORS = (None, "dflash", "dspark")


@dataclass
class BlockConfig:
    """A drafter of blocks.

    Attributes:
        layers: of its own transformer layers, Qwen3's, Llama's or Gemma 4's.
        features: what it reads.
        block_size: B, rows of a block, the newest token's included.
        mask_token_id: of the other rows.
        fill_in: row `k` guesses the token at its own place, so the first guesses none; else the one behind it. None: the
            file does not say, and the target's own output has to decide.
        assumed: the value of `fill_in` that was taken where the target's output left it open; it is not saved.
        target_hidden_size: d_t.
        target_layers: L, if it is written.
        causal: kinds of layers whose rows see only those before them in the block.
        window_from_anchor: sliding windows are counted from the newest token, not from each row.
        vocab_size: V of the target.
        draft_vocab_size: V', where it is smaller.
        markov_rank, markov_type: of the head that looks at the token before; 0 for none.
        confidence, confidence_with_markov: whether it says how sure it is, and knows the token before then.
        softcap, embedding_scale, logit_scale: of its own, instead of the target's.
        layout: whose it is.
        notes: what was assumed.
    """

    layers: PreTrainedConfig
    features: tuple[FeatureKey, ...]
    block_size: int
    mask_token_id: int
    fill_in: bool | None
    target_hidden_size: int
    target_layers: int | None = None
    causal: tuple[str, ...] = ()
    window_from_anchor: bool = False
    vocab_size: int = 0
    draft_vocab_size: int | None = None
    markov_rank: int = 0
    markov_type: str = "vanilla"
    confidence: bool = False
    confidence_with_markov: bool = False
    softcap: float | None = None
    embedding_scale: float = 1.0
    logit_scale: float | None = None
    layout: str = "speculators"
    assumed: bool | None = None
    notes: list[tuple[str, str]] = field(default_factory=list)

    @property
    def num_drafts(self) -> int:
        """Tokens that a block guesses."""
        return self.block_size - 1 if self.fill_in is not False else self.block_size


def layers_config(described: Mapping[str, Any], tensors: Iterable[str]) -> PreTrainedConfig:
    """The layers' own config, whose class the tensors decide: Qwen3's norm queries and keys, Gemma 4's more, Llama's nothing.

    Raises:
        ValueError: a rotary embedding of another kind, or something that is no layer's config.
    """
    if described.get("is_neox_style") is False:
        raise ValueError("This drafter's rotary embedding is interleaved (is_neox_style false), which is not served.")
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        if not isinstance(size := described.get(name), int):
            raise ValueError(f"The drafter's config has no {name} (it is {size!r}): save or download it again.")
    if is_gemma4(described, tensors):
        return gemma4_config(described)
    kind = Qwen3Config if any(name.endswith("q_norm.weight") for name in tensors) else LlamaConfig
    known = kind().to_dict().keys() | {"rope_theta", "rope_scaling", "partial_rotary_factor"}
    own = {name: value for name, value in described.items() if name in known and name not in ("model_type", "dtype")}
    kinds = described.get("layer_types")
    if kinds is not None:  # Llama's own config has none, and goes by them all the same
        own["layer_types"] = kinds[: described.get("num_hidden_layers", len(kinds))]
    if "sliding_attention" in (own.get("layer_types") or ()):
        if described.get("sliding_window") is None:
            raise ValueError("The drafter's config has sliding layers and no sliding_window: save or download it again.")
        own |= {"sliding_window": described["sliding_window"], "use_sliding_window": True}
    elif kind is LlamaConfig:
        own.pop("layer_types", None)
    own.setdefault("head_dim", own["hidden_size"] // own["num_attention_heads"])
    own.setdefault("num_key_value_heads", own["num_attention_heads"])
    if own["head_dim"] is None:
        own["head_dim"] = own["hidden_size"] // own["num_attention_heads"]
    return transformers_config(kind, own)


def _mask_token(*places: Mapping[str, Any]) -> int:
    for place in places:
        for name in MASK_KEYS:
            if place.get(name) is not None:
                return place[name]
    raise ValueError(
        "This drafter's config names no mask token (mask_token_id): it cannot be guessed. Ask its publisher, and add it there."
    )


def _layers_of(ids: Any, offset: int) -> tuple[FeatureKey, ...] | None:
    """Feature keys from a file's numbers, which count the outputs of layers after `offset` is added."""
    if ids is None:
        return None
    if min(ids) + offset < -1:
        raise ValueError(f"The drafter's layer list is {ids}, which counts from {-1 - offset}: save or download it again.")
    return tuple(index + offset for index in ids)


def spread(count: int, layers: int) -> tuple[int, ...]:
    """z-lab's layers where a config names none: `count` of them, evenly from 1 to L - 3."""
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + index * (layers - 4) / (count - 1)) for index in range(count))


def block_config(config: Mapping[str, Any], tensors: Iterable[str]) -> BlockConfig:
    """What a `config.json` of DFlash or DSpark says, whoever wrote it.

    Args:
        config: as it was read.
        tensors: names of the folder's tensors.

    Raises:
        ValueError: something is missing that may not be assumed, or a variant that is not served.
    """
    names = list(tensors)
    if config.get("speculators_model_type") is not None:
        return _speculators(config, names)
    if config.get("model_type") == "muse_glimmer_assistant":
        return _transformers(config, names)
    first = (config.get("architectures") or [""])[0]
    zlab = first in ("DFlashDraftModel", "DSparkDraftModel")  # which name their layers at the top in some exports
    if first in DEEPSPEC or ("target_layer_ids" in config and "dflash_config" not in config and not zlab):
        return _deepspec(config, names)
    return _zlab(config, names)


def _common(config: Mapping[str, Any], nested: Mapping[str, Any], names: list[str], layers: PreTrainedConfig) -> dict[str, Any]:
    """What all layouts have in common: sizes, and heads."""
    merged = {**config, **nested}
    rank = merged.get("markov_rank") or 0
    has_markov = any(name.startswith(("markov_head.", "logit_head.")) for name in names)
    if names and bool(rank) != has_markov:
        raise ValueError(f"The config says markov_rank={rank}, but the tensors {'have' if has_markov else 'lack'} that head.")
    kind = merged.get("markov_head_type") or "vanilla"
    if kind not in ("vanilla", "gated", "rnn"):
        raise ValueError(f"A Markov head of type {kind!r} is not served: vanilla, gated and rnn are.")
    has_confidence = any(name.startswith("confidence_head.") for name in names)
    return {
        "layers": layers,
        "target_hidden_size": config.get("target_hidden_size") or layers.hidden_size,
        "target_layers": config.get("num_target_layers"),
        "vocab_size": layers.vocab_size,
        "markov_rank": int(rank),
        "markov_type": kind,
        "confidence": has_confidence or (not names and bool(merged.get("enable_confidence_head"))),
        "confidence_with_markov": bool(rank) and bool(merged.get("confidence_head_with_markov", rank)),
    }


def _speculators(config: Mapping[str, Any], names: list[str]) -> BlockConfig:
    described = config.get("transformer_layer_config")
    if not isinstance(described, Mapping):
        raise ValueError("A speculators config describes its layers under transformer_layer_config, and this one does not.")
    layers = layers_config(described, names or ["q_norm.weight"])
    dspark = config["speculators_model_type"] == "dspark"
    features = _layers_of(config.get("aux_hidden_state_layer_ids"), -1)
    if features is None:
        raise ValueError("This speculators drafter names no layers (aux_hidden_state_layer_ids), and there is no default.")
    said = config.get("sample_from_anchor")
    kinds = set(getattr(layers, "layer_types", None) or ["full_attention"])
    sliding = "sliding_attention" in kinds and not config.get("sliding_window_non_causal")
    notes = []
    if said is None:
        notes.append(
            ("anchor", "not in the config: settled on the target's own output" if dspark else "not in the config: fill-in")
        )
    return BlockConfig(
        **_common(config, {}, names, layers),
        features=features,
        block_size=_block_size(config),
        mask_token_id=_mask_token(config),
        fill_in=(None if dspark else True) if said is None else not said,
        causal=("sliding_attention",) if sliding else (),
        window_from_anchor=True,
        draft_vocab_size=_smaller(config.get("draft_vocab_size"), layers.vocab_size),
        layout="speculators",
        notes=notes,
    )


def _transformers(config: Mapping[str, Any], names: list[str]) -> BlockConfig:
    kinds = config.get("layer_types") or ["sliding_attention"] * config.get("num_hidden_layers", 5)
    layers = layers_config({**config, "layer_types": kinds, "use_sliding_window": True}, names or ["q_norm.weight"])
    features = _layers_of(config.get("target_layer_ids"), 0)
    if features is None:
        raise ValueError("This DFlash assistant names no layers (target_layer_ids): save it again.")
    return BlockConfig(
        **_common(config, {}, names, layers),
        features=features,
        block_size=_block_size(config),
        mask_token_id=_mask_token(config),
        fill_in=True,
        layout="transformers",
    )


def _deepspec(config: Mapping[str, Any], names: list[str]) -> BlockConfig:
    features = _layers_of(config.get("target_layer_ids"), 0)
    if features is None:
        raise ValueError("This DeepSpec drafter names no layers (target_layer_ids): download it again.")
    return BlockConfig(
        **_common(config, {}, names, layers_config(config, names or ["q_norm.weight"])),
        features=features,
        block_size=_block_size(config),
        mask_token_id=_mask_token(config),
        fill_in=False,
        softcap=config.get("final_logit_softcapping"),
        layout="DeepSpec",
    )


def _zlab(config: Mapping[str, Any], names: list[str]) -> BlockConfig:
    nested = config.get("dflash_config") or {}
    projector = nested.get("projector_type")
    if projector not in PROJECTORS or nested.get("shift_label") or nested.get("attention_sink_bias"):
        raise ValueError(f"A relative of DFlash (projector_type {projector!r}) that is not served.")
    described = dict(config)
    swa = bool(nested.get("use_swa"))
    if swa and not config.get("layer_types"):
        described["layer_types"] = ["sliding_attention"] * config.get("num_hidden_layers", 0)
        described["sliding_window"] = nested.get("swa_window_size") or config.get("sliding_window")
    if "sliding_attention" in (described.get("layer_types") or ()):
        described["use_sliding_window"] = True
    layers = layers_config(described, names or ["q_norm.weight"])
    kinds = tuple(dict.fromkeys(getattr(layers, "layer_types", None) or ["full_attention"]))
    said = next((value for value in (config.get("is_causal"), nested.get("causal")) if value is not None), None)
    if said is not None:
        causal = kinds if said else ()
    else:
        causal = () if swa and not config.get("layer_types") else tuple(kind for kind in kinds if kind == "sliding_attention")
    features, notes = _layers_of(nested.get("target_layer_ids", config.get("target_layer_ids")), 0), []
    if features is None:
        count, total = config.get("num_hidden_layers"), config.get("num_target_layers")
        if count is None or total is None:
            raise ValueError("This DFlash drafter names neither its layers (target_layer_ids) nor num_target_layers.")
        features = spread(count, total)
        notes.append(("layers", "default: none are named"))
    dspark = projector == "dspark" or any(name.startswith(("markov_head.", "logit_head.")) for name in names)
    dspark = dspark or (config.get("architectures") or [""])[0] == "DSparkDraftModel"
    return BlockConfig(
        **_common(config, nested, names, layers),
        features=features,
        block_size=_block_size(nested, config),
        mask_token_id=_mask_token(nested, config),
        fill_in=not dspark,
        causal=causal,
        softcap=nested.get("final_logit_softcapping"),
        embedding_scale=nested.get("input_embedding_scale") or 1.0,
        logit_scale=nested.get("output_multiplier"),
        layout="SpecForge" if dspark else "z-lab",
        notes=notes,
    )


def _block_size(*places: Mapping[str, Any]) -> int:
    for place in places:
        if (place.get("block_size") or 0) >= 2:
            return place["block_size"]
    raise ValueError("The drafter's config has no block_size of at least 2: save or download it again.")


def _smaller(size: Any, vocab_size: int) -> int | None:
    return size if size is not None and size < vocab_size else None
