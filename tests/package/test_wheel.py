"""The wheel, as a user gets it: built, installed without extras in an environment of its own, and
run.
"""

import os
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from loopback import USER
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hf_paradraft.demo import FAMILY

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]  # one is built


def run(*words, **more):
    result = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=900, **more
    )
    assert result.returncode == 0, f"{words}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
        ROOT,
    )
    return next(folder.glob("*.whl"))


def test_what_is_in_it(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (
        "hf_paradraft/py.typed",
        "hf_paradraft/hub_cards/pard.jinja",
        "hf_paradraft/spaces/app.py",
        "hf_paradraft/demo/family/target/model.safetensors",
        "hf_paradraft/demo/questions.jsonl",
        "hf_paradraft/demo/public/eagle3/model.safetensors",
        "hf_paradraft/demo/public_model.py",
    ):
        assert wanted in names
    assert not any(name.startswith(("tests/", "docs/", "examples/")) for name in names)
    assert not any("__pycache__" in name for name in names)


def wanted_by(name, found):
    """The installed distributions that `name` needs without extras, by name."""
    for text in distribution(name).requires or []:
        needed = Requirement(text)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        key = canonicalize_name(needed.name)
        if key not in found:
            found[key] = distribution(needed.name)
            for extra in needed.extras:
                assert not any(
                    f'extra == "{extra}"' in more for more in found[key].requires or []
                ), f"{needed}: follow its extras"
            wanted_by(key, found)
    return found


@pytest.mark.nightly
def test_it_runs_without_extras(wheel, hub, tmp_path):
    """An environment with what the wheel asks for and nothing else: linked, for it is installed
    here, and not once more.
    """
    place = tmp_path / "venv"
    run(sys.executable, "-m", "venv", place)
    python = place / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for known in wanted_by("hf-paradraft", {}).values():
        for part in {file.parts[0] for file in known.files or ()} - {"..", "__pycache__"}:
            if not (site / part).exists():
                (site / part).symlink_to(known.locate_file(part))
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", wheel)
    assert "No broken requirements" in run(python, "-m", "pip", "check")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    environment.pop("PYTHONPATH", None)
    paradraft = place / "bin" / "paradraft"
    here = {"env": environment, "cwd": tmp_path}
    assert "PARD drafter" in run(paradraft, "info", FAMILY / "pard", **here)
    shown = run(
        paradraft, "demo", "--seconds", "5", "--per-category", "1", "--max-new-tokens", "8", **here
    )
    assert "pard-tree-k12-auto" in shown
    assert "identical to" in shown
    assert "Warning" not in shown
    run(paradraft, "push", FAMILY / "pard", f"{USER}/from-a-wheel", **here)
    assert "model.safetensors" in hub.files(f"{USER}/from-a-wheel")
    installed = run(python, "-m", "pip", "list", **here)
    assert "transformers" in installed
    assert not any(extra in installed for extra in ("datasets", "matplotlib", "gradio"))
