"""One call's drafting by a causal LM with masks behind the text (PARD, section 3.2)."""

from __future__ import annotations

from torch import LongTensor
from transformers import PreTrainedModel

from ..protocol import GuessedLogits, Prefix, SpeculationConfig
from .cache import guesses_of
from .reader import LmReader
from .reading import ReadingDrafting


class MaskDrafting(ReadingDrafting):
    """One call's drafting by a causal LM with masks behind the text.

    Args:
        model: shared with other calls; nothing of it changes.
        config: how it is used.
        masks: ids that stand at the K - 1 places to be guessed behind the text (PARD, section 3.2).
        unknown: stands for ids that the model has no embedding of.
        max_length: tokens of a row at most.
        vocabulary: int64 `(V',)`, the target's id of each of the model's; None: they are the same.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: SpeculationConfig,
        masks: list[int],
        unknown: int,
        max_length: int,
        vocabulary: LongTensor | None = None,
    ):
        self.vocabulary = vocabulary
        self.reader = LmReader(model, max_length, masks, unknown, config.compiled_width)

    def propose(self, prefixes: list[Prefix]) -> list[GuessedLogits]:
        """Logits for what follows each row; none where the drafter's context is too short."""
        logits = self.reader.read(prefixes, max(prefix.room for prefix in prefixes))
        return guesses_of([None] * len(prefixes) if logits is None else logits, prefixes, vocabulary=self.vocabulary)
