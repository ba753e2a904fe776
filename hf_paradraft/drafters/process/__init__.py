"""Drafters in a process of their own, for PEARL."""

from .drafter import ProcessDrafter

__all__ = ["ProcessDrafter"]
