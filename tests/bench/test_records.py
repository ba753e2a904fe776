"""A benchmark's records: of a run that was stopped, with holes, without memory."""

import json

import pytest
import torch
from rich.console import Console
from test_bench import pard_chain
from tiny import near_copy, tiny_model, with_prompts

import hf_paradraft
from hf_paradraft.bench import Prompt, Settings, drafted, plain
from hf_paradraft.bench.results import Unfinished, compare


class Stopped(Exception):
    pass


def test_a_stopped_run_goes_on(tmp_path):
    target, file = tiny_model(dtype=torch.float32), tmp_path / "results.json"
    methods = [plain(), pard_chain(near_copy(target), 4)]
    prompts = [Prompt("a", torch.tensor([[i, 2, 3]])) for i in range(4)]
    calls = []
    using = methods[1].using
    methods[1].using = lambda: calls.append(1) or using()
    stop_at = Unfinished.save

    def save(self, results):
        stop_at(self, results)
        if len(results) == 4:
            raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unfinished, "save", save)
        with pytest.raises(Stopped):
            compare(target, methods, prompts, Console(quiet=True), Settings(8), file=file)
    assert not file.exists()
    measured = json.loads((tmp_path / "results.json.part").read_text())["measurements"]
    with pytest.raises(ValueError, match=r"other settings \(max_new_tokens: .* there, .* now\)"):
        compare(target, methods, prompts, Console(quiet=True), Settings(9), file=file)
    calls.clear()
    rows = compare(target, methods, prompts, Console(quiet=True), Settings(8), file=file)
    assert len(calls) == 2 + 2  # two to warm up, two prompts that were left
    assert rows[1]["runs"][0]["seconds"] == measured[1]["seconds"]
    assert json.loads(file.read_text()) == json.loads(json.dumps(rows))
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.json"]


def test_a_run_goes_on_only_with_the_weights_that_it_began_with(tmp_path):
    """A drafter that had been trained anew in the same folder went on with the former one's
    figures.
    """
    target, file = tiny_model(dtype=torch.float32), tmp_path / "results.json"
    prompts, console = [Prompt("a", torch.tensor([[1, 2, 3]]))], Console(quiet=True)
    pard = near_copy(target)
    ppd = hf_paradraft.PpdDrafter.from_model(with_prompts(tiny_model(dtype=torch.float32)))
    drafters = {"pard": pard, "ppd": ppd, "ngram": hf_paradraft.NgramDrafter()}
    methods = [
        plain(),
        *(drafted(name, drafter, drafter.speculation_config) for name, drafter in drafters.items()),
    ]

    def stopped(*_):
        raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_paradraft.bench.results.check_equality", stopped)
        with pytest.raises(Stopped):
            compare(target, methods, prompts, console, Settings(4), file=file)
    for weights in (next(pard.parameters()), ppd.prompts):
        with torch.no_grad():
            weights.add_(1.0)
        with pytest.raises(ValueError, match=r"other settings \(weights: .* there, .* now\)"):
            compare(target, methods, prompts, console, Settings(4), file=file)
        with torch.no_grad():
            weights.sub_(1.0)
    (tmp_path / "results.json.part").write_text("{}")
    with pytest.raises(ValueError, match="holds no unfinished run: delete the file"):
        compare(target, methods, prompts, console, Settings(4), file=file)


def test_nothing_measured_does_not_block_the_next_run(tmp_path):
    target, file = tiny_model(dtype=torch.float32), tmp_path / "results.json"
    prompts, methods = [Prompt("a", torch.tensor([[1, 2, 3]]))], [plain()]
    with pytest.raises(ValueError, match="Batches of 4"):
        compare(
            target, methods, prompts, Console(quiet=True), Settings(4, batch_sizes=(4,)), file=file
        )
    with pytest.raises(ValueError, match="one name"):
        compare(target, [plain(), plain()], prompts, Console(quiet=True), Settings(4), file=file)
    assert (
        compare(target, methods, prompts, Console(quiet=True), Settings(4), file=file)[0]["tokens"]
        == 4
    )


def test_without_memory_for_fp32_the_figures_are_kept(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("hf_paradraft.bench.results.check_equality", full)
    console = Console(record=True, width=120)
    rows = compare(
        tiny_model(dtype=torch.float32).bfloat16(),
        [plain()],
        [Prompt("a", torch.tensor([[1, 2]]))],
        console,
        Settings(4),
    )
    assert rows[0]["matches_reference"] is None
    assert "not enough memory" in console.export_text()
