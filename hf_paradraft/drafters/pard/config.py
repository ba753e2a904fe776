"""A PARD drafter's part of `config.json`: its mask token, under any engine's key."""

from transformers import PreTrainedConfig

NO_MASK = (
    "This model's config names no mask token (mask_token_id, pard_token or ptd_token_id): it is "
    "not a PARD drafter yet. To make one of it, PardDrafter.from_causal_lm(model, mask_token_id=…) "
    "and train it; to draft with it as it is, one token a forward, "
    "AutoregressiveDrafter.from_causal_lm(model)."
)
# AMD's code and TensorRT-LLM read `pard_token`, vLLM reads any of the three.
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


def read_mask_token_id(config: PreTrainedConfig, mask_token_id: int | None = None) -> int:
    """Look up the id of the mask token, whose embedding stands for "guess this token".

    Args:
        config: a causal LM's config.
        mask_token_id: the id to take instead of the config's.

    Raises:
        ValueError: there is none, keys disagree, or the id has no embedding.
    """
    written = {
        key: getattr(config, key) for key in MASK_KEYS if getattr(config, key, None) is not None
    }
    if mask_token_id is None:
        if not written:
            raise ValueError(NO_MASK)
        if len(set(written.values())) > 1:
            raise ValueError(
                "The config names different mask tokens "
                f"({', '.join(f'{k}={v}' for k, v in written.items())}): say which one was trained "
                "with mask_token_id=…."
            )
        mask_token_id = next(iter(written.values()))
    vocab_size = config.get_text_config().vocab_size
    if type(mask_token_id) is not int or not 0 <= mask_token_id < vocab_size:
        raise ValueError(
            f"Mask token id {mask_token_id!r} has no embedding: the model's ids are 0 … "
            f"{vocab_size - 1}. Use an unused id, or resize the embedding first."
        )
    return mask_token_id


def write_mask_token_id(config: PreTrainedConfig, mask_token_id: int) -> None:
    """Set every engine's key to `mask_token_id`, in place; the mark of PARD-2 stays."""
    for key in MASK_KEYS:
        setattr(config, key, mask_token_id)
    config.spd_type = "pard2" if getattr(config, "spd_type", None) == "pard2" else "pard"
