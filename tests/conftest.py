"""Set the environment before any Hugging Face import; the fixtures that most tests share."""

import logging
import os
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

import pytest
import setuptools  # noqa: F401  # first: it refuses to load where something has imported the standard distutils
import torch
from hypothesis import settings
from tiny import near_copy, tiny_model

settings.register_profile("test", derandomize=True, database=None)  # the same cases in every run
settings.register_profile("fuzz", print_blob=True)  # `make fuzz`: new ones
settings.load_profile("test")


def pytest_collection_modifyitems(items):
    """The long ones first, before them what one process does alone, so that none ends long after the others."""
    items.sort(key=lambda item: (item.get_closest_marker("xdist_group") is None, item.get_closest_marker("slow") is None))


@pytest.fixture(autouse=True, scope="session")
def every_cpu_is_fast_at_fp32_alone():
    """What a test shows does not hang on this machine's instructions; `bf16` asks for the others."""
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
    """Untrained weights are the same, and what is told once is told, in every test, whichever ran before."""
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
