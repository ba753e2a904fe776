"""What a ParallelSpec drafter is made of, and which target it belongs to."""

from __future__ import annotations

import copy
import hashlib
from typing import Any, Literal

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

STYLES = ("medusa", "eagle")
Style = Literal["medusa", "eagle"]


class ParallelSpecConfig(PreTrainedConfig):
    """One decoder layer of the target's kind, and M masks.

    Args:
        layers: of a target's text config, with as many layers as the drafter has.
        style: `medusa` reads tokens alone, `eagle` the target's normed states too.
        num_masks: M; a forward guesses M + 1 tokens.
        draft_vocab_size: V', where fewer tokens than the target's are guessed.
        fingerprint: of the target's embedding.
        markov_rank: of a head that looks at the token before, trained after the rest; 0: none.
        kwargs: as for `PreTrainedConfig`.

    Raises:
        ValueError: an unknown style, or no masks.
    """

    model_type = "parallelspec"

    def __init__(
        self,
        layers: dict[str, Any] | None = None,
        style: Style = "medusa",
        num_masks: int = 4,
        draft_vocab_size: int | None = None,
        fingerprint: str | None = None,
        markov_rank: int = 0,
        **kwargs: Any,
    ):
        if style not in STYLES:
            raise ValueError(f"style is {style!r}; it has to be one of {', '.join(STYLES)}.")
        if num_masks < 1:
            raise ValueError(f"A ParallelSpec drafter needs a mask at least, but num_masks is {num_masks}.")
        self.layers, self.style, self.num_masks = dict(layers or {}), style, num_masks
        self.draft_vocab_size, self.markov_rank, self.fingerprint = draft_vocab_size, markov_rank, fingerprint
        super().__init__(**kwargs)

    @property
    def layer_config(self) -> PreTrainedConfig:
        """As transformers has it."""
        return AutoConfig.for_model(**copy.deepcopy(self.layers))

    @property
    def vocab_size(self) -> int:
        """V, of the target."""
        return int(self.layer_config.vocab_size) if self.layers else 0

    @property
    def hidden_size(self) -> int:
        """Of the target, and of the drafter."""
        return int(self.layer_config.hidden_size)


def describe_layers(target: PreTrainedModel, num_layers: int) -> dict[str, Any]:
    """The target's own config with `num_layers` layers of full attention, dense.

    Raises:
        ValueError: it has no such layers.
    """
    config = copy.deepcopy(target.config.get_text_config(decoder=True))
    kinds, first = getattr(config, "layer_types", None), 0
    if kinds is not None:
        kind = next((kind for kind in ("full_attention", "sliding_attention") if kind in kinds), None)
        if kind is None:
            raise ValueError(
                f"{type(target).__name__} has no layer of ordinary attention, which a ParallelSpec drafter is made of."
            )
        config.layer_types, first = [kind] * num_layers, kinds.index(kind)
    if hasattr(config, "mlp_only_layers"):  # of experts: the drafter's layers have none
        config.mlp_only_layers = list(range(num_layers))
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = num_layers
    config.num_hidden_layers = num_layers
    described = config.to_dict()
    if overrides := described.get("per_layer_config"):  # Gemma 4's: by the target's layers, of which one kind is left
        own = {int(layer): sizes for layer, sizes in overrides.items()}.get(first, {})
        described |= {**own, "per_layer_config": {}}
    for name in ("quantization_config", "paradraft", "architectures", "_name_or_path", "dtype"):
        described.pop(name, None)
    return described


@torch.no_grad()
def fingerprint(target: PreTrainedModel) -> str | None:
    """A few numbers of the target's embedding, hashed: another model's, or a fine-tune's, differ. None where they are packed."""
    weight = target.get_input_embeddings().weight
    if weight.is_meta or not weight.is_floating_point():
        return None
    some = weight.detach().flatten()[:: max(1, weight.numel() // 4096)][:4096]
    return hashlib.sha256(some.to(torch.bfloat16).float().cpu().numpy().tobytes()).hexdigest()[:16]
