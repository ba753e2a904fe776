"""The golden rounds are as they were recorded: `python -m tests.golden.rounds --record` records
them anew.
"""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    "third", [0, *(pytest.param(third, marks=pytest.mark.nightly) for third in (1, 2))]
)
def test_rounds_are_as_recorded(third):
    """In a process of its own, which sets how torch computes before it is loaded."""
    command = [sys.executable, "-m", "tests.golden.rounds", "--third", str(third)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert " 0 of 0 " not in done.stdout
