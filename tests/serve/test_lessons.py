"""A served drafter learns from what it is asked, and is saved when it has become better."""

from pathlib import Path

import pytest
import torch
from tiny import make_tokenizer, tiny_model

from hf_paradraft import AutoDrafter, Eagle3Drafter, NgramDrafter, set_drafter
from hf_paradraft.serve.lessons import NEW_TEXTS, Lessons


def pair():
    target = tiny_model(num_hidden_layers=8, initializer_range=0.15, dtype=torch.float32)
    torch.manual_seed(0)
    return target, Eagle3Drafter.from_target(target, 3).eval()


def write_texts(target, drafter, count):
    torch.manual_seed(0)
    with set_drafter(target, drafter):
        target.generate(
            torch.randint(1, 31, (count, 3)),
            max_new_tokens=24,
            do_sample=True,
            temperature=0.3,
            pad_token_id=0,
        )


def test_what_was_learned_is_saved_and_used(tmp_path, capsys):
    target, drafter = pair()
    lessons = Lessons(target, drafter, make_tokenizer(), tmp_path / "taught")
    lessons.follow.learning_rate = 5e-3
    write_texts(target, drafter, NEW_TEXTS - 1)
    lessons(lambda: False)
    assert not lessons.follow.lessons  # too few
    write_texts(target, drafter, 1)
    lessons(lambda: False)
    [lesson] = lessons.follow.lessons
    assert lesson.kept
    assert capsys.readouterr().out.endswith(f"saved in {tmp_path / 'taught'}.\n")
    lessons(lambda: False)
    assert len(lessons.follow.lessons) == 1  # nothing is new
    saved = AutoDrafter.from_pretrained(tmp_path / "taught")
    assert all(
        torch.equal(one, other)
        for one, other in zip(saved.parameters(), drafter.parameters(), strict=True)
    )


@pytest.mark.parametrize("patience", [1, pytest.param(20, marks=pytest.mark.nightly), 60])
def test_a_lesson_is_given_up_when_somebody_waits_and_given_later(patience, tmp_path):
    """Before its first step, in it, after it: at most one text is read meanwhile, and the weights
    are as they were.
    """
    target, drafter = pair()
    lessons, asked = Lessons(target, drafter, make_tokenizer(), tmp_path / "taught"), []
    lessons.follow.learning_rate = 5e-3
    write_texts(target, drafter, NEW_TEXTS)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    assert not lessons(lambda: asked.append(True) or len(asked) == patience)
    assert len(asked) == patience
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())
    assert not lessons.follow.lessons
    assert lessons(lambda: False)


def test_a_lesson_that_fails_stops_nothing(tmp_path, monkeypatch, caplog):
    target, drafter = pair()
    lessons = Lessons(target, drafter, make_tokenizer(), tmp_path / "taught")
    before = drafter.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    write_texts(target, drafter, NEW_TEXTS)
    monkeypatch.setattr(type(lessons.follow), "learn", lambda *args, **kwargs: 1 / 0)
    lessons(lambda: False)
    assert not (tmp_path / "taught").exists()
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("drafter", "folder", "message"),
    [
        (None, "new", "nothing drafts"),
        (NgramDrafter(), "new", "NgramDrafter is of no kind that is trained here"),
        (pair()[1], "old", "there already"),
    ],
)
def test_what_cannot_learn_is_refused_first(drafter, folder, message, tmp_path):
    (tmp_path / "old").mkdir()
    Path(tmp_path / "old" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=message):
        Lessons(tiny_model(), drafter, make_tokenizer(), tmp_path / folder)
    assert (tmp_path / "old" / "notes.txt").read_text() == "mine"
