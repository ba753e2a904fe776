"""Speculative decoding with parallel drafters, as a recipe for `generate(custom_generate=…)`."""

from hf_paradraft import AutoDrafter
from hf_paradraft.hardware import input_device


def generate(model, assistant_model=None, **kwargs):
    """As `model.generate(assistant_model=…)` with hf_paradraft installed.

    Args:
        model: the target.
        assistant_model: a drafter, or the name of one on the Hub.
        kwargs: of `generate`.
    """
    if assistant_model is None:
        raise ValueError(
            "This recipe needs a drafter: pass assistant_model=AutoDrafter.from_pretrained(…), or "
            "its name."
        )
    if isinstance(assistant_model, str):
        place = {"": input_device(model)}
        assistant_model = AutoDrafter.from_pretrained(
            assistant_model, dtype=model.dtype, device_map=place
        )
    return model.generate(assistant_model=assistant_model, **kwargs)
