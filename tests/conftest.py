"""Set the environment before any Hugging Face import; the fixtures that most tests share."""

import json
import logging
import multiprocessing
import os
import shutil
import tempfile

from loopback import TOKEN, LoopbackHub

HUB = LoopbackHub().start()
os.environ.pop("HF_HUB_OFFLINE", None)
HOME = tempfile.TemporaryDirectory(prefix="paradraft-tests-")
os.environ.update(
    HF_ENDPOINT=HUB.url,
    HF_TOKEN=TOKEN,
    HF_HOME=HOME.name,
    HF_HUB_DISABLE_XET="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
)

import gc

import pytest
import setuptools  # noqa: F401  # first: it refuses to load where something has imported the standard distutils
import torch
from hypothesis import Phase, settings
from tiny import make_tokenizer, near_copy, tiny_model

settings.register_profile("test", derandomize=True, database=None)  # the same cases in every run
settings.register_profile("fuzz", print_blob=True)  # `make fuzz`: new ones
settings.register_profile(  # `make mutations`: what fails is not looked for in a smaller case
    "once", derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("test")
gc.freeze()  # a million objects of libraries, which every collection would look at


def pytest_collection_modifyitems(items):
    """The long ones first, before them what one process does alone, so that none ends long after
    the others.
    """
    items.sort(
        key=lambda item: (
            item.get_closest_marker("xdist_group") is None,
            item.get_closest_marker("slow") is None,
        )
    )


@pytest.fixture(autouse=True, scope="session")
def every_cpu_is_fast_at_fp32_alone():
    """What a test shows does not hang on this machine's instructions; `bf16` asks for the
    others.
    """
    with pytest.MonkeyPatch.context() as patch:
        for probe in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
            patch.setattr(torch.cpu, probe, lambda: False)
        yield


@pytest.fixture
def bf16(monkeypatch):
    """A CPU that is fast at bfloat16."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)


@pytest.fixture(autouse=True)
def nothing_ran_before():
    """Untrained weights are the same, and what is told once is told, in every test, whichever ran
    before.
    """
    torch.manual_seed(0)
    logging.Logger.warning_once.cache_clear()


@pytest.fixture
def target():
    return tiny_model()


@pytest.fixture
def drafter(target):
    return near_copy(target)


@pytest.fixture
def prompt():
    return torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture
def hub():
    """The real client talks to this one; empty at first."""
    HUB.reset()
    return HUB


@pytest.fixture
def copied_processes(monkeypatch):
    """Processes of drafters begin as copies of one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hf_paradraft"])
    monkeypatch.setattr("hf_paradraft.pearl.process.get_context", lambda method: context)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A target, and rows that it wrote."""
    folder = tmp_path_factory.mktemp("made")
    # milder: what it says can be learned
    target = tiny_model("llama", num_hidden_layers=6, initializer_range=0.15)
    target.save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    prompts = torch.cat(
        [
            torch.randint(0, 8, (1, 3), generator=torch.Generator().manual_seed(seed))
            for seed in range(24)
        ]
    )
    written = target.generate(prompts, do_sample=False, max_new_tokens=40, eos_token_id=None)
    rows = [json.dumps({"text": make_tokenizer().decode(ids)}) + "\n" for ids in written]
    (folder / "rows.jsonl").write_text("".join(rows))
    (folder / "some.jsonl").write_text("".join(rows[:2]))
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """A copy of them, to be written into."""
    return shutil.copytree(made, tmp_path / "made")
