"""DSpark, as the rest of the library knows it."""

from ..dflash.kind import described
from ..feature_kind import feature_kind
from ..published import DSPARK
from .model import DSparkDrafter

DSPARK_KIND = feature_kind(DSparkDrafter, (DSPARK,), described)
