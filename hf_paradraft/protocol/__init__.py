"""The protocol between drafters and engine."""

from .config import SpeculationConfig
from .draft import Draft, Guess, GuessedLogits, GuessedTokens, PromptRows
from .drafter import Drafter, Drafting, Observation, Prefix
from .stats import Round, RoundStreamer, RoundTrace, SequenceRound, SpeculationStats

__all__ = [
    "Draft",
    "Drafter",
    "Drafting",
    "Guess",
    "GuessedLogits",
    "GuessedTokens",
    "Observation",
    "Prefix",
    "PromptRows",
    "Round",
    "RoundStreamer",
    "RoundTrace",
    "SequenceRound",
    "SpeculationConfig",
    "SpeculationStats",
]
