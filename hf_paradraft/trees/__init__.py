"""Choosing the draft tree."""

from .best_first import best_first_tree
from .sampled import sampled_tree

__all__ = ["best_first_tree", "sampled_tree"]
