"""Measure drafters beside plain decoding and transformers' own methods, in one process, interleaved."""

from .measure import Measurement, bench
from .methods import Method, assisted, pard_chain, pard_tree, plain, prompt_lookup
from .report import records, table

__all__ = ["Measurement", "Method", "assisted", "bench", "pard_chain", "pard_tree", "plain", "prompt_lookup", "records", "table"]
