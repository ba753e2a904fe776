"""How long forwards take by their rows: measured once, and by what they take undisturbed."""

import functools
import itertools

import pytest
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

from hf_paradraft.decoding import latency
from hf_paradraft.decoding.latency import row_latency


def test_latency_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_paradraft.decoding.latency.FOLDER", tmp_path / "here")
    target = tiny_model()
    first = row_latency(target)
    assert first.seconds == sorted(first.seconds)
    assert all(seconds > 0 for seconds in first.seconds)
    monkeypatch.setattr(latency, "measure", None)
    assert row_latency(target) is first
    same = tiny_model()
    assert row_latency(same) == first  # read from disk
    file = next((tmp_path / "here").iterdir())
    file.write_text("{broken")
    with pytest.raises(TypeError):
        row_latency(tiny_model())


def test_adapters_and_compiled_or_offloaded_parts_have_latencies_of_their_own(
    tmp_path, monkeypatch
):
    """A table of another forward made automatic trees slower than plain decoding."""
    monkeypatch.setattr("hf_paradraft.decoding.latency.FOLDER", tmp_path)
    row_latency(tiny_model())
    row_latency(
        get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"])).get_base_model()
    )
    row_latency(cpu_offload(tiny_model()))
    compiled = tiny_model()
    compiled.forward = functools.partial(compiled.forward)
    row_latency(compiled)
    assert len(list(tmp_path.iterdir())) == 4


def test_disturbed_forwards_do_not_change_the_latency(target, monkeypatch):
    """One forward in three is disturbed, and takes twice as long; there is time for two of each
    size.
    """
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
