"""Choosing which guesses to verify together."""

from .best_first import best_first_tree

__all__ = ["best_first_tree"]
