"""Guesses copied from the text itself (prompt lookup; RASD), or from a memory: no model, no
files.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from ..copies import Memory
from ..copies.lookup import PromptLookup, with_copied
from ..copies.memory import MAX_MATCH
from ..protocol import Draft, Drafter, Drafting, GuessedTokens, Prefix, SpeculationConfig


class NgramDrafter(Drafter):
    """A drafter that copies the tokens after an earlier match of the text's end.

    The longest match counts, then the newest, in the text itself or in a memory.

    Args:
        longest: tokens of a match in the text itself at most.
        shortest: tokens of such a match at least.
        speculation_config: default: chains of 10 tokens; with a memory of 32.
        memory: other texts that are copied from.

    Raises:
        ValueError: no match has such lengths.
    """

    kind = "ngram"
    title = "n-gram drafter"

    def __init__(
        self,
        longest: int = MAX_MATCH,
        shortest: int = 1,
        speculation_config: SpeculationConfig | None = None,
        memory: Memory | None = None,
    ):
        if not 1 <= shortest <= longest:
            raise ValueError(
                f"Matches have 1 token at least: shortest={shortest} and longest={longest} do not "
                "go together."
            )
        self.longest, self.shortest, self.memory = longest, shortest, memory
        self.speculation_config = speculation_config or SpeculationConfig(
            10 if memory is None else 32, None
        )

    def start_drafting(self, target: PreTrainedModel, max_length: int) -> NgramDrafting:
        """Begin a `generate` call; its state is its own."""
        return NgramDrafting(self, target.config.get_text_config().vocab_size)


class NgramDrafting(Drafting):
    """One call's copying.

    Args:
        drafter: says how long matches are, and which texts are copied from.
        vocab_size: V, of the target.
    """

    def __init__(self, drafter: NgramDrafter, vocab_size: int):
        self.config = drafter.speculation_config
        self.lookup = PromptLookup(drafter.longest, drafter.shortest, drafter.memory, vocab_size)
        self.lookups = list[PromptLookup]()

    def propose(self, prefixes: list[Prefix]) -> list[GuessedTokens]:
        """Copy a chain of tokens for each sequence; in trees, one from each source.

        A sequence without an earlier match gets none.
        """
        guesses = []
        self.lookups = self.lookups or [self.lookup.for_sequence() for _ in prefixes]
        for lookup, prefix in zip(self.lookups, prefixes, strict=True):
            lookup.read(prefix.ids[0], prefix.kept)
            copies = lookup.following(prefix.room)
            copies = copies[:1] if self.config.tree_size is None else copies
            draft = with_copied(Draft.chain(prefix.ids[0, :0]), copies, self.config.max_nodes)
            guesses.append(GuessedTokens(draft.tokens, list(draft.parents), draft.acceptance))
        return guesses
