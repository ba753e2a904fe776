"""Parallel drafters for Hugging Face Transformers: the same output from `model.generate`, several
times faster.

Importing this package lets `generate(assistant_model=drafter)` reach its loop.
"""

__version__ = "0.3.0"

from . import training
from .auto import AutoDrafter
from .copies import Memory
from .decoding.loop import SpeculativeOutput
from .drafters.blocks.dflash2 import DFlash2Drafter
from .drafters.blocks.dspark import DSparkDrafter
from .drafters.blocks.dspine import DSpineDrafter
from .drafters.blocks.model import DFlashDrafter
from .drafters.blocks.xpress import XPressDrafter
from .drafters.causal import AutoregressiveDrafter
from .drafters.eagle3.model import Eagle3Drafter
from .drafters.gemma4 import Gemma4Drafter
from .drafters.mtp.model import MtpDrafter
from .drafters.ngram import NgramDrafter
from .drafters.parallelspec.model import ParallelSpecDrafter
from .drafters.pard import PardDrafter
from .drafters.ppd import PpdConfig
from .drafters.ppd.model import PpdDrafter
from .drafters.ppd.prompted import PromptedDrafter
from .drafters.uno import UnoDrafter
from .hardware import pack
from .integration.hook import install, speculative_decoding
from .integration.setting import set_drafter
from .pearl import ProcessDrafter
from .protocol import (
    Draft,
    Drafter,
    Drafting,
    GuessedLogits,
    GuessedTokens,
    Observation,
    Prefix,
    PromptRows,
    SpeculationConfig,
    SpeculationStats,
)
from .training.follow import FollowTarget

__all__ = [
    "AutoDrafter",
    "AutoregressiveDrafter",
    "DFlash2Drafter",
    "DFlashDrafter",
    "DSparkDrafter",
    "DSpineDrafter",
    "Draft",
    "Drafter",
    "Drafting",
    "Eagle3Drafter",
    "FollowTarget",
    "Gemma4Drafter",
    "GuessedLogits",
    "GuessedTokens",
    "Memory",
    "MtpDrafter",
    "NgramDrafter",
    "Observation",
    "ParallelSpecDrafter",
    "PardDrafter",
    "PpdConfig",
    "PpdDrafter",
    "Prefix",
    "ProcessDrafter",
    "PromptRows",
    "PromptedDrafter",
    "SpeculationConfig",
    "SpeculationStats",
    "SpeculativeOutput",
    "UnoDrafter",
    "XPressDrafter",
    "pack",
    "set_drafter",
    "speculative_decoding",
    "training",
]

install()
