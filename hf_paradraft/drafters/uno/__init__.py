"""UNO: the target drafts by itself, over noise in the place of the tokens to come, with an adapter
that is on only in noise.
"""

from .model import UnoDrafter

__all__ = ["UnoDrafter"]
