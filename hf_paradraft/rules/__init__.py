"""Acceptance rules beyond greedy decoding, and the table of their names."""

from __future__ import annotations

from transformers import GenerationConfig

from ..decoding.accept import Greedy, Rule
from ..decoding.checks import Refused
from ..protocol import Drafter
from .rejection import Rejection
from .same_seed import SameSeed
from .typical import Typical

RULES: dict[str, type[Rule]] = {
    "greedy": Greedy,
    "sample_match": SameSeed,
    "rejection": Rejection,
    "typical": Typical,
}


def rule_of(drafter: Drafter, generation_config: GenerationConfig) -> Rule:
    """Make the acceptance rule of a call.

    Raises:
        ValueError: the drafter's rule does not fit the call.
    """
    name, do_sample = drafter.speculation_config.acceptance, generation_config.do_sample
    if name == "auto":
        name = "sample_match" if do_sample else "greedy"
    if (name == "greedy") == do_sample:
        raise Refused(
            f"acceptance={name!r} does not fit do_sample={do_sample}; use acceptance='auto', or "
            "change do_sample."
        )
    return RULES[name]()
