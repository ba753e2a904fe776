"""Rules of acceptance beyond greedy decoding, and where each is looked up by its name."""

from __future__ import annotations

from transformers import GenerationConfig

from ..decoding.accept import Greedy, Rule
from ..decoding.checks import Refused
from ..protocol import Drafter
from .rejection import Rejection
from .same_seed import SameSeed
from .typical import Typical

RULES: dict[str, type[Rule]] = {"greedy": Greedy, "sample_match": SameSeed, "rejection": Rejection, "typical": Typical}


def rule_of(drafter: Drafter, generation_config: GenerationConfig) -> Rule:
    """Make the rule of a call.

    Raises:
        ValueError: the drafter's rule does not fit the call.
    """
    try:
        return RULES[drafter.speculation_config.rule(generation_config.do_sample)]()
    except ValueError as error:
        raise Refused(str(error)) from None
