"""The acceptance that a run measures at its end."""

import pytest
from datasets import Dataset
from tiny import make_tokenizer, near_copy, tiny_model

from hf_paradraft.training.target_training import acceptance


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
        target, near_copy(target, 0.05), make_tokenizer(), Dataset.from_list(samples), 8
    )["acceptance"]
    assert found["samples"] == len(lengths)
    assert found["mean_emitted"] >= 1


def test_a_call_that_fails_leaves_the_drafters_options_as_they_were(monkeypatch):
    """They stayed those of the measurement: chains, and no round without a draft."""
    target = tiny_model()
    drafter = near_copy(target, 0.05)
    options = drafter.speculation_config
    monkeypatch.setattr(target, "generate", lambda *_, **__: 1 / 0)
    samples = Dataset.from_list([{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}])
    with pytest.raises(ZeroDivisionError):
        acceptance(target, drafter, make_tokenizer(), samples, 8)
    assert drafter.speculation_config is options
