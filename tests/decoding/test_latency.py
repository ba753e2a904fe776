"""How long forwards take by their rows: measured once, and by what they take undisturbed."""

import itertools

import pytest
from tiny import tiny_model

from hf_paradraft.decoding import latency
from hf_paradraft.decoding.latency import row_latency


def test_latency_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_paradraft.decoding.latency.FOLDER", tmp_path / "here")
    target = tiny_model()
    first = row_latency(target)
    assert first.seconds == sorted(first.seconds)
    assert all(seconds > 0 for seconds in first.seconds)
    target.forward = None  # a second measurement would call it
    assert row_latency(target) == first
    file = next((tmp_path / "here").iterdir())
    file.write_text("{broken")
    with pytest.raises(TypeError):
        row_latency(target)


def test_what_else_the_machine_does_is_not_the_forwards(target, monkeypatch):
    """One forward in three is disturbed, and takes twice as long; there is time for two of each size."""
    now, calls = [0.0], itertools.count()

    def takes(module, arguments, options):
        rows = (arguments[0] if arguments else options["input_ids"]).shape[1]
        now[0] += 0.1 * (1 + rows / 16) * (2 if next(calls) % 3 == 0 else 1)

    monkeypatch.setattr(latency, "perf_counter", lambda: now[0])
    target.register_forward_pre_hook(takes, with_kwargs=True)
    measured = latency.measure(target)
    assert measured.seconds == pytest.approx([0.1 * (1 + rows / 16) for rows in measured.rows])


def test_latency_is_remembered_where_nothing_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("hf_paradraft.decoding.latency.FOLDER", tmp_path / "file" / "below")
    target = tiny_model()
    assert row_latency(target) is row_latency(target)
