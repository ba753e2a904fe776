"""DSpark: DFlash's blocks, a head that looks at the token before, and one that says how sure it is."""

from .model import DSparkDrafter

__all__ = ["DSparkDrafter"]
