"""Measure drafters against plain decoding and transformers' own methods, in one process,
interleaved.
"""

from .measure import Measurement, Settings, bench
from .methods import Method, assisted, drafted, plain, prompt_lookup
from .questions import Prompt, Question, load_questions
from .results import records

__all__ = [
    "Measurement",
    "Method",
    "Prompt",
    "Question",
    "Settings",
    "assisted",
    "bench",
    "drafted",
    "load_questions",
    "plain",
    "prompt_lookup",
    "records",
]
