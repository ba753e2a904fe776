"""The committed baseline covers every operation; what `make micro` says of a run is right."""

import pytest
from micro.growth import BASELINE, exponent, load, plot, ratios, worse_than_linear
from micro.test_operations import GROWTH


def test_the_baseline_covers_everything():
    baseline = load(BASELINE)
    assert {
        name: {dimension: list(line) for dimension, line in lines.items()}
        for name, lines in baseline.items()
    } == {
        operation.__name__: {dimension: list(values) for dimension, values in lines.items()}
        for operation, lines in GROWTH.items()
    }


def test_what_is_worse_than_linear_in_context_is_named():
    baseline = load(BASELINE)
    assert worse_than_linear(baseline) == []
    baseline["kept_path"]["context"] = {256: 1.0, 1024: 16.0}
    assert worse_than_linear(baseline) == ["kept_path"]


def test_ratios_and_exponents():
    def entry(operation, value, seconds):
        return {
            "extra_info": {"operation": operation, "dimension": "N", "value": value},
            "stats": {"median": seconds},
        }

    measured = ratios(
        {"benchmarks": [entry("reference", 0, 2.0), entry("a", 8, 4.0), entry("a", 16, 16.0)]}
    )
    assert measured == {"a": {"N": {8: 2.0, 16: 8.0}}}
    assert exponent(measured["a"]["N"]) == pytest.approx(2.0)
    assert plot({**measured, "b": {"K": {1: 1.0, 2: 2.0}}}).axes
