"""Every example runs as it stands."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALWAYS = {"generate", "own_drafter"}  # the README begins with these
EXAMPLES = [
    pytest.param(script, marks=() if script.stem in ALWAYS else pytest.mark.nightly)
    for script in sorted((ROOT / "examples").glob("*.py"))
    if script.stem != "peers"  # which wants packages of others
]

SAID = (
    "per round",
    "tokens a round",
    "ParallelSpecDrafter",
    "accepted_prediction_tokens=",
    "AutoDrafter.from_pretrained(…)",
)


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_examples_run(script, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    if script.stem in ALWAYS:  # here; others start servers, and set up other libraries
        monkeypatch.setattr(sys, "argv", [str(script)])
        runpy.run_path(str(script), run_name="__main__")
        shown = "".join(capfd.readouterr())
    else:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        result = subprocess.run(
            [sys.executable, script], env=environment, capture_output=True, text=True, timeout=300
        )
        shown = result.stdout + result.stderr
        assert result.returncode == 0, shown
    assert any(said in shown for said in SAID)
