"""The acceptance that a run measures at its end."""

import pytest
from datasets import Dataset
from tiny import make_tokenizer, near_copy, tiny_model

from hf_paradraft.training.metrics import acceptance


@pytest.mark.parametrize("lengths", [[20, 250], [256]])
def test_texts_go_on_as_far_as_there_are_positions(lengths):
    """GPT-2's positions are learned: behind the last there is none."""
    target = tiny_model("gpt2")
    assert target.config.n_positions == 256
    samples = [
        {"input_ids": [1, 2] * (length // 2), "labels": [-100] * (length - 1) + [2]}
        for length in lengths
    ]
    found = acceptance(
        target, near_copy(target, 0.05), make_tokenizer(), Dataset.from_list(samples)
    )
    assert found["samples"] == len(lengths)
    assert found["mean_emitted"] >= 1
