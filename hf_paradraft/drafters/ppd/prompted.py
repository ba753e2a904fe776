"""A small model with prompt tokens as the drafter of a bigger one (PPD, section 5.3)."""

from __future__ import annotations

from peft import PeftModel
from torch import LongTensor, Tensor
from transformers import PreTrainedModel

from ...protocol import Drafter, Drafting, SpeculationConfig
from ..causal import CausalRows, check_drafts, logits_after
from ..reading.reader import Reader
from .adapter import prompt_embedding


class PromptedDrafter(Drafter):
    """A drafter that guesses m + 1 tokens in one forward, with an adapter's prompts.

    The prompts stand in the place of PARD's masks.

    `assistant_model=PeftModel.from_pretrained(small, adapter)` makes one by itself; make it here to
    change its options.

    Args:
        model: a model with an active PPD adapter of one embedding per prompt token.
        speculation_config: the options of its use; default: m + 1 tokens; more are never guessed.

    Attributes:
        last_stats: the statistics of the last `generate` call that it assisted, or None.

    Raises:
        ValueError: no active PPD adapter, or several embeddings per prompt token.
    """

    kind = "ppd-drafter"
    title = "model with prompt tokens"

    def __init__(self, model: PeftModel, speculation_config: SpeculationConfig | None = None):
        self.model: PreTrainedModel = model.get_base_model()
        embedding = prompt_embedding(self.model)
        config, first = embedding.config(), embedding.num_embeddings
        if config.num_ensembles > 1:
            raise ValueError(
                "As a drafter's, a PPD adapter has one embedding per prompt token, not "
                f"{config.num_ensembles}."
            )
        # Ids of the prompts; the first one also stands for ids that the model lacks.
        self.prompts = list(range(first, first + config.num_prompt_tokens))
        self.most_drafts = config.num_prompt_tokens + 1
        self.speculation_config = speculation_config or SpeculationConfig(self.most_drafts)
        self.config, self.name_or_path = self.model.config, self.model.name_or_path

    @property
    def device(self) -> None:
        """Asked by transformers' own assisted loop, which knows only models.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "A model with prompt tokens drafts in hf_paradraft's loop alone: use a version of "
            "transformers that it is installed in, or custom_generate=speculative_decoding."
        )

    def start_drafting(self, target: PreTrainedModel, max_length: int) -> Drafting:
        """Begin a `generate` call of rows up to `max_length` tokens; its state is its own.

        Raises:
            ValueError: it cannot draft; or its adapter is disabled, or another than before.
        """
        prompts, config = prompt_embedding(self.model).prompts(), self.speculation_config
        if prompts is None or len(prompts) != len(self.prompts):
            raise ValueError(
                "The model's PPD adapter is disabled, or another than this drafter's: enable its "
                "own, or make it anew."
            )
        check_drafts(self.model)
        masks = self.prompts[: max(0, config.num_draft_tokens - 1)]
        return Reader(CausalRows(self.model, masks, self.prompts[0]), config, max_length)

    def draft_logits(
        self, input_ids: LongTensor, features: None = None, num_draft_tokens: int | None = None
    ) -> Tensor:
        """Compute the logits of one forward after a whole prefix, without caches.

        Args:
            input_ids: int64 `(B, n)`, without padding.
            features: not read.
            num_draft_tokens: K, at most m + 1; default: m + 1.

        Returns:
            `(B, K, V')` in the model's dtype; row `d` guesses the token at distance `d + 1`.

        Raises:
            ValueError: more is asked for than the prompts guess.
        """
        count = num_draft_tokens or self.most_drafts
        if count > self.most_drafts:
            raise ValueError(
                f"num_draft_tokens={count}: {len(self.prompts)} prompt tokens guess "
                f"{self.most_drafts} at most."
            )
        return logits_after(self.model, input_ids, self.prompts[: count - 1])
