"""Every Python block in the docs runs, against models on the loopback Hub; every command parses;
every link leads somewhere.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi
from peft import get_peft_model
from sentences import count_words
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.main import get_command

from hf_paradraft import AutoDrafter
from hf_paradraft.cli import app
from hf_paradraft.demo import FAMILY
from hf_paradraft.drafters.ppd import PpdConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [
    # with a process, as tests/drafters/test_process.py starts them
    pytest.param(page, marks=pytest.mark.xdist_group("process") if page.stem == "pearl" else ())
    for page in PAGES
    if "```python" in page.read_text()
]


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_runs(hub, page, tmp_path, monkeypatch, copied_processes):
    """With the embedded family in the place of the models that pages name, and short answers."""
    monkeypatch.chdir(tmp_path)
    api = HfApi()
    for name, folder in (
        ("Qwen/Qwen2.5-7B-Instruct", "target"),
        ("amd/PARD-Qwen2.5-0.5B", "pard"),
        ("user/my-drafter", "pard"),
    ):
        api.create_repo(name)
        api.upload_folder(repo_id=name, folder_path=FAMILY / folder)
    tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-7B-Instruct")
    # Pages say that texts are equal; in bf16 they need not be.
    target = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B-Instruct", dtype=torch.float32)
    get_peft_model(
        AutoModelForCausalLM.from_pretrained(FAMILY / "target"), PpdConfig()
    ).save_pretrained("my-adapter")
    shutil.copytree(FAMILY / "draft", "small-model")
    shutil.copytree(FAMILY / "ppd-draft", "its-adapter")
    scope = {
        "__name__": "__main__",
        "target": target,
        "tokenizer": tokenizer,
        "inputs": tokenizer("def f(x):", return_tensors="pt"),
        "drafter": AutoDrafter.from_pretrained("user/my-drafter"),
    }
    if page.name == "hub.md":
        from hf_paradraft.hub.push import push_recipe

        push_recipe("user/parallel-drafting")
    torch.manual_seed(0)
    # The page's other blocks are files of a kind, which tests/drafters/test_kinds.py puts into
    # their places.
    scripts = blocks(page, "python")[: 2 if page.name == "add-a-drafter.md" else None]
    for block in scripts:
        short = re.sub(r"max_new_tokens=\d{3}\b", "max_new_tokens=32", block)
        exec(compile(short, str(page), "exec"), scope)


def commands(block):
    for line in re.sub(r"\$\{\w+:-(\w+)\}", r"\1", block.replace("\\\n", " ")).splitlines():
        if line.strip().startswith("paradraft "):
            yield shlex.split(line, comments=True)[1:]


COMMANDS = [words for page in PAGES for block in blocks(page, "bash") for words in commands(block)]


@pytest.mark.parametrize(
    "words", [pytest.param(words, id=" ".join(words)[:60]) for words in COMMANDS]
)
def test_commands_parse(words):
    command = get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    command.make_context("paradraft", list(words)).close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path):
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path),
    ]
    result = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "WARNING" not in result.stdout + result.stderr
    assert (tmp_path / "engine" / "index.html").exists()


def test_the_readme_can_be_read_at_once():
    counted = count_words((ROOT / "README.md").read_text())
    assert counted.lines <= 120
    assert counted.words <= 450
    assert counted.words_a_sentence <= 16


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page):
    assert count_words(page.read_text()).words_a_sentence <= 16


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}
