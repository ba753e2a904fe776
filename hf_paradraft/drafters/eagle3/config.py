"""One record for every published layout of EAGLE-3 and P-EAGLE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from ...protocol.drafter import FeatureKey
from ..dflash.config import MASK_KEYS, layers_config
from ..gemma4 import GEMMA4


@dataclass
class Eagle3Config:
    """An autoregressive head on fused features, or its parallel relative.

    Attributes:
        layers: of its own transformer layers, Llama's, Qwen3's or Gemma 4's; the first one reads twice the width.
        features: what it reads; None: the default, which depends on how many layers the target has.
        ambiguous: a list of layers of which the file does not say how it counts; settled by the number of the target's layers.
        num_features: m.
        target_hidden_size: d_t.
        target_layers: L, if it is written.
        vocab_size: V of the target.
        draft_vocab_size: V', where it is smaller.
        norm_before_residual: the normed features go on beside attention, instead of the raw ones.
        norm_before_fc: one norm over all features.
        fc_norm: one norm for each.
        norm_output: the state that is fed back is the normed one.
        mask_token_id: P-EAGLE's; None for EAGLE-3.
        num_draft_tokens: K as trained, if it is written.
        softcap: of its own logits.
        layout: whose it is.
        notes: what was assumed.
    """

    layers: PreTrainedConfig
    features: tuple[FeatureKey, ...] | None
    num_features: int
    target_hidden_size: int
    vocab_size: int
    ambiguous: tuple[int, ...] | None = None
    target_layers: int | None = None
    draft_vocab_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token_id: int | None = None
    num_draft_tokens: int | None = None
    softcap: float | None = None
    layout: str = "speculators"
    notes: list[tuple[str, str]] = field(default_factory=list)

    @property
    def parallel(self) -> bool:
        """Whether it is P-EAGLE."""
        return self.mask_token_id is not None

    def features_for(self, layers: int) -> tuple[FeatureKey, ...]:
        """What it reads of a target of so many layers.

        Raises:
            ValueError: its list of layers can be read in two ways.
        """
        low, middle, high = 1, layers // 2 - 1, layers - 4  # outputs; entries 2, L // 2, L - 3 of transformers' tuple
        if self.features is not None:
            return self.features
        if self.ambiguous is None or list(self.ambiguous) == [low, middle, high]:
            return (low, middle, high)
        if list(self.ambiguous) == [low + 1, middle + 1, high + 1]:
            return (low, middle, high)
        raise ValueError(
            f"This drafter reads layers {list(self.ambiguous)}, and its file does not say whether these count outputs of layers "
            f"or inputs. Set drafter.features to the outputs of layers that it was trained on: {self.ambiguous}, or each "
            "less one."
        )


def eagle3_config(config: Mapping[str, Any], tensors: Iterable[str]) -> Eagle3Config:
    """What a `config.json` of EAGLE-3 or P-EAGLE says, whoever wrote it.

    Args:
        config: as it was read.
        tensors: names of the folder's tensors.

    Raises:
        ValueError: something is missing that may not be assumed, or a variant that is not served.
    """
    names = list(tensors)
    described = config.get("transformer_layer_config")
    speculators = isinstance(described, Mapping)
    described = dict(described) if speculators else dict(config)
    if not speculators and "draft_num_hidden_layers" in config:
        described["num_hidden_layers"] = config["draft_num_hidden_layers"]
    layers = layers_config(described, names)
    nested = config.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise ValueError(
            "This EAGLE drafter reads the last state alone (use_aux_hidden_state false): a variant that is not served."
        )
    parallel = any(name.split(".")[-1] == "mask_hidden" for name in names) or config.get("speculators_model_type") == "peagle"
    mask = next((config[key] for key in MASK_KEYS if config.get(key) is not None), None)
    if parallel and mask is None:
        raise ValueError("This P-EAGLE drafter's config names no mask token (mask_token_id): it cannot be guessed.")
    record = Eagle3Config(
        layers=layers,
        features=None,
        num_features=3,
        target_hidden_size=config.get("target_hidden_size") or layers.hidden_size,
        vocab_size=config.get("vocab_size") or layers.vocab_size,
        target_layers=config.get("num_target_layers"),
        norm_before_residual=bool(config.get("norm_before_residual", nested.get("norm_before_residual", False))),
        norm_before_fc=bool(config.get("norm_before_fc", nested.get("norm_before_fc", False))) or "input_norm.weight" in names,
        fc_norm=bool(config.get("fc_norm", False)) or "fc_norm.0.weight" in names,
        norm_output=bool(config.get("norm_output", False)),
        mask_token_id=mask if parallel else None,
        softcap=config.get("final_logit_softcapping") if layers.model_type == GEMMA4 else None,
        layout="speculators" if speculators else "SafeAI or SpecForge",
    )
    record.draft_vocab_size = config.get("draft_vocab_size")
    if record.draft_vocab_size is not None and record.draft_vocab_size >= record.vocab_size:
        record.draft_vocab_size = None
    return _with_features(record, config, nested)


def _with_features(record: Eagle3Config, config: Mapping[str, Any], nested: Mapping[str, Any]) -> Eagle3Config:
    inputs = config.get("eagle_aux_hidden_state_layer_ids")
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or []
    record.num_draft_tokens = next((method.get("speculative_tokens") for method in methods), None)
    if record.layout == "speculators" and inputs is not None:
        record.features = tuple(index - 1 for index in inputs)
    elif (outputs := config.get("target_layer_ids")) is not None:
        record.features, record.layout = tuple(outputs), "DeepSpec"
        record.num_draft_tokens = config.get("ttt_length")
    elif (listed := nested.get("eagle_aux_hidden_state_layer_ids") or inputs) is not None:
        record.ambiguous = tuple(listed)
        record.notes.append(("layers", f"{list(listed)}, counted as outputs or inputs: settled by the target's number of layers"))
    else:
        record.notes.append(("layers", "default: 2, L // 2 and L - 3 of the target's tuple of states, for none are named"))
    chosen = record.features if record.features is not None else record.ambiguous
    if chosen is not None:
        if any(isinstance(layer, int) and layer < -1 for layer in chosen):
            raise ValueError(f"The drafter's layer list is {inputs}, which counts from 0: save or download it again.")
        record.num_features = len(chosen)
    return record
