"""The drafters of published layouts."""

import pytest
import torch
from layouts import LAYOUTS, write
from layouts.parts import LAYERS
from published import EXPECTED
from tiny import tiny_model

import hf_paradraft


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """The drafter of a layout, changed before it is written; attached to a target whose embedding
    and head are the expected.
    """
    target = tiny_model("llama", num_hidden_layers=LAYERS, tie_word_embeddings=False)
    with torch.no_grad():
        target.get_input_embeddings().weight.copy_(EXPECTED["embedding"])
        target.get_output_embeddings().weight.copy_(EXPECTED["head"])

    def make(name, attach=True):
        folder = write(
            tmp_path_factory.mktemp("drafter"),
            *(LAYOUTS[name]() if isinstance(name, str) else name),
        )
        drafter = hf_paradraft.AutoDrafter.from_pretrained(folder)
        if attach:
            drafter.attach(target)
        return drafter

    return make
