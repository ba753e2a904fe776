"""The committed baseline covers every operation, and nothing of a round grows faster than its context."""

import pytest
from micro.growth import BASELINE, exponent, load, plot, ratios
from micro.test_operations import GROWTH


def test_the_baseline_covers_everything():
    baseline = load(BASELINE)
    assert {name: {dimension: list(line) for dimension, line in lines.items()} for name, lines in baseline.items()} == {
        operation.__name__: {dimension: list(values) for dimension, values in lines.items()}
        for operation, lines in GROWTH.items()
    }


def test_nothing_of_a_round_is_worse_than_linear_in_context():
    exponents = {name: exponent(lines["context"]) for name, lines in load(BASELINE).items() if "context" in lines}
    assert exponents.pop("training_rows") < 2.2  # of its output's size
    assert len(exponents) == 3
    assert all(value < 1.1 for value in exponents.values()), exponents


def test_ratios_and_exponents():
    def entry(operation, value, seconds):
        return {"extra_info": {"operation": operation, "dimension": "N", "value": value}, "stats": {"median": seconds}}

    found = ratios({"benchmarks": [entry("reference", 0, 2.0), entry("a", 8, 4.0), entry("a", 16, 16.0)]})
    assert found == {"a": {"N": {8: 2.0, 16: 8.0}}}
    assert exponent(found["a"]["N"]) == pytest.approx(2.0)
    assert plot({**found, "b": {"K": {1: 1.0, 2: 2.0}}}).axes
