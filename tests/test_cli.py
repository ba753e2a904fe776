"""The command line as a person meets it."""

import json
import sys

import pytest
from typer.testing import CliRunner

from hf_paradraft.cli import app, main
from hf_paradraft.demo import FAMILY, QUESTIONS

run = CliRunner().invoke


@pytest.mark.parametrize(
    "command",
    [["demo"], ["generate"], ["bench"], ["report"], ["plan"], ["info"], ["regenerate"], ["train", "pard"], ["train", "ppd"]],
    ids=" ".join,
)
def test_help_has_an_example(command):
    result = run(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Example: paradraft" in " ".join(result.output.split())


def test_errors_are_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text("{broken")
    monkeypatch.setattr(sys, "argv", ["paradraft", "info", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        main()
    shown = capsys.readouterr().err
    assert left.value.code == 1
    assert "is not valid JSON" in " ".join(shown.split())
    assert "Traceback" not in shown


def test_target_and_drafter_go_together():
    result = run(app, ["demo", "--target", "somewhere"])
    assert result.exit_code == 2
    assert "go together" in result.output


def test_temperatures_too_near_to_nothing():
    """Logits over 1e-45 are no numbers."""
    for command in (["bench", "-t", "1e-45"], ["demo", "--temperature", "1e-45"]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2
        assert "0.001" in result.output


def test_info():
    result = run(app, ["info", str(FAMILY / "pard")])
    assert result.exit_code == 0
    assert "PARD drafter" in result.output


@pytest.mark.slow
def test_generate_streams_and_compares():
    result = run(app, ["generate", "Write as JSON:\nname: Mia\nage: 31", "--max-new-tokens", "24", "--dtype", "float32"])
    assert result.exit_code == 0
    assert "identical to its output" in " ".join(result.output.split())


@pytest.mark.slow
def test_bench_writes_records(tmp_path, tmp_path_factory):
    file, questions = tmp_path / "bench.json", tmp_path_factory.mktemp("questions") / "two.jsonl"
    questions.write_text("".join(QUESTIONS.read_text().splitlines(keepends=True)[:64:32]))
    short = ["--questions", str(questions), "--max-new-tokens", "4", "-k", "8", "--dtype", "float32", "--repeats", "1"]
    result = run(app, ["bench", *short, "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = {row["method"]: row for row in json.loads(file.read_text())}
    assert rows["pard-chain-k8"]["matches_reference"] == 1
    fields = "method tokens seconds tokens_per_second speedup tau matches_reference by_category".split()
    assert set(fields) <= set(rows["plain"])
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
    assert run(app, ["bench", *short, "--only", "pard-chain", "--json", str(file)]).exit_code == 0
    assert [row["method"] for row in json.loads(file.read_text())] == ["plain", "pard-chain-k8"]
    result = run(app, ["bench", *short, "--only", "nothing"])
    assert result.exit_code == 2
    assert "there are plain, assisted-k3" in " ".join(result.output.replace("│", "").split())
    result = run(app, ["report", str(file), "--markdown", str(tmp_path / "table.md"), "--plot", str(tmp_path / "figures")])
    assert result.exit_code == 0, result.output
    assert "pard-chain-k8" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "figures" / "latency.png").exists()


def test_bench_says_at_once_what_it_cannot_do(tmp_path):
    result = run(app, ["bench", "--json", str(tmp_path / "nowhere" / "bench.json")])
    assert result.exit_code == 2
    assert "there is no folder" in result.output
    (tmp_path / "folder").mkdir()
    for words, message in (
        (["bench", "--json", str(tmp_path / "folder")], "name a file"),
        (["bench", "--plot", str(tmp_path / "x.foo")], "is no picture"),
        (["bench", "--parent", "somewhere"], "has its own"),
        (["bench", "--target", "a", "--drafter", "b", "--drafter", "c", "--case", "batches"], "looks at one drafter"),
        (["plan", "--check", "4", "--prompts", "96"], "other questions"),
        (["plan", "--check", "4", "--acceptance", "0.5"], "without --acceptance"),
    ):
        result = run(app, words)
        assert result.exit_code == 2, words
        assert message in " ".join(result.output.replace("│", "").split()), words
    result = run(app, ["bench", "-n", "many"])
    assert result.exit_code == 2
    assert "whole number" in result.output
