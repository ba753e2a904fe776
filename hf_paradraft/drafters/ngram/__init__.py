"""Copied drafts: what followed the last time that the text ended like it ends now (prompt lookup; RASD; Graft)."""

from .drafter import NgramDrafter

__all__ = ["NgramDrafter"]
