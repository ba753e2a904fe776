"""The prediction: its arithmetic, and that it tells a good drafter from a bad one."""

import pytest
import torch
from tiny import MASK, near_copy, tiny_model
from typer.testing import CliRunner

import hf_paradraft
from hf_paradraft.bench import Prompt
from hf_paradraft.bench.plan import expected_tau, plan
from hf_paradraft.cli import app
from hf_paradraft.demo import FAMILY

PROMPTS = [Prompt("a", torch.tensor([[1, 2, 3]])), Prompt("a", torch.tensor([[4, 5, 6]]))]


def test_expected_tau():
    assert expected_tau([], 4) == 1.0
    assert expected_tau([0.5], 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert expected_tau([0.9, 0.5, 0.1], 2) == pytest.approx(1 + 0.9 + 0.45)


def test_a_plan_needs_something_that_was_drafted():
    """Answers of one token made it say that drafting does not pay."""
    target = tiny_model()
    with pytest.raises(ValueError, match="ended before anything could be drafted"):
        plan(target, near_copy(target), PROMPTS, (2,), max_new_tokens=1)


@pytest.mark.slow
def test_a_good_drafter_is_told_from_a_bad_one():
    target = tiny_model(num_hidden_layers=8)
    good = near_copy(target, 0.0)
    bad = hf_paradraft.PardDrafter.from_causal_lm(tiny_model(seed=9), mask_token_id=MASK)
    config = good.speculation_config
    taus = {
        name: [entry.tau for entry in plan(target, drafter, PROMPTS, (1, 3), 24)]
        for name, drafter in (("good", good), ("bad", bad))
    }
    assert taus["good"][0] == pytest.approx(2.0)  # a copy is always right about the next token
    assert taus["good"][1] > taus["bad"][1]
    assert good.speculation_config is config
    assumed = plan(target, bad, PROMPTS, (1, 3), 24, acceptance=1.0)
    assert [entry.tau for entry in assumed] == [2.0, 4.0]
    assert all(entry.round_cost > 0.5 and entry.speedup > 0 for entry in assumed)


@pytest.mark.slow
def test_a_drafter_of_blocks_goes_as_far_as_it_can():
    target = tiny_model(num_hidden_layers=8)
    drafter = hf_paradraft.DSparkDrafter.from_target(target, MASK, block_size=3, num_features=2, markov_rank=4)
    assert [entry.num_draft_tokens for entry in plan(target, drafter, PROMPTS, (2, 8), 12)] == [2, 3]


@pytest.mark.slow
def test_the_plan_command_says_that_drafting_does_not_pay():
    result = CliRunner().invoke(app, ["plan", "--prompts", "1", "-k", "16", "--acceptance", "0", "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    assert "does not pay" in result.output


@pytest.mark.slow
def test_an_acceptance_is_assumed_for_a_small_model():
    command = ["plan", "--prompts", "1", "-k", "4", "--acceptance", "0.9", "--dtype", "float32"]
    folders = ["--target", str(FAMILY / "target"), "--drafter", str(FAMILY / "draft")]
    result = CliRunner().invoke(app, [*command, *folders])
    assert result.exit_code == 0, result.output
    assert "4.10" in result.output  # 1 + 0.9 + 0.81 + 0.729 + 0.6561
