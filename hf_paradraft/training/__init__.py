"""The shared parts of trainers, and the building blocks of drafter training."""

from .rows import cod_keep_mask, parallel_draft_rows

__all__ = ["cod_keep_mask", "parallel_draft_rows"]
