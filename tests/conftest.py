"""Set the environment before any Hugging Face import; the fixtures that most tests share."""

import os

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")

import pytest
import torch
from tiny import near_copy, tiny_model


@pytest.fixture
def target():
    return tiny_model()


@pytest.fixture
def drafter(target):
    return near_copy(target)


@pytest.fixture
def prompt():
    return torch.tensor([[1, 2, 3, 4, 5]])
