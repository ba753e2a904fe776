"""ParallelSpec: one decoder layer on the target's own embedding and head, and M masks (Xiao et al., 2024, section 3).

A text is read once, and behind it the masks, all in one forward: the last token's row guesses the next token, mask `k` the one at
distance `k + 1`. *Medusa-style* drafters read tokens alone; *EAGLE-style* ones each token beside the normed state that the target
had at the token before.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import LongTensor, Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ...decoding.features import decoder_of
from ...decoding.target_head import TargetHead, final_norm, final_scale
from ...decoding.tree_attention import additive
from ...files import tensor_names
from ...hardware import input_device
from ...hub.card import provenance_of
from ...names import attention_of
from ...protocol import SpeculationConfig
from ...protocol.drafter import FeatureKey
from ...training.target import refuse_missing
from ..drafter import SavedDrafter
from ..feature_drafter import shared_head
from ..feature_drafting import FeatureDrafting
from ..feature_reader import FeatureModel
from ..formats.values import read_config
from ..layers import decoder_stack, describe_layers
from ..pairs import pair
from .config import ParallelSpecConfig, Style, differences, identity

logger = logging.get_logger(__name__)


class ParallelSpecDrafter(SavedDrafter, PreTrainedModel, FeatureModel):
    """A layer that guesses in parallel, as `assistant_model` of the target that it was made for.

    Args:
        config: what it is; `from_target` makes one for a target.

    Attributes:
        speculation_config: how to use it; saved with it.
    """

    kind = "parallelspec"
    title = "ParallelSpec drafter"
    training_options = "ParallelSpecTraining"
    about = "reads the target's hidden states, shares its embedding and head, and guesses several tokens"
    config_class = ParallelSpecConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _supports_sdpa = True

    def __init__(self, config: ParallelSpecConfig):
        super().__init__(config)
        self.stack = decoder_stack(config.layer_config)
        self.mask_embeddings = nn.Parameter(torch.randn(config.num_masks, config.hidden_size) * 0.02)
        self.mix = nn.Linear(2 * config.hidden_size, config.hidden_size) if config.style == "eagle" else None
        if config.draft_vocab_size is not None:
            self.register_buffer("vocabulary_ids", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.target_head: TargetHead | None = None
        provenance = provenance_of(config.to_dict())
        saved = provenance.get("speculation_config")
        self.speculation_config = SpeculationConfig.from_saved(saved) if saved else SpeculationConfig(config.num_masks + 1)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Only what is its own: the layers come initialised by their own class."""
        if module is self.mix:
            nn.init.zeros_(self.mix.bias)
            nn.init.eye_(self.mix.weight[:, : self.mix.out_features])
            nn.init.eye_(self.mix.weight[:, self.mix.out_features :])

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        """By the type of its config."""
        return (folder / "config.json").exists() and read_config(folder).get("model_type") == ParallelSpecConfig.model_type

    @classmethod
    def load_folder(cls, folder: Path, **kwargs: Any) -> ParallelSpecDrafter:
        """The drafter in a folder.

        Args:
            folder: as `save_pretrained` wrote it.
            kwargs: as for `PreTrainedModel.from_pretrained`.

        Raises:
            OSError, ValueError: it is damaged, incomplete, or something else.
        """
        cls.check_folder(folder)
        options = {"use_safetensors": True, "output_loading_info": True, **kwargs}
        drafter, info = super(SavedDrafter, cls).from_pretrained(folder, **options)
        refuse_missing(info, cls.__name__, folder)
        return drafter.eval()

    @classmethod
    def check_folder(cls, folder: Path) -> None:
        """Refuse a folder that is not whole."""
        if not cls.recognises(folder):
            raise OSError(f"{folder} holds no ParallelSpec drafter.")
        if "mask_embeddings" not in tensor_names(folder):
            raise OSError(f"{folder} lacks the drafter's masks: save it again.")

    @classmethod
    def details(cls, config: dict[str, Any], names: list[str]) -> list[tuple[str, Any]]:
        """Its layers and masks."""
        layers, size = config.get("layers") or {}, config.get("draft_vocab_size")
        return [
            ("style", config.get("style")),
            ("reads", "the normed last state" if config.get("style") == "eagle" else "tokens alone"),
            ("own layers", f"{layers.get('num_hidden_layers')} × {layers.get('hidden_size')} of {layers.get('model_type')}"),
            ("masks", f"{config.get('num_masks')}, so {config.get('num_masks', 0) + 1} guesses"),
            ("guesses ids", f"{size or layers.get('vocab_size')} of {layers.get('vocab_size')}"),
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
        """An untrained one for `target`, attached to it; its final norm is a copy of the target's.

        Args:
            target: a decoder-only causal LM.
            style: `medusa` or `eagle`.
            num_masks: M.
            num_layers: of its own.
            vocabulary: int64 `(V',)`, the ids that it guesses; default: all.

        Raises:
            ValueError: a target without layers of full attention that take explicit masks, or layers of experts.
        """
        size = None if vocabulary is None else len(vocabulary)
        described = describe_layers(target.config.get_text_config(decoder=True), num_layers)
        config = ParallelSpecConfig(described, style, num_masks, size, **identity(target))
        drafter = cls(config)
        if any("experts" in name for name, _ in drafter.stack.named_parameters()):
            raise ValueError(f"{type(target).__name__} has layers of experts alone: a ParallelSpec drafter needs a dense one.")
        if vocabulary is not None:
            drafter.vocabulary_ids.copy_(vocabulary)
        norm, table = final_norm(decoder_of(target)), target.get_input_embeddings()
        with torch.no_grad(), align_module_device(norm), align_module_device(table):  # an offloaded target's are fetched
            for parameter, theirs in zip(final_norm(drafter.stack).parameters(), norm.parameters(), strict=True):
                parameter.copy_(theirs)
            scale = float(table.weight.float().std())
            drafter.mask_embeddings.mul_(scale / 0.02)
            if drafter.mix is not None:  # states are normed and embeddings are not: neither is to drown the other
                drafter.mix.weight[:, config.hidden_size :] *= scale / float(final_scale(target).square().mean().sqrt())
        drafter = drafter.to(input_device(target)).eval()
        drafter.attach(target)
        return drafter

    @property
    def vocabulary(self) -> LongTensor | None:
        """The target's id of each id that it guesses; None: they are the same."""
        return self._buffers.get("vocabulary_ids")

    @property
    def most_drafts(self) -> int:  # type: ignore[override]
        """M + 1."""
        return self.config.num_masks + 1

    @property
    def reads_features(self) -> bool:  # type: ignore[override]
        """Whether it is EAGLE-style."""
        return self.config.style == "eagle"

    @property
    def paradraft(self) -> dict[str, Any]:
        """The library's section of `config.json`: how to use the drafter, and how it was trained."""
        return provenance_of(self.config.to_dict())

    def remember(self, record: dict[str, Any]) -> None:
        """Keep how it was trained."""
        self.config.paradraft = {**self.paradraft, "training": record}

    def write(self, folder: Path, **kwargs: Any) -> None:
        """Layers, masks and mix."""
        self.config.paradraft = {**self.paradraft, "kind": self.kind, "speculation_config": asdict(self.speculation_config)}
        super(SavedDrafter, self).save_pretrained(folder, **kwargs)

    def attach(self, target: PreTrainedModel) -> None:
        """Share the target's embedding and head.

        Raises:
            ValueError: another target's sizes, or more drafts asked for than there are masks.
        """
        config = target.config.get_text_config()
        for name in ("hidden_size", "vocab_size"):
            if (ours := getattr(self.config, name)) != (theirs := getattr(config, name)):
                raise ValueError(
                    f"This ParallelSpec drafter was made for a target with {name} {ours}, and this one's is {theirs}."
                )
        if self.speculation_config.num_draft_tokens > self.most_drafts:
            raise ValueError(
                f"This ParallelSpec drafter has {self.config.num_masks} masks, so it guesses {self.most_drafts} tokens, but "
                f"num_draft_tokens is {self.speculation_config.num_draft_tokens}: lower it, or train one with more masks."
            )
        target_head = pair(self, target).target_head
        if target_head is not None and target_head.head is target.get_output_embeddings():
            self.target_head = target_head
            return
        if differing := differences(self.config, target):
            logger.warning(
                "This ParallelSpec drafter was made for another target (with %s): the output stays the target's, but fewer "
                "guesses will be right.",
                "; ".join(differing),
            )
        self.target_head = target_head = TargetHead(target, self.vocabulary)
        pair(self, target, target_head=target_head)

    def needs(self, target: PreTrainedModel) -> tuple[FeatureKey, ...]:
        """The normed last state, EAGLE-style."""
        return ("normed",) if self.reads_features else ()

    def start_drafting(self, target: PreTrainedModel, max_length: int) -> FeatureDrafting:
        """Begin a `generate` call; its state is its own."""
        return FeatureDrafting(pair(self, target), self.speculation_config, max_length, self.vocabulary)

    def text(self, ids: LongTensor, fused: Tensor) -> Tensor:
        """Embeddings, EAGLE-style mixed with features."""
        embedded = self.shared.embed(ids).to(self.device, self.dtype) / self.shared.multiplier  # the stack has its own
        return embedded if self.mix is None else self.mix(torch.cat([embedded, fused], dim=-1))

    def masks(self, fused: Tensor, count: int) -> Tensor:
        """The first `count` masks."""
        return self.mask_embeddings[:count].expand(len(fused), -1, -1)

    def logits(self, states: Tensor) -> Tensor:
        """By the target's head."""
        return self.shared.logits(states)

    def forward(
        self,
        input_ids: LongTensor,
        position_ids: LongTensor,
        attention_mask: Tensor,
        depths: LongTensor,
        columns: LongTensor,
        features: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Training rows: every text seen as M + 1 tasks at once.

        Args:
            input_ids: int64 `(B, R)`; of rows deeper than 0 whatever.
            position_ids, depths: int64 `(B, R)`, depth -1 for padding.
            attention_mask: bool `(B, 1, R, R)`.
            columns: int64 `(C,)`, of the rows whose guesses are wanted.
            features: `(B, R, hidden)`, what belongs to the token before each row of depth 0; EAGLE-style.

        Returns:
            Logits `(B, C, V')`, and normed states `(B, C, hidden)`.
        """
        inputs = self.text(input_ids, features if features is not None else self.nothing(0))
        masks = self.mask_embeddings[(depths - 1).clamp(min=0)].to(inputs)
        inputs = torch.where((depths > 0)[..., None], masks, inputs)
        if attention_of(self.stack) == "eager":  # adds its mask
            attention_mask = additive(attention_mask, inputs.dtype)
        states = self.stack(
            inputs_embeds=inputs, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).last_hidden_state[:, columns]
        return self.shared.logits(states), states

    @property
    def shared(self) -> TargetHead:
        """The target's embedding and head."""
        return shared_head(self)

    @torch.no_grad()
    def draft_logits(
        self, input_ids: LongTensor, features: dict[FeatureKey, Tensor] | None = None, num_draft_tokens: int | None = None
    ) -> Tensor:
        """Compute logits of the next tokens after a whole prefix, without caches.

        Args:
            input_ids: int64 `(B, n)`, without padding.
            features: EAGLE-style `{"normed": (B, n - 1, hidden)}`; Medusa-style none.
            num_draft_tokens: K, at most M + 1; default: as configured.

        Returns:
            `(B, K, V')`; row `d` guesses the token at distance `d + 1`.

        Raises:
            ValueError: more guesses than masks, or features that are missing.
        """
        count = num_draft_tokens or self.speculation_config.num_draft_tokens
        if count > self.most_drafts:
            raise ValueError(f"{count} guesses of a drafter with {self.config.num_masks} masks: at most {self.most_drafts}.")
        return FeatureDrafting(self, SpeculationConfig(), 0).logits_behind(input_ids.to(self.device), features, count)
