"""Every example runs as it stands."""

import os
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
def test_examples_run(script, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert any(said in result.stdout + result.stderr for said in SAID)
