"""ParallelSpec: one decoder layer on the target's own embedding and head, and M masks (Xiao et al.,
2024, section 3).

A text is read once, and after it the masks, all in one forward: the last token's row guesses the
next token, mask `k` the one at distance `k + 1`. *Medusa-style* drafters read only tokens;
*EAGLE-style* ones each token with the normed state that the target had at the token before.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import LongTensor, Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ...decoding.features import decoder_of
from ...decoding.tree_attention import additive
from ...hardware import input_device
from ...names import attention_of
from ...notes import pair
from ...protocol import SpeculationConfig
from ...protocol.drafter import FeatureKey
from ..feature_drafter import FeatureDrafter
from ..formats.files import check_size, load_strictly, weights_in
from ..formats.folder import DrafterFolder
from ..layers import decoder_stack, describe_layers, final_norm, final_scale
from ..reading.network import RowModel
from .config import ParallelSpecConfig, Style, differences, identity

logger = logging.get_logger(__name__)
VOCABULARY = "vocabulary_ids"  # a tensor of its files


class ParallelSpecDrafter(FeatureDrafter, RowModel):
    """A layer that guesses in parallel, as `assistant_model` of the target that it was made for.

    Args:
        config: the drafter's config; `from_target` makes one for a target.
        vocabulary: int64 `(V',)`, the target's ids that it guesses; default: all.
    """

    kind = "parallelspec"
    config_class = ParallelSpecConfig
    config: ParallelSpecConfig
    title = "ParallelSpec drafter"
    model_types = (ParallelSpecConfig.model_type,)
    training_options = "ParallelSpecTraining"

    def __init__(self, config: ParallelSpecConfig, vocabulary: LongTensor | None = None):
        features: tuple[FeatureKey, ...] = ("normed",) if config.style == "eagle" else ()
        hidden = config.hidden_size
        super().__init__(config, features, hidden, vocabulary)
        self.reads_features = config.style == "eagle"
        self.stack = decoder_stack(config.layer_config)
        self.mask_embeddings = nn.Parameter(torch.randn(config.num_masks, hidden) * 0.02)
        self.mix = nn.Linear(2 * hidden, hidden) if self.reads_features else None
        if self.mix is not None:
            nn.init.zeros_(self.mix.bias)
            for half in self.mix.weight.split(hidden, dim=1):
                nn.init.eye_(half)
        self.most_drafts = config.num_masks + 1
        self.speculation_config = SpeculationConfig(self.most_drafts)
        self.eval()

    @classmethod
    def read_folder(cls, folder: DrafterFolder) -> ParallelSpecDrafter:
        """Implement `FeatureDrafter.read_folder`, for its own layout."""
        config, tensors = ParallelSpecConfig.from_dict(folder.config), weights_in(folder.path)
        check_size(tensors, config.layer_config)
        drafter = cls(config, tensors.pop(VOCABULARY, None))
        load_strictly(drafter, tensors, f"The {cls.title} in {folder}")
        return drafter

    def contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Implement `SavedDrafter.contents`, in its own layout: config, layers, masks and mix."""
        tensors = self.state_dict()
        if self.vocabulary is not None:
            tensors[VOCABULARY] = self.vocabulary
        # its own fields first, defaults too
        said = {name: getattr(self.config, name) for name in ParallelSpecConfig.__annotations__}
        dtype = str(self.dtype).removeprefix("torch.")
        return {**said, **self.config.to_diff_dict(), "dtype": dtype}, tensors

    @classmethod
    def details(cls, config: dict[str, Any], names: list[str]) -> list[tuple[str, Any]]:
        """List its style, layers and masks, as (name, value) pairs."""
        read = ParallelSpecConfig.from_dict(config)
        layers, size = read.layer_config, read.draft_vocab_size or read.vocab_size
        return [
            ("style", read.style),
            ("reads", "the normed last state" if read.style == "eagle" else "tokens alone"),
            (
                "own layers",
                f"{layers.num_hidden_layers} × {layers.hidden_size} of {layers.model_type}",
            ),
            ("masks", f"{read.num_masks}, so {read.num_masks + 1} guesses"),
            ("guesses ids", f"{size} of {read.vocab_size}"),
        ]

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        style: Style = "medusa",
        num_masks: int = 4,
        num_layers: int = 1,
        vocabulary: LongTensor | None = None,
    ) -> ParallelSpecDrafter:
        """Make an untrained drafter attached to `target`, with a copy of its final norm.

        Args:
            target: a decoder-only causal LM.
            style: `medusa` or `eagle`.
            num_masks: M.
            num_layers: the number of its own layers.
            vocabulary: int64 `(V',)`, the ids that it guesses; default: all.

        Raises:
            ValueError: a target without layers of full attention that take explicit masks, or
                layers of experts.
        """
        size = None if vocabulary is None else len(vocabulary)
        described = describe_layers(target.config.get_text_config(decoder=True), num_layers)
        config = ParallelSpecConfig(
            layers=described,
            style=style,
            num_masks=num_masks,
            draft_vocab_size=size,
            **identity(target),
        )
        drafter = cls(config, vocabulary)
        if any("experts" in name for name, _ in drafter.stack.named_parameters()):
            raise ValueError(
                f"{type(target).__name__} has layers of experts alone: a ParallelSpec drafter "
                "needs a dense one."
            )
        norm, table = final_norm(decoder_of(target)), target.get_input_embeddings()
        # an offloaded target's are fetched
        with (
            torch.no_grad(),
            align_module_device(norm),
            align_module_device(table),
        ):
            final_norm(drafter.stack).load_state_dict(norm.state_dict())
            scale = float(table.weight.float().std())
            drafter.mask_embeddings.mul_(scale / 0.02)
            # states are normed and embeddings are not: neither is to drown the other
            if drafter.mix is not None:
                drafter.mix.weight[:, config.hidden_size :] *= scale / float(
                    final_scale(target).square().mean().sqrt()
                )
        drafter.to(input_device(target)).attach(target)
        return drafter

    def attach(self, target: PreTrainedModel) -> None:
        """Implement `FeatureDrafter.attach`; warn if the drafter was made for another target.

        Such a target is served all the same.
        """
        known = pair(self, target).target_head
        super().attach(target)
        if self.target_head is not known and (differing := differences(self.config, target)):
            logger.warning(
                "This ParallelSpec drafter was made for another target (with %s): the output stays "
                "the target's, but fewer guesses will be right.",
                "; ".join(differing),
            )

    def text(self, ids: LongTensor, fused: Tensor) -> Tensor:
        """Implement `RowModel.text`: embeddings, EAGLE-style mixed with features."""
        embedded = self.embed(ids) / self.shared.multiplier  # the stack has its own
        return embedded if self.mix is None else self.mix(torch.cat([embedded, fused], dim=-1))

    def masks(self, fused: Tensor, count: int) -> Tensor:
        """Implement `RowModel.masks`: the embeddings of the first `count` masks."""
        return self.mask_embeddings[:count].expand(len(fused), -1, -1)

    def forward(
        self,
        input_ids: LongTensor,
        position_ids: LongTensor,
        attention_mask: Tensor,
        depths: LongTensor,
        columns: LongTensor,
        features: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute logits and states of training rows, which hold every text as M + 1 tasks at once.

        Args:
            input_ids: int64 `(B, R)`; those of rows deeper than 0 mean nothing.
            position_ids, depths: int64 `(B, R)`, depth -1 for padding.
            attention_mask: bool `(B, 1, R, R)`.
            columns: int64 `(C,)`, the rows whose guesses are wanted.
            features: `(B, R, hidden)`, the target's state at the token before each row of depth 0;
                only EAGLE-style.

        Returns:
            Logits `(B, C, V')`, and normed states `(B, C, hidden)`.
        """
        inputs = self.text(input_ids, features if features is not None else self.nothing(0))
        masks = self.mask_embeddings[(depths - 1).clamp(min=0)].to(inputs)
        inputs = torch.where((depths > 0)[..., None], masks, inputs)
        if attention_of(self.stack) == "eager":  # adds its mask
            attention_mask = additive(attention_mask, inputs.dtype)
        states = self.stack(
            inputs_embeds=inputs,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
        ).last_hidden_state[:, columns]
        return self.logits(states), states
