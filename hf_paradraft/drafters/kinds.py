"""All kinds of drafters. A new one is one folder beside this file, and one line here."""

from pathlib import Path

from .autoregressive.kind import AUTOREGRESSIVE
from .dflash.kind import DFLASH_KIND
from .dspark.kind import DSPARK_KIND
from .eagle3.kind import EAGLE3_KIND
from .kind import Kind
from .parallelspec.kind import PARALLELSPEC
from .pard.kind import PARD
from .ppd.kind import PPD

KINDS: tuple[Kind, ...] = (PPD, AUTOREGRESSIVE, DSPARK_KIND, DFLASH_KIND, EAGLE3_KIND, PARALLELSPEC, PARD)


def kind_of_folder(folder: Path) -> Kind:
    """Which kind lies in a folder.

    Raises:
        OSError: none does.
    """
    for kind in KINDS:
        if kind.recognises(folder):
            return kind
    raise OSError(
        f"{folder} holds no drafter: it has no config.json and no adapter_config.json. Give a folder that was saved whole."
    )


def kind_of(drafter: object) -> Kind | None:
    """The kind of a loaded drafter; None for one from elsewhere."""
    return next((kind for kind in KINDS if isinstance(drafter, kind.drafters)), None)
