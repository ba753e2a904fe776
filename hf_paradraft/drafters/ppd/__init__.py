"""PPD: prompt tokens that make a model its own drafter (Chen et al., 2024), as a PEFT adapter."""

from .config import PpdConfig
from .tuner import PpdModel, PromptEmbedding

__all__ = ["PpdConfig", "PpdModel", "PromptEmbedding"]
