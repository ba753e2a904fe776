"""A tiny target whose answers can be learned, and rows that it wrote."""

import json
import shutil

import pytest
import torch
from tiny import make_tokenizer, tiny_model


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
    (folder / "some.jsonl").write_text("".join(rows[:6]))
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "made")
