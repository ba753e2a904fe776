"""A small model with prompt tokens as the drafter of a bigger one (PPD, section 5.3)."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from transformers import Cache, PreTrainedModel

from ...decoding import SpeculationConfig, SpeculationStats
from ...decoding.cache import empty_cache
from ...decoding.tree_attention import attention_windows, or_sdpa
from ..pard.propose import PardDrafting, check_drafts
from .ahead import AheadDrafting
from .tuner import prompt_embedding


class PromptedDrafter:
    """Decodes ahead of the target: an adapter's prompts guess, and the model verifies as if it were the target.

    It stops at `num_draft_tokens`, or before, where `never_slower` expects more of the target's verification. Up to m + 1 tokens
    are drafted like PARD's instead, in one forward, with prompts in the place of masks: more tokens, and worse ones.

    `assistant_model=PeftModel.from_pretrained(small, adapter)` makes one by itself; make it here to change its options.

    Args:
        model: with an active PPD adapter of one embedding per prompt token.
        speculation_config: default: a tree of 16 nodes, 12 deep; m + 1 tokens of a model that takes no masks.

    Attributes:
        last_stats: of the last `generate` call it assisted, or None.

    Raises:
        ValueError: no active PPD adapter, or several embeddings per prompt token.
    """

    def __init__(self, model: PeftModel, speculation_config: SpeculationConfig | None = None):
        self.model: PreTrainedModel = model.get_base_model()
        embedding, config = prompt_embedding(self.model), model.active_peft_config
        if embedding.prompts() is None:
            raise ValueError("The model's PPD adapter is disabled: enable it first.")
        if config.num_ensembles > 1:
            raise ValueError(f"As a drafter's, a PPD adapter has one embedding per prompt token, not {config.num_ensembles}.")
        self.num_prompts = config.num_prompt_tokens
        self.mask_token_id = embedding.num_embeddings  # the first prompt; also stands for ids that the model lacks
        ahead = attention_windows(self.model) is not None
        usual = SpeculationConfig(tree_size=16) if ahead else SpeculationConfig(num_draft_tokens=self.num_prompts + 1)
        self.speculation_config = speculation_config or usual
        self.last_stats: SpeculationStats | None = None
        self.config, self.name_or_path = self.model.config, self.model.name_or_path
        self.forward = self.model.forward

    @property
    def device(self):
        """Of the model."""
        return self.model.device

    @property
    def dtype(self):
        """Of the model."""
        return self.model.dtype

    def get_input_embeddings(self):
        """The model's, with prompts behind its vocabulary."""
        return self.model.get_input_embeddings()

    def mask_ids(self, count: int) -> list[int]:
        """The first prompts."""
        return list(range(self.mask_token_id, self.mask_token_id + count))

    def new_cache(self) -> Cache:
        """An empty cache that can drop the prompts' entries again."""
        return empty_cache(self)

    def start_drafting(self, max_length: int) -> PardDrafting:
        """Begin a `generate` call of rows up to `max_length` tokens; its state is its own.

        Raises:
            ValueError: it is to decode ahead, and the model takes no masks; or it cannot draft; or its adapter is another than
                before.
        """
        prompts = prompt_embedding(self.model).prompts()
        if prompts is None or len(prompts) != self.num_prompts:
            raise ValueError("The model's PPD adapter was disabled or changed since this drafter was made: make it anew.")
        check_drafts(self.model)
        if self.speculation_config.num_draft_tokens <= self.num_prompts + 1:
            return PardDrafting(self, max_length)
        if attention_windows(self.model) is None:
            raise ValueError(
                f"num_draft_tokens={self.speculation_config.num_draft_tokens}: with {self.num_prompts} prompt tokens "
                f"{type(self.model).__name__} as it is loaded here, which takes no explicit masks, drafts {self.num_prompts + 1} "
                f"tokens at most: lower it{or_sdpa(self.model)}."
            )
        return AheadDrafting(self, max_length)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)
