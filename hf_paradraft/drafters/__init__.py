"""All kinds of drafters. A new one is a folder next to this file, and one line here; their order
means nothing.
"""

from transformers import CONFIG_MAPPING

from .blocks.dflash2 import DFlash2Drafter
from .blocks.dspark import DSparkDrafter
from .blocks.dspine import DSpineDrafter
from .blocks.model import DFlashDrafter
from .blocks.xpress import XPressDrafter
from .causal import AutoregressiveDrafter
from .drafter import SavedDrafter
from .eagle3.model import Eagle3Drafter
from .formats.folder import ADAPTER, CONFIG, DrafterFolder
from .gemma4 import Gemma4Drafter
from .mtp.model import MtpDrafter
from .parallelspec.model import ParallelSpecDrafter
from .pard.config import NO_MASK
from .pard.model import PardDrafter
from .ppd.model import PpdDrafter
from .uno import UnoDrafter

KINDS: tuple[type[SavedDrafter], ...] = (
    AutoregressiveDrafter,
    DFlashDrafter,
    DFlash2Drafter,
    DSparkDrafter,
    DSpineDrafter,
    Eagle3Drafter,
    Gemma4Drafter,
    MtpDrafter,
    ParallelSpecDrafter,
    PardDrafter,
    PpdDrafter,
    UnoDrafter,
    XPressDrafter,
)


def kind_named(name: str) -> type[SavedDrafter]:
    """Look up the drafter class whose `kind` is `name`.

    Raises:
        ValueError: there is none.
    """
    named = {kind.kind: kind for kind in KINDS}
    if name not in named:
        raise ValueError(f"There is no kind {name!r}: it is one of {', '.join(sorted(named))}.")
    return named[name]


def kind_of(folder: DrafterFolder) -> type[SavedDrafter]:
    """Find the class of the drafter that is saved in a folder.

    Raises:
        OSError: no saved model does.
        ValueError: it holds something else; the message names it, if it is known.
    """
    kinds = [
        kind
        for kind in KINDS
        if folder.holds(ADAPTER if kind.is_adapter else CONFIG) and kind.recognises(folder)
    ]
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        raise ValueError(
            f"{folder} holds a {' and a '.join(kind.title for kind in kinds)}: give each a folder "
            "of its own."
        )
    if not folder.holds(CONFIG):
        raise OSError(
            f"{folder} holds no drafter: it has no config.json and no adapter_config.json. Give a "
            "folder that was saved whole."
        )
    if folder.identified is not None:
        raise ValueError(f"{folder} holds a {folder.identified}, which is not served here.")
    model_type = folder.config.get("model_type")
    if isinstance(model_type, str) and model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"{folder} has a config.json of model_type {model_type!r}, which is no kind of drafter "
            "here, and transformers does not know it: it needs a later version, or a package of "
            "its own."
        )
    raise ValueError(NO_MASK)
