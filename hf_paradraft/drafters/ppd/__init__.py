"""PPD: prompt tokens that make a model its own drafter (Chen et al., 2024), as a PEFT adapter."""

from .adapter import PpdConfig, PpdModel, PromptEmbedding

__all__ = ["PpdConfig", "PpdModel", "PromptEmbedding"]
