"""One record for every published layout of DFlash and DSpark: the meaning of a file's numbers,
settled when it is loaded.
"""

from __future__ import annotations

from typing import Any

from ...protocol.drafter import FeatureKey
from ..formats.fields import VERSION, layer_values
from ..formats.layout import DrafterConfig
from ..layers import GEMMA4, QWEN35

SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


class BlockConfig(DrafterConfig):
    """A drafter of blocks, whose layers are Qwen3's, Llama's or Gemma 4's.

    Attributes:
        features: the features that it reads.
        block_size: B, rows of a block, the newest token's included.
        mask_token_id: the id that the other rows have.
        fill_in: row `k` guesses the token at its own place, so the first guesses none; else the one
            after it.
        causal: kinds of layers whose rows see only those before them in the block.
        window_from_anchor: sliding windows are counted from the newest token, not from each row.
        markov_rank, markov_type: rank and type of the head that looks at the token before; rank 0:
            there is none.
        confidence, confidence_with_markov: whether it says how sure it is, and knows the token
            before then.
        conv_kernel_size, conv_group_size: taps of DFlash2's convolutions, and channels that share a
            kernel.
        selector_rank, selector_top_k: rank of DFlash2's selector, and the number of tokens that a
            selector or DSpine chooses among.
        transfer_rank, message_size: sizes of DSpine's codes and messages.
        refiner_rank, refiner_size: rank of XPress's refiner, and width of its SwiGLU.
        embedding_scale: the factor of embeddings.
    """

    features: tuple[FeatureKey, ...]
    block_size: int
    mask_token_id: int
    fill_in: bool
    causal: tuple[str, ...] = ()
    window_from_anchor: bool = False
    markov_rank: int = 0
    markov_type: str = "vanilla"
    confidence: bool = False
    confidence_with_markov: bool = False
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 16
    refiner_rank: int = 0
    refiner_size: int = 0
    transfer_rank: int = 0
    message_size: int = 0
    embedding_scale: float = 1.0

    @property
    def num_drafts(self) -> int:
        """The number of tokens that a block guesses."""
        return self.block_size - 1 if self.fill_in else self.block_size

    @property
    def num_features(self) -> int:
        """m, the number of features."""
        return len(self.features)

    def particulars(self) -> list[tuple[str, Any]]:
        """List the values that only blocks have, as (name, value) pairs."""
        reading = "fills masks in" if self.fill_in else "guesses from the newest token on"
        pairs: list[tuple[str, Any]] = [
            ("block", f"{self.block_size} rows, {self.num_drafts} guesses: {reading}"),
            ("mask token", self.mask_token_id),
            (
                "head for the token before",
                f"{self.markov_type}, rank {self.markov_rank}" if self.markov_rank else "none",
            ),
            ("confidences", "yes" if self.confidence else "no"),
        ]
        if self.selector_rank:
            pairs.append(
                ("convolutions", f"{self.conv_kernel_size} taps, groups of {self.conv_group_size}")
            )
            pairs.append(
                ("selector", f"rank {self.selector_rank}, among {self.selector_top_k} tokens")
            )
        if self.transfer_rank:
            sizes = (
                f"rank {self.transfer_rank}, messages of {self.message_size}, among "
                f"{self.selector_top_k} tokens"
            )
            pairs.append(("codes of tokens before", sizes))
        if self.refiner_rank:
            pairs.append(("refiner", f"rank {self.refiner_rank}, {self.refiner_size} wide inside"))
        return pairs

    def saved(self, drafter: Any) -> dict[str, Any]:
        """Make the `config.json` of its drafter, in the speculators layout.

        Raises:
            ValueError: it has options or layers for which the layout has no place.
        """
        kinds = set(getattr(self.layers, "layer_types", None) or ["full_attention"])
        unsaid = [
            name
            for name in ("softcap", "embedding_scale", "logit_scale")
            if getattr(self, name) not in (None, 1.0)
        ]
        if self.refiner_rank and self.refiner_size % self.refiner_rank:
            unsaid.append("the refiner's width")
        if self.layers.model_type in (GEMMA4, QWEN35):
            unsaid.append(f"layers of {self.layers.model_type}")
        if "full_attention" in self.causal or (
            self.layout != "speculators" and "sliding_attention" in kinds
        ):
            unsaid.append("its windows")
        if unsaid:
            raise ValueError(
                "This drafter has options that the speculators layout cannot say "
                f"({', '.join(unsaid)}): keep its own files."
            )
        named = {
            "dspark": "DSparkSpeculator",
            "dflash2": "DFlash2DraftModel",
            "xpress": "XPressSpeculator",
        }
        described = {
            "speculators_model_type": drafter.kind,
            "architectures": [named.get(drafter.kind, "DFlashSpeculator")],
            "transformer_layer_config": layer_values(self.layers),
            "aux_hidden_state_layer_ids": [
                key + 1 for key in self.features if isinstance(key, int)
            ],
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "sample_from_anchor": not self.fill_in,
            "sliding_window_non_causal": "sliding_attention" in kinds
            and "sliding_attention" not in self.causal,
            "draft_vocab_size": drafter.num_guesses,
            "target_hidden_size": self.target_hidden_size,
            "num_target_layers": self.target_layers,
            "speculators_version": VERSION,
        }
        if self.markov_rank or self.confidence:
            described |= {
                "markov_rank": self.markov_rank,
                "markov_head_type": self.markov_type,
                "enable_confidence_head": self.confidence,
                "confidence_head_with_markov": self.confidence_with_markov,
            }
        if self.selector_rank:
            described |= {name: getattr(self, name) for name in SELECTOR}
        if self.refiner_rank:
            described |= {
                "xpress_rank": self.refiner_rank,
                "xpress_mlp_ratio": self.refiner_size // self.refiner_rank,
            }
        return described
