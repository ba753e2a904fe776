"""The command line as a person meets it."""

import json
import os
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from hf_paradraft.cli import app, main, with_home
from hf_paradraft.demo import FAMILY, QUESTIONS

run = CliRunner().invoke
WITHOUT_OPENAI = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *place: None if name == "openai" else find(name, *place)
from hf_paradraft.cli import main
main()
"""


@pytest.mark.parametrize(
    "command",
    [
        ["demo"],
        ["generate"],
        ["bench"],
        ["report"],
        ["info"],
        ["regenerate"],
        ["train", "pard"],
        ["train", "ppd"],
    ],
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


@pytest.mark.parametrize(
    ("line", "extra"),
    [
        (["serve"], "serve"),
        (
            "regenerate --base-url http://x/v1 --target m --prompts rows --output out".split(),
            "train",
        ),
    ],
)
def test_a_missing_package_is_named_with_its_extra(line, extra, tmp_path):
    (tmp_path / "rows").write_text('{"text": "a b"}')
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_OPENAI, *line],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert f"openai is not installed: pip install 'hf-paradraft[{extra}]'" in done.stderr


def test_a_drafter_wants_its_target():
    result = run(app, ["demo", "--drafter", "somewhere"])
    assert result.exit_code == 2
    assert "goes with --target" in " ".join(result.output.replace("│", " ").split())


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
    result = run(
        app,
        [
            "generate",
            "Write as JSON:\nname: Mia\nage: 31",
            "--max-new-tokens",
            "24",
            "--dtype",
            "float32",
        ],
    )
    assert result.exit_code == 0
    assert "identical to its output" in " ".join(result.output.split())


@pytest.mark.slow
def test_bench_writes_records(tmp_path, tmp_path_factory):
    file, questions = tmp_path / "bench.json", tmp_path_factory.mktemp("questions") / "two.jsonl"
    questions.write_text("".join(QUESTIONS.read_text().splitlines(keepends=True)[:64:32]))
    short = [
        "--questions",
        str(questions),
        "--max-new-tokens",
        "4",
        "-k",
        "8",
        "--dtype",
        "float32",
        "--repeats",
        "1",
    ]
    result = run(app, ["bench", *short, "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = {row["method"]: row for row in json.loads(file.read_text())}
    assert rows["pard-chain-k8"]["matches_reference"] == 1
    fields = (
        "method tokens seconds tokens_per_second speedup tau matches_reference by_category".split()
    )
    assert set(fields) <= set(rows["plain"])
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
    assert run(app, ["bench", *short, "--only", "pard-chain", "--json", str(file)]).exit_code == 0
    assert [row["method"] for row in json.loads(file.read_text())] == ["plain", "pard-chain-k8"]
    result = run(app, ["bench", *short, "--only", "nothing"])
    assert result.exit_code == 2
    assert "there are plain, assisted-k3" in " ".join(result.output.replace("│", "").split())
    result = run(
        app,
        [
            "report",
            str(file),
            "--markdown",
            str(tmp_path / "table.md"),
            "--plot",
            str(tmp_path / "figures"),
        ],
    )
    assert result.exit_code == 0, result.output
    assert "pard-chain-k8" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "figures" / "latency.png").exists()
    for place in ("figures", "one.png", "one.svg", "one.pdf"):  # and again over them
        for _ in range(2):
            result = run(
                app,
                [
                    "report",
                    str(file),
                    "--markdown",
                    str(tmp_path / "table.md"),
                    "--plot",
                    str(tmp_path / place),
                ],
            )
            assert result.exit_code == 0, result.output


def test_bench_says_at_once_what_it_cannot_do(tmp_path):
    result = run(app, ["bench", "--json", str(tmp_path / "nowhere" / "bench.json")])
    assert result.exit_code == 2
    assert "there is no folder" in result.output
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "holiday.png").write_text("x")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "speedup.png").write_text("x")
    (tmp_path / "ours.md").write_text("| method | tokens/s |\n|---|---|")  # its last line is open
    (tmp_path / "notes.md").write_text("| method | tokens/s |\n|---|---|\n\nWhat I think of it.\n")
    for words, message in (
        (["bench", "--json", str(tmp_path / "folder")], "name a file"),
        (["bench", "--plot", str(tmp_path / "x.foo")], "is no picture"),
        (["bench", "--plot", str(tmp_path / "folder.png")], "is a folder"),
        (["bench", "--plot", str(tmp_path / "file")], "is a file"),
        (["bench", "--plot", str(tmp_path / "holiday.png")], "no benchmark has drawn"),
        (["bench", "--plot", str(tmp_path / "pictures")], "no benchmark has drawn"),
        (["bench", "--markdown", str(tmp_path / "notes.md")], "no benchmark has written"),
        (["bench", "--parent", "somewhere"], "has its own"),
        (["bench", "--markdown", str(tmp_path / "ours.md"), "--parent", "x"], "has its own"),
        (
            ["bench", "--target", "a", "--drafter", "b", "--drafter", "c", "--case", "batches"],
            "looks at one drafter",
        ),
    ):
        result = run(app, words)
        assert result.exit_code == 2, words
        assert message in " ".join(result.output.replace("│", "").split()), words
    result = run(app, ["bench", "-n", "many"])
    assert result.exit_code == 2
    assert "whole number" in result.output


@pytest.fixture
def paradraft(monkeypatch):
    """The command on a console of some encoding: its exit code and what it wrote, as bytes.

    `python -m hf_paradraft.cli` itself is in tests/integration/test_hub.py, in a locale of ASCII.
    """

    def called(*arguments, stdin=b"", encoding="utf-8"):
        shown = BytesIO()
        console = TextIOWrapper(shown, encoding=encoding, write_through=True)
        monkeypatch.setattr(sys, "argv", ["paradraft", *map(os.fsdecode, arguments)])
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(stdin), encoding=encoding))
        monkeypatch.setattr(sys, "stdout", console)
        monkeypatch.setattr(sys, "stderr", console)
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code or 0, shown.getvalue()

    return called


@pytest.mark.parametrize(
    ("encoding", "command"), [("ascii", ["bench", "--help"]), ("cp1252", ["info", FAMILY / "pard"])]
)
def test_no_console_ends_for_the_sake_of_a_character(paradraft, encoding, command):
    code, shown = paradraft(*command, encoding=encoding)
    assert code == 0, shown
    assert shown.decode(encoding)


@pytest.mark.slow
def test_an_answer_on_a_console_of_windows(paradraft):
    code, shown = paradraft(
        "generate",
        "Hello",
        "--max-new-tokens",
        "8",
        "--dtype",
        "float32",
        encoding="cp1252",
    )
    assert code == 0, shown
    assert b"plain generate" in shown


def test_a_home_folder_behind_an_equals_sign(tmp_path, monkeypatch):
    """A shell leaves it alone there, and a folder called ~ appeared."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for words in (["--output-dir=~/d"], ["--output-dir", "~/d"]):
        wanted = [with_home(word, before) for before, word in pairwise(["", *words])]
        assert wanted[-1].endswith(str(tmp_path / "d"))
    assert with_home("~/d is a folder", "") == "~/d is a folder"  # a prompt
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "file").touch()
    result = run(
        app, ["train", "pard", "--model", "m", "--train-file=~/rows.jsonl", "--output-dir=~/d"]
    )
    assert str(tmp_path / "d") in str(result.exception)
    assert not (tmp_path / "~").exists()


@pytest.mark.slow
def test_a_prompt_from_standard_input(paradraft):
    code, shown = paradraft(
        "generate", "-", "--max-new-tokens", "8", "--dtype", "float32", stdin="Grüße, Mia".encode()
    )
    assert code == 0, shown
    assert "Grüße, Mia" in shown.decode()


@pytest.mark.parametrize(
    ("prompt", "stdin", "said"),
    [
        ("-", b"\xff\xfe\xfa", "no text in UTF-8"),
        ("-", b"  ", "prompt is empty"),
        ("\udcff", b"", "half a character"),
    ],
)
def test_a_prompt_that_is_no_text(prompt, stdin, said):
    result = CliRunner().invoke(app, ["generate", prompt], input=stdin)
    assert isinstance(result.exception, ValueError)
    assert said in str(result.exception)


def test_an_error_is_a_sentence_on_the_console(paradraft):
    code, shown = paradraft("generate", b"\xff")
    assert code == 1
    assert b"half a character" in shown
    assert b"Traceback" not in shown
