"""A tiny target whose answers can be learned, with rows that it wrote; and the drafters of published layouts."""

import json
import shutil

import pytest
import torch
from layouts import LAYERS, LAYOUTS, write
from published import EXPECTED
from tiny import make_tokenizer, tiny_model

import hf_paradraft as pd


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A target, and rows that it wrote."""
    folder = tmp_path_factory.mktemp("made")
    target = tiny_model("llama", num_hidden_layers=6, initializer_range=0.15)  # milder: what it says can be learned
    target.save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    prompts = torch.cat([torch.randint(0, 8, (1, 3), generator=torch.Generator().manual_seed(seed)) for seed in range(24)])
    written = target.generate(prompts, do_sample=False, max_new_tokens=40, eos_token_id=None)
    rows = [json.dumps({"text": make_tokenizer().decode(ids)}) + "\n" for ids in written]
    (folder / "rows.jsonl").write_text("".join(rows))
    (folder / "some.jsonl").write_text("".join(rows[:2]))
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "made")


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """The drafter of a layout, changed before it is written; attached to a target whose embedding and head are the expected."""
    target = tiny_model("llama", num_hidden_layers=LAYERS, tie_word_embeddings=False)
    with torch.no_grad():
        target.get_input_embeddings().weight.copy_(EXPECTED["embedding"])
        target.get_output_embeddings().weight.copy_(EXPECTED["head"])

    def make(name, attach=True):
        folder = write(tmp_path_factory.mktemp("drafter"), *(LAYOUTS[name]() if isinstance(name, str) else name))
        drafter = pd.AutoDrafter.from_pretrained(folder)
        if attach:
            drafter.attach(target)
        return drafter

    return make
