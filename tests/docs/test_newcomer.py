"""What docs/train.md says, done: its last block verbatim in a shell, its first with the embedded
family in the place of Qwen.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from docs.test_docs import ROOT, blocks, commands
from huggingface_hub import HfApi
from typer.testing import CliRunner

from hf_paradraft.cli import app
from hf_paradraft.demo import FAMILY, QUESTIONS

PAGE = ROOT / "docs" / "train.md"


@pytest.mark.nightly
def test_on_this_machine_alone(tmp_path):
    block = (
        blocks(PAGE, "bash")[1]
        .replace(". .venv/bin/activate\n", "")
        .replace("tests/loopback.py", f"{ROOT}/tests/loopback.py")
    )
    # less of the same
    block = block.replace("True, 12)", "True, 1)").replace("False, 600)", "False, 4)")
    block = block.replace(
        "-k 8 -n auto", "-k 8 -n auto -m assisted-k3 -m pard --repeats 1 --max-new-tokens 8"
    )
    block = block.replace("--max-new-tokens 96", "--max-new-tokens 24")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # as a newcomer's shell has it
    bare = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {
        "PATH": path,
        "STEPS": "2",
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT),
    }
    command = ["bash", "-euo", "pipefail", "-c", block]
    result = subprocess.run(
        command, cwd=tmp_path, env={**bare, **settings}, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "identical to" in result.stdout
    assert "http://127.0.0.1" in result.stdout  # the commit


@pytest.mark.slow
def test_from_nothing_to_pushed(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, folder in (
        ("Qwen/Qwen2.5-7B-Instruct", "target"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "draft"),
    ):
        HfApi().create_repo(name)
        HfApi().upload_folder(repo_id=name, folder_path=FAMILY / folder)
    rows = [
        line.replace('"turns": ["', '"messages": [{"role": "user", "content": "').replace(
            '"]}', '"}]}'
        )
        for line in QUESTIONS.open()
    ]
    Path("prompts.jsonl").write_text("".join(rows[::32]))
    Path("others.jsonl").write_text(rows[1])
    less = {
        "train": ["--max-steps", "2"],
        "bench": ["--max-new-tokens", "8", "-k", "4", "-n", "auto"],
    }
    done = []
    for words in commands(blocks(PAGE, "bash")[0]):
        words = [{"151665": "4"}.get(word, word) for word in words]
        result = CliRunner().invoke(app, [*words, *less.get(words[0], [])])
        assert result.exit_code == 0, f"{shlex.join(words)}\n{result.output}\n{result.exception!r}"
        done.append(words[0])
    assert done == ["regenerate", "train", "bench", "push"]
    assert {"model.safetensors", "README.md", "bench.json", "tau.png"} <= set(
        hub.files("user/my-drafter")
    )
