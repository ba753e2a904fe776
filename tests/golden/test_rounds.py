"""The golden rounds are as they were recorded: `python -m tests.golden.rounds --record` records
them anew.
"""

import subprocess
import sys
from pathlib import Path

import pytest

# three processes, of a third of the cases each
KINDS = [
    ["pard/", "autoregressive/", "ppd/", "prompted/"],
    ["uno/", "n-grams/", "dspark/"],
    ["dflash/", "medusa/", "eagle/", "eagle3/"],
]


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS, ids="".join)
def test_rounds_are_as_recorded(kinds):
    command = [sys.executable, "-m", "tests.golden.rounds", "--only", *kinds]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert " 0 of 0 " not in done.stdout
