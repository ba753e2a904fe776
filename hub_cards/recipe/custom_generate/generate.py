"""Speculative decoding with parallel drafters, as a recipe for `generate(custom_generate=…)`."""

import hf_paradraft as pd


def generate(model, assistant_model=None, **kwargs):
    """As `model.generate(assistant_model=…)` with hf_paradraft installed.

    Args:
        model: the target.
        assistant_model: a drafter, or the name of one on the Hub.
        kwargs: of `generate`.
    """
    if assistant_model is None:
        raise ValueError("This recipe needs a drafter: pass assistant_model=pd.AutoDrafter.from_pretrained(…), or its name.")
    if isinstance(assistant_model, str):
        assistant_model = pd.AutoDrafter.from_pretrained(assistant_model, dtype=model.dtype)
        if isinstance(assistant_model, pd.PardDrafter):
            assistant_model.to(model.device)
    return model.generate(assistant_model=assistant_model, **kwargs)
