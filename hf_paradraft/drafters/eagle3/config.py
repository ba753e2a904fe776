"""EAGLE-3's config: the features that its layers read, and their norms."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, PreTrainedModel

from ...decoding.features import layers_of
from ...protocol.drafter import FeatureKey
from ..formats.fields import VERSION, layer_values
from ..formats.layout import DrafterConfig
from ..layers import GEMMA4, sizes_of

# what norms there are, and what is normed
FLAGS = "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"


class Eagle3Config(DrafterConfig):
    """An autoregressive head on fused features, or its parallel relative.

    Its layers are Llama's, Qwen3's or Gemma 4's; the first one reads twice the width.

    Attributes:
        features: the features that it reads; None: the default for the target's number of layers.
        ambiguous: a list of layers of which the file does not say how it counts; settled by the
            number of the target's layers.
        norm_before_residual: the normed features go around attention, instead of the raw ones.
        norm_before_fc: one norm over all features.
        fc_norm: one norm for each.
        norm_output: the state that is fed back is the normed one.
        mask_token_id: P-EAGLE's; None for EAGLE-3.
        num_draft_tokens: K as trained, if it is written.
    """

    features: tuple[FeatureKey, ...] | None = None
    ambiguous: tuple[FeatureKey, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token_id: int | None = None
    num_draft_tokens: int | None = None

    @property
    def num_features(self) -> int:
        """m."""
        return len(self.features or self.ambiguous or ("low", "middle", "high"))

    @property
    def parallel(self) -> bool:
        """Whether it is P-EAGLE."""
        return self.mask_token_id is not None

    def particulars(self) -> list[tuple[str, Any]]:
        """List the facts that only these drafters have, as (name, value) pairs."""
        flags = [name for name in FLAGS if getattr(self, name)]
        masks = [("mask token", self.mask_token_id)] if self.parallel else []
        return [("flags", ", ".join(flags) or "none"), *masks]

    def features_for(self, layers: int) -> tuple[FeatureKey, ...]:
        """Choose the features that it reads of a target of so many layers.

        Raises:
            ValueError: its list of layers can be read in two ways.
        """
        if self.features is not None:
            return self.features
        # outputs; entries 2, L // 2, L - 3 of transformers' tuple
        default = (1, layers // 2 - 1, layers - 4)
        if self.ambiguous in (None, default, tuple(key + 1 for key in default)):
            return default
        raise ValueError(
            f"This drafter reads layers {list(self.ambiguous)}, and its file does not say whether "
            "these count outputs of layers or inputs. Set drafter.features to the outputs of "
            f"layers that it was trained on: {self.ambiguous}, or each less one."
        )

    def saved(self, drafter: Any) -> dict[str, Any]:
        """Make the `config.json` of its drafter, in the speculators layout."""
        if self.layers.model_type == GEMMA4:
            raise ValueError(
                "The speculators layout has no layers of Gemma 4, as this drafter has: keep its "
                "own files."
            )
        if not drafter.features:
            raise ValueError(
                "Which layers this drafter reads depends on its target: attach(target) first."
            )
        return {
            "speculators_model_type": "peagle" if self.parallel else "eagle3",
            "architectures": ["PEagleSpeculator" if self.parallel else "Eagle3Speculator"],
            "transformer_layer_config": layer_values(self.layers),
            "eagle_aux_hidden_state_layer_ids": [
                key + 1 for key in drafter.features if isinstance(key, int)
            ],
            "vocab_size": self.vocab_size,
            "draft_vocab_size": drafter.num_guesses,
            "target_hidden_size": self.target_hidden_size,
            "num_target_layers": self.target_layers,
            **{name: getattr(self, name) for name in FLAGS},
            "embed_requires_grad": drafter.embedding is not None,
            "mask_token_id": self.mask_token_id,
            "speculators_version": VERSION,
        }

    @classmethod
    def for_target(cls, target: PreTrainedModel, num_layers: int, **options: Any) -> Eagle3Config:
        """Make the config of an untrained EAGLE-3.1 drafter, as `Eagle3Drafter.from_target`.

        It has a norm for each state that it reads, and normed states are fed back; `options` are
        further fields.
        """
        config, total = target.config.get_text_config(), len(layers_of(target))
        if total < 7:
            raise ValueError(
                f"EAGLE-3 reads a low, a middle and a high layer, and this target has {total} in "
                "all: 7 are needed."
            )
        return cls(
            layers=LlamaConfig(**sizes_of(target), num_hidden_layers=num_layers),
            target_hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            features=(1, total // 2 - 1, total - 4),
            target_layers=total,
            fc_norm=True,
            norm_output=True,
            **options,
        )
