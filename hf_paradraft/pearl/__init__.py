"""PEARL: drafting goes on while the target verifies, in a thread, and from there in a process of
its own (Liu et al., 2025).
"""

from .process import ProcessDrafter

__all__ = ["ProcessDrafter"]
