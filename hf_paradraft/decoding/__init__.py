"""The engine: one file per step of a round."""

from .config import SpeculationConfig
from .draft import Draft, Drafter, Drafting, Prefix
from .loop import SpeculativeOutput, speculative_decoding
from .stats import SpeculationStats

__all__ = [
    "Draft",
    "Drafter",
    "Drafting",
    "Prefix",
    "SpeculationConfig",
    "SpeculationStats",
    "SpeculativeOutput",
    "speculative_decoding",
]
