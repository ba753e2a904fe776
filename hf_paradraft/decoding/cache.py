"""The target's cache: what it must be, and going back to the accepted path."""

from typing import Any

from transformers import Cache, QuantizedCache


def recording_cache(model_kwargs: dict[str, Any]) -> Cache:
    """The call's cache, made able to roll back.

    Raises:
        ValueError: there is none, or it is of a kind that cannot drop its last tokens.
    """
    cache = model_kwargs.get("past_key_values")
    if not model_kwargs.get("use_cache", True) or cache is None:
        raise ValueError("Speculative decoding needs the target's key-value cache: pass use_cache=True and a model that has one.")
    if cache.is_compileable or isinstance(cache, QuantizedCache):
        raise ValueError(
            f"Speculative decoding cannot roll back a {type(cache).__name__} yet: leave cache_implementation and "
            "past_key_values unset, or pass a DynamicCache."
        )
    cache.activate_past_recording()
    return cache


def keep_path(cache: Cache, num_drafted: int, num_accepted: int) -> None:
    """Drop the rejected end of a chain; the accepted tokens' entries stay as they are.

    Args:
        cache: has entries for the whole draft.
        num_drafted: tokens of the chain.
        num_accepted: how many of them to keep.
    """
    cache.crop(-(num_drafted - num_accepted))  # also with 0: sliding windows shrink back to their size here
