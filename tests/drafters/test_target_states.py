"""What a target says of texts, computed or read from disk: the same, and nothing else than what is
wanted.
"""

import pytest
import torch
from tiny import tiny_model
from trained import train_dspark, train_parallelspec

from hf_paradraft.training.target_states import TargetStates

OPTIONS = {
    "per_device_train_batch_size": 4,
    "learning_rate": 3e-3,
    "use_cpu": True,
    "max_length": 64,
}


@torch.no_grad()
@pytest.mark.parametrize("vocabulary", [None, torch.tensor([1, 4, 30])])
def test_states_on_disk_are_those_of_the_target(vocabulary, tmp_path, monkeypatch):
    """Texts alone and in batches, computed and read again, and when the folder is full."""
    target = tiny_model("llama", dtype=torch.float64)
    ids, lengths = torch.randint(0, 32, (3, 9)), torch.tensor([9, 4, 7])
    rows, places = torch.tensor([0, 0, 1, 2]), torch.tensor([8, 2, 3, 0])
    logits = target(ids).logits.softmax(-1)[rows, places]
    wanted = (logits if vocabulary is None else logits[:, vocabulary]).float()
    fresh = TargetStates(target, (0, 1), vocabulary)
    expected = fresh(ids, lengths)
    torch.testing.assert_close(fresh.probabilities(expected, rows, places), wanted)

    def same(given, states):
        for key in (0, 1, "normed"):
            for row, length in enumerate(lengths):
                torch.testing.assert_close(given[key][row, :length], expected[key][row, :length])
        torch.testing.assert_close(states.probabilities(given, rows, places), wanted)

    monkeypatch.setattr("hf_paradraft.training.target_states.ROWS", 3)  # logits in pieces
    cached = TargetStates(target, (0, 1), vocabulary, tmp_path / "cache", 1e9)
    same(cached(ids, lengths), cached)
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 3
    again = TargetStates(target, (0, 1), vocabulary, tmp_path / "cache", 1e9)
    assert again.room == pytest.approx(cached.room, abs=1000)  # with the files' headers
    full = TargetStates(target, (0, 1), vocabulary, tmp_path / "full", (1e9 - cached.room) * 0.5)
    same(full(ids, lengths), full)
    assert 1 <= len(list((tmp_path / "full").glob("*.safetensors"))) < 3
    same(full(ids, lengths), full)
    # nothing is run again
    monkeypatch.setattr("hf_paradraft.training.target_states.states_of", None)
    same(again(ids, lengths), again)
    with pytest.raises(ValueError, match="other layers, not of -1"):
        TargetStates(target, (-1,), vocabulary, tmp_path / "cache", 1e9)
    # a drafter that reads less
    fewer = TargetStates(target, (1,), vocabulary, tmp_path / "cache", 1e9)
    given = fewer(ids, lengths)
    assert given.keys() == {1, "normed", "normaliser"}
    torch.testing.assert_close(given[1][0], expected[1][0])
    torch.testing.assert_close(fewer.probabilities(given, rows, places), wanted)
    target.config.rms_norm_eps = 0.1
    with pytest.raises(ValueError, match="another target"):
        TargetStates(target, (0, 1), vocabulary, tmp_path / "cache", 1e9)
    with pytest.raises(ValueError, match="another target"):
        TargetStates(
            tiny_model("llama", seed=5, dtype=torch.float64),
            (0, 1),
            vocabulary,
            tmp_path / "cache",
            1e9,
        )


@pytest.mark.slow
@pytest.mark.parametrize("train", [train_dspark, train_parallelspec])
def test_a_cache_changes_nothing(train, folder, tmp_path):
    """The same drafter comes of it, two epochs of texts that lie on disk after the first."""
    options = (
        {"block_size": 3}
        if train is train_dspark
        else {"style": "eagle", "loss": "tv", "num_masks": 2}
    )
    options = {**OPTIONS, **options, "vocab": 24, "num_train_epochs": 2.0, "max_steps": 8}
    plain = train(folder / "target", folder / "some.jsonl", tmp_path / "plain", **options)
    cached = train(
        folder / "target",
        folder / "some.jsonl",
        tmp_path / "cached",
        cache_dir=tmp_path / "states",
        **options,
    )
    assert list((tmp_path / "states").glob("*.safetensors"))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(cached.state_dict()[name], value, rtol=1e-3, atol=1e-4)
