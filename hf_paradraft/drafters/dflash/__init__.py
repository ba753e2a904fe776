"""DFlash: blocks filled in one forward over the target's hidden states."""

from .model import DFlashDrafter

__all__ = ["DFlashDrafter"]
