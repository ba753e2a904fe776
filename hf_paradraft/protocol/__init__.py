"""What drafters and engine say to each other."""

from .config import SpeculationConfig
from .draft import Draft
from .drafter import Drafter, Drafting, Observation, Prefix
from .guess import Guess, GuessedLogits, GuessedTokens, Riders
from .stats import RoundTrace, SpeculationStats

__all__ = [
    "Draft",
    "Drafter",
    "Drafting",
    "Guess",
    "GuessedLogits",
    "GuessedTokens",
    "Observation",
    "Prefix",
    "Riders",
    "RoundTrace",
    "SpeculationConfig",
    "SpeculationStats",
]
