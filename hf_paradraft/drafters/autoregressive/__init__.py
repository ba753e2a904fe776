"""An ordinary small model as a drafter, one token a forward (Leviathan et al., 2023)."""

from .drafter import AutoregressiveDrafter

__all__ = ["AutoregressiveDrafter"]
