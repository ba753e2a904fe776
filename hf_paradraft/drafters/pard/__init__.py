"""PARD: a small language model that guesses K tokens in one forward (An et al., ICLR 2026)."""

from .model import PardDrafter

__all__ = ["PardDrafter"]
