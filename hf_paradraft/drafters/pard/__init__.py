"""PARD: a small language model that guesses K tokens in one forward (An et al., ICLR 2026)."""

from .candidates import PardCandidateGenerator
from .model import PardDrafter
from .rows import cod_keep_mask, parallel_draft_rows

__all__ = ["PardCandidateGenerator", "PardDrafter", "cod_keep_mask", "parallel_draft_rows"]
