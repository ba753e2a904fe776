"""The wheel, as a user gets it: built, installed without extras in an environment of its own, and run."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from loopback import USER

from hf_paradraft.demo import FAMILY

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(*words, **more):
    result = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=900, **more)
    assert result.returncode == 0, f"{words}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    return next(folder.glob("*.whl"))


def test_what_is_in_it(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (
        "hf_paradraft/py.typed",
        "hf_paradraft/hub_cards/pard.jinja",
        "hf_paradraft/spaces/app.py",
        "hf_paradraft/demo/family/target/model.safetensors",
        "hf_paradraft/demo/questions.jsonl",
        "hf_paradraft/demo/tasks/__init__.py",
    ):
        assert wanted in names
    assert not any(name.startswith(("tests/", "docs/", "hf_paradraft/demo/build/")) for name in names)
    assert not any("__pycache__" in name for name in names)


def test_it_runs_without_extras(wheel, hub, tmp_path):
    place = tmp_path / "venv"
    run(sys.executable, "-m", "venv", place)
    pip = [place / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt"]
    run(*pip, "torch")
    run(*pip, wheel)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    environment.pop("PYTHONPATH", None)
    paradraft = place / "bin" / "paradraft"
    here = {"env": environment, "cwd": tmp_path}
    assert "PARD drafter" in run(paradraft, "info", FAMILY / "pard", **here)
    shown = run(paradraft, "demo", "--seconds", "5", "--per-category", "1", "--max-new-tokens", "16", **here)
    assert "pard-tree-k12-auto" in shown
    assert "identical to" in shown
    assert "Warning" not in shown
    run(paradraft, "push", FAMILY / "pard", f"{USER}/from-a-wheel", **here)
    assert "model.safetensors" in hub.files(f"{USER}/from-a-wheel")
    assert "datasets" not in run(place / "bin" / "python", "-m", "pip", "list", **here)
