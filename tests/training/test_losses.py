"""Losses by name, against their formulas on a few rows; and that a run's `--loss` is the one that
its trainer learns by.
"""

import torch
from tiny import tiny_model
from transformers import TrainingArguments

from hf_paradraft import Eagle3Drafter
from hf_paradraft.drafters.eagle3.training import Eagle3Training
from hf_paradraft.training.losses import cross_entropy, divergence, mixed, rejection
from hf_paradraft.training.run import RunInputs

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]])
# of the second row 0.2 are tokens that are not drafted
P = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.1, 0.6]])
LABELS = torch.tensor([1, 2])


def test_losses_are_their_formulas():
    q = LOGITS.softmax(-1)
    wrong = -q[[0, 1], LABELS].log()
    rejected = 1 - torch.minimum(P, q).sum(-1)
    torch.testing.assert_close(cross_entropy(LOGITS, LABELS), wrong)
    assert cross_entropy(LOGITS, torch.tensor([1, -100])).tolist() == [wrong[0].item(), 0.0]
    torch.testing.assert_close(rejection(LOGITS, P), rejected)
    torch.testing.assert_close(mixed("ce", wrong, rejected), wrong)
    torch.testing.assert_close(mixed("tv", wrong, rejected), 0.1 * wrong + 0.9 * rejected)
    teachers = P[:1].log()
    torch.testing.assert_close(
        divergence(LOGITS[:1], teachers), (P[:1] * (teachers - q[:1].log())).sum(-1)
    )


def test_a_trainer_learns_by_the_loss_that_was_asked_for(tmp_path):
    target = tiny_model("llama", num_hidden_layers=8, dtype=torch.float32)
    for loss in ("ce", "tv"):
        run = Eagle3Training(target="x", train_file="y", output_dir=tmp_path, loss=loss)
        inputs = RunInputs(
            target,
            None,
            TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none"),
            [],
            None,
        )
        assert (
            run.trainer(Eagle3Drafter.from_target(target, 3), inputs).loss
            == run.record()["loss"]
            == loss
        )
