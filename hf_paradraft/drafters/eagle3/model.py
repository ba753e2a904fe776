"""EAGLE-3: a decoder layer over fused hidden states of the target, fed with its own states as it
goes on (Li et al., 2025).

Row `j` is made of token `j + 1` and of the features of token `j`, and guesses token `j + 2`. The
next guess stands after the drafter's own state of the row before. P-EAGLE feeds masks there
instead, all in one forward (AWS, 2026).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import LongTensor, Tensor, nn
from transformers import Cache, PreTrainedModel

from ...decoding.features import layers_of
from ...names import with_cache
from ...protocol import SpeculationConfig
from ...protocol.drafter import FeatureKey
from ..feature_drafter import FeatureDrafter
from ..formats.fields import EAGLE3_LAYOUT
from ..formats.layout import EAGLE3, PEAGLE
from ..formats.publishers import EAGLE3_LAYOUTS
from ..layers import GEMMA4, after_attention, turns
from ..reading.network import Mask, RowModel, side_by_side
from .config import Eagle3Config


class Eagle3Drafter(FeatureDrafter, RowModel):
    """EAGLE-3, or P-EAGLE, as `assistant_model`.

    Args:
        config: its config.
        vocabulary: int64 `(V',)`, the target's ids that it can guess; default: all.
        own_embedding, own_head: whether it has an embedding and a head of its own.
    """

    kind = "eagle3"
    config_class = Eagle3Config
    config: Eagle3Config
    title = EAGLE3
    also_known_as = (PEAGLE,)
    layouts = EAGLE3_LAYOUTS
    saved_names = EAGLE3_LAYOUT.tensors
    training_options = "Eagle3Training"
    shift = 1

    def __init__(
        self,
        config: Eagle3Config,
        vocabulary: LongTensor | None = None,
        own_embedding: bool = False,
        own_head: bool = False,
    ):
        self.begin_as(config, vocabulary, own_embedding or config.parallel, own_head)
        layers, norm = config.layers, type(self.stack.norm)
        width = self.fc.in_features
        first = self.stack.layers[0].self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            if (linear := getattr(first, name)) is not None:  # Gemma 4's values may be its keys
                sizes = 2 * layers.hidden_size, linear.out_features
                setattr(first, name, nn.Linear(*sizes, bias=linear.bias is not None))
        self.input_norm = norm(width, layers.rms_norm_eps) if config.norm_before_fc else None
        norms = [
            norm(config.target_hidden_size, layers.rms_norm_eps) for _ in range(config.num_features)
        ]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, width)) if config.parallel else None
        self.speculation_config = SpeculationConfig(
            config.num_draft_tokens or (8 if config.parallel else 5)
        )
        self.extends = not config.parallel
        self.settled: tuple[FeatureKey, ...] = ()  # as the last target's number of layers decided
        self.eval()

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        num_draft_tokens: int = 5,
        num_layers: int = 1,
        vocabulary: LongTensor | None = None,
    ) -> Eagle3Drafter:
        """Make an untrained drafter attached to `target`, with the target's embedding and head.

        Args:
            target: a decoder-only causal LM of seven layers at least.
            num_draft_tokens: K that it is trained for.
            num_layers: its own layers, Llama's in the target's sizes.
            vocabulary: int64 `(V',)`, the ids that it guesses; default: all.

        Raises:
            ValueError: a target with too few layers to read three of.
        """
        size = None if vocabulary is None else len(vocabulary)
        config = Eagle3Config.for_target(
            target, num_layers, draft_vocab_size=size, num_draft_tokens=num_draft_tokens
        )
        return cls(config, vocabulary).started_beside(target)

    @classmethod
    def mend(cls, weights: dict[str, Tensor]) -> None:
        """Implement `FeatureDrafter.mend`: masks come in several shapes."""
        if (mask := weights.get("mask_hidden")) is not None:
            weights["mask_hidden"] = mask.reshape(1, 1, -1)

    def attach(self, target: PreTrainedModel) -> None:
        """Implement `FeatureDrafter.attach`; layers that a file does not name are settled here."""
        features = self.features_of(target)
        if len(features) != self.config.num_features:
            raise ValueError(
                f"This {self.title} reads {self.config.num_features} layers, not {len(features)}."
            )
        super().attach(target)
        if self.features == self.settled:
            self.features = self.settled = features

    def features_of(self, target: PreTrainedModel) -> tuple[FeatureKey, ...]:
        """Implement `FeatureDrafter.features_of`: the file's or the user's, or the default."""
        if self.features != self.settled:
            return self.features
        return self.config.features_for(len(layers_of(target)))

    def _normed(self, states: Tensor) -> Tensor:
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        return self.fc(states)

    def fuse(self, features: dict[FeatureKey, Tensor]) -> Tensor:
        """Fuse tokens' features, the target's hidden states, to `(…, hidden)`."""
        return self._normed(side_by_side(features, self.features, self))

    def text(self, ids: LongTensor, fused: Tensor) -> Tensor:
        """Put embeddings and features side by side, `(B, M, 2 · hidden)`."""
        return torch.cat([self.embed(ids), fused], dim=-1)

    def masks(self, fused: Tensor, count: int) -> Tensor:
        """Implement `RowModel.masks`: P-EAGLE's masks, all alike."""
        ids = torch.full((len(fused), count), self.config.mask_token_id, device=self.device)
        return self.text(ids, self._normed(self.mask_hidden).expand(len(fused), count, -1))

    def run(
        self, inputs: Tensor, mask: Mask, positions: LongTensor, cache: Cache
    ) -> tuple[Tensor, Tensor]:
        """Implement `RowModel.run`: the next rows' features are normed only in some drafters."""
        config, layers = self.config, self.stack.layers
        embedded, features = inputs.split(self.hidden_size, dim=-1)
        turned = turns(self.stack, features, positions)
        masks = [mask] * len(layers)
        if isinstance(mask, dict):
            masks = [mask[kind] for kind in config.layers.layer_types]
        first, normed_features = layers[0], self.hidden_norm(features)
        both = torch.cat([first.input_layernorm(embedded), normed_features], dim=-1)
        gemma4 = config.layers.model_type == GEMMA4
        shared: dict[str, Any] = {"shared_kv_states": {}} if gemma4 else {}  # there are none
        shared |= with_cache(first.self_attn, cache)
        attended, _ = first.self_attn(
            hidden_states=both, position_embeddings=turned, attention_mask=masks[0], **shared
        )
        residual = normed_features if config.norm_before_residual else features
        if gemma4:
            states = after_attention(first, residual, attended)
        else:
            states = residual + attended
            states = states + first.mlp(first.post_attention_layernorm(states))
        for layer, layer_mask in zip(layers[1:], masks[1:], strict=True):
            states = layer(
                states,
                attention_mask=layer_mask,
                position_ids=positions,
                use_cache=True,
                position_embeddings=turned,
                **with_cache(layer, cache),
            )
        normed = self.stack.norm(states)
        return normed, normed if config.norm_output else states
