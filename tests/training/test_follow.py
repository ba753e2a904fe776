"""A drafter that follows: it learns what a changed target writes, keeps what is better alone, and
disturbs nothing.
"""

import copy
import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from layouts import LAYOUTS, write
from tiny import tiny_model, with_prompts
from transformers import Trainer, TrainingArguments

import hf_paradraft
from hf_paradraft import FollowTarget, set_drafter
from hf_paradraft.drafters.blocks.dspark import DSparkDrafter
from hf_paradraft.drafters.blocks.model import DFlashDrafter
from hf_paradraft.drafters.pard import PardDrafter

# layers of the target, blocks, and a causal LM; the others at night
ALWAYS = ("mtp", "dspark", "pard")
KINDS = {
    "mtp": lambda target: hf_paradraft.MtpDrafter.from_target(target, True),
    "eagle3": lambda target: hf_paradraft.Eagle3Drafter.from_target(target, 3),
    "dflash": lambda target: DFlashDrafter.from_target(target, 31, 1, 4, 2),
    "dspark": lambda target: DSparkDrafter.from_target(
        target, 31, 1, 4, 2, None, 4, "vanilla", True
    ),
    "parallelspec": lambda target: hf_paradraft.ParallelSpecDrafter.from_target(
        target, "eagle", 2, 1
    ),
    "pard": lambda target: PardDrafter.from_causal_lm(
        tiny_model(num_hidden_layers=2, seed=5, dtype=torch.float32), 31
    ),
}


def pair(kind="mtp"):
    target = tiny_model("llama", num_hidden_layers=8, initializer_range=0.15, dtype=torch.float32)
    torch.manual_seed(0)
    return target, KINDS[kind](target).eval()


def answer(target, seed, count=4):
    torch.manual_seed(seed)
    ids = torch.randint(1, 31, (count, 3))
    options = {"max_new_tokens": 24, "do_sample": True, "pad_token_id": 0, "temperature": 0.3}
    return target.generate(ids, attention_mask=torch.ones_like(ids), **options)


def weights(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in ALWAYS else pytest.mark.nightly) for kind in KINDS],
)
def test_every_kind_learns_what_its_target_writes(kind):
    target, drafter = pair(kind)
    follow, before = FollowTarget(drafter, num_steps=20, learning_rate=5e-3), weights(drafter)
    with set_drafter(target, drafter):
        for seed in range(8):
            answer(target, seed)
        assert len(follow.texts) == 32
        for _ in range(2):
            lesson = follow.learn(target)
    assert lesson.after < lesson.before or not lesson.kept
    assert follow.lessons[0].kept
    assert follow.lessons[0].after < follow.lessons[0].before
    assert not same(weights(drafter), before)


def test_a_lesson_fits_no_shortlist(monkeypatch):
    """Its weights alone are taken over, and whoever waits would wait for it, too."""
    target, _ = pair()
    drafter = hf_paradraft.Eagle3Drafter.from_target(target, 3, vocabulary=torch.arange(24))
    follow = FollowTarget(drafter, num_steps=2)
    with set_drafter(target, drafter):
        for seed in range(8):
            answer(target, seed)
    fitted = []
    monkeypatch.setattr(
        "hf_paradraft.training.unrolled.fit_shortlist", lambda trainer: fitted.append(trainer)
    )
    assert follow.learn(target) is not None
    assert not fitted


def test_what_is_no_better_is_not_kept():
    target, drafter = pair()
    follow, before = FollowTarget(drafter, num_steps=2, learning_rate=50.0), weights(drafter)
    with set_drafter(target, drafter):
        assert follow.learn(target) is None  # there are no texts yet
        for seed in range(4):
            answer(target, seed)
        lesson = follow.learn(target)
    assert not lesson.kept
    assert same(weights(drafter), before)
    assert same(weights(follow.pupil), before)


def test_prompts_are_not_learned_and_the_oldest_texts_go(tmp_path):
    target, drafter = pair()
    follow = FollowTarget(drafter, max_tokens=100)
    with set_drafter(target, drafter):
        for seed in range(4):
            answer(target, seed)
    assert sum(len(text["input_ids"]) for text in follow.texts) == follow.num_tokens <= 100
    assert all(text["labels"][:4].count(-100) == 3 for text in follow.texts)
    learned = [text for text in follow.texts if not text["held"]]
    judged = [text for text in follow.texts if text["held"]] or list(follow.texts)
    trainer = follow._trainer(drafter, target, (learned, judged), str(tmp_path), None, 8)
    rows = list(trainer.train_dataset)
    assert all(
        row["labels"][:3] == [-100] * 3 and row["labels"][3:] == row["input_ids"][3:]
        for row in rows
    )
    assert follow.num_texts == 16


def test_nothing_else_is_disturbed():
    """Random numbers, weights, gradients, modes: as if there had been no lesson. Copies are
    followed by nobody.
    """
    target, drafter = pair()
    target.train()
    target.model.layers[0].eval()
    target.lm_head.weight.requires_grad_(False)
    target.model.norm.weight.grad = torch.ones_like(target.model.norm.weight)
    follow = FollowTarget(drafter, num_steps=2)
    for seed in range(3):
        torch.manual_seed(seed)
        for _ in range(4):
            follow(torch.randint(1, 31, (20,)), 4)
    modes = [part.training for part in target.modules()]
    wanted = [p.requires_grad for p in target.parameters()]
    before = weights(target)
    luck = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    assert follow.learn(target) is not None
    assert same(weights(target), before)
    assert [part.training for part in target.modules()] == modes
    assert [parameter.requires_grad for parameter in target.parameters()] == wanted
    assert [
        name for name, parameter in target.named_parameters() if parameter.grad is not None
    ] == ["model.norm.weight"]
    assert torch.equal(torch.get_rng_state(), luck[0])
    assert random.getstate() == luck[1]
    assert np.array_equal(np.random.get_state()[1], luck[2])
    assert copy.deepcopy(drafter).listener is None


class Rollouts(Trainer):
    """Learns from texts that it lets the target write in every step."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        model.eval()
        with torch.no_grad():
            ids = answer(model, self.state.global_step)
        model.train()
        self.texts.append(ids)
        return model(ids, labels=ids).loss


def rollouts(folder, drafter, target, callbacks):
    arguments = TrainingArguments(
        output_dir=folder, max_steps=6, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, learning_rate=1e-2,
        logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": [[1, 2]] * 32, "labels": [[1, 2]] * 32})
    trainer = Rollouts(target, arguments, train_dataset=rows, callbacks=callbacks)
    trainer.texts = []
    with set_drafter(target, drafter):
        trainer.train()
    return trainer.texts, [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_a_trainer_goes_on_as_if_nothing_had_happened(tmp_path):
    """The same texts and the same losses without a drafter, with a frozen one, and with one that
    follows.
    """
    texts, losses = rollouts(tmp_path, None, pair()[0], [])
    for follows in (False, True):
        target, drafter = pair()
        follow = FollowTarget(drafter, every=2, num_steps=2, learning_rate=3e-3)
        drafter.listener = follow if follows else None
        got, seen = rollouts(tmp_path, drafter, target, [follow])
        assert all(torch.equal(one, other) for one, other in zip(got, texts, strict=True))
        assert seen == losses
        assert [lesson.step for lesson in follow.lessons] == ([2, 4, 6] if follows else [])


def test_who_cannot_learn_is_refused(tmp_path):
    target = tiny_model()
    for name, message in (
        ("speculators P-EAGLE", "guesses in parallel"),
        ("JetSpec", "causal"),
        ("z-lab, sliding", "windows"),
    ):
        drafter = hf_paradraft.AutoDrafter.from_pretrained(write(tmp_path / name, *LAYOUTS[name]()))
        with pytest.raises(ValueError, match=message):
            FollowTarget(drafter)
    with pytest.raises(ValueError, match="NgramDrafter is of no kind that is trained here"):
        FollowTarget(hf_paradraft.NgramDrafter())
    prompts = hf_paradraft.PpdDrafter.from_model(with_prompts(tiny_model()))
    with pytest.raises(ValueError, match="A PPD adapter does not learn from texts"):
        FollowTarget(prompts)
    with pytest.raises(ValueError, match="1 at least"):
        FollowTarget(hf_paradraft.MtpDrafter.from_target(target, True), every=0)


@pytest.mark.parametrize(
    "failure", [OSError("no space left"), RuntimeError("out of memory"), KeyboardInterrupt()]
)
def test_a_lesson_that_fails_leaves_target_and_pupil_as_they_were(failure, monkeypatch):
    target, drafter = pair()
    follow = FollowTarget(drafter, every=2)
    for seed in range(4):
        with set_drafter(target, drafter):
            answer(target, seed)
    assert follow.learn(target) is not None
    before, taught = weights(drafter), weights(follow.pupil)

    def fail(self, args, state, control, **kwargs):
        raise failure

    monkeypatch.setattr("hf_paradraft.training.follow._Interruption.on_step_end", fail)
    with pytest.raises(type(failure)):
        follow.learn(target, interrupted=lambda: False)
    assert same(weights(drafter), before)
    assert same(weights(follow.pupil), taught)


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_a_lesson_that_fails_does_not_end_the_targets_training(tmp_path, monkeypatch, caplog):
    target, drafter = pair()

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(FollowTarget, "_trainer", fail)
    losses = rollouts(tmp_path, drafter, target, [FollowTarget(drafter, every=2)])[1]
    assert len(losses) == 6
    assert "A lesson failed" in caplog.text


def test_ids_beyond_the_vocabulary_are_no_texts_to_learn_from():
    target, drafter = pair()
    follow = FollowTarget(drafter)
    for text in range(16):
        follow(torch.tensor([1, 2, 3, 10_000 if text % 2 else 4]), 1)
    assert follow.learn(target) is not None
