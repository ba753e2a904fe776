"""The prediction: its arithmetic, and that it tells a good drafter from a bad one."""

import pytest
import torch
from tiny import MASK, near_copy, tiny_model, with_prompts
from typer.testing import CliRunner

import hf_paradraft
from hf_paradraft.bench import Prompt
from hf_paradraft.bench.plan import expected_tau, measured, plan
from hf_paradraft.cli import app
from hf_paradraft.demo import FAMILY

PROMPTS = [Prompt("a", torch.tensor([[1, 2, 3]])), Prompt("a", torch.tensor([[4, 5, 6]]))]


def test_expected_tau():
    assert expected_tau([], 4) == 1.0
    assert expected_tau([0.5], 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert expected_tau([0.9, 0.5, 0.1], 2) == pytest.approx(1 + 0.9 + 0.45)


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
def test_overlapped_chains_are_planned_and_measured():
    target = tiny_model(num_hidden_layers=8)
    copy, threads = hf_paradraft.AutoregressiveDrafter(near_copy(target, 0.0)), torch.get_num_threads()
    plans = plan(target, copy, PROMPTS, (2, 4), 24, overlap=True)
    names = ["autoregressive-chain-k2", "autoregressive-chain-k4"]
    assert [entry.way.name for entry in plans] == [*names, *(f"pearl-{name}" for name in names)]
    assert [entry.tau for entry in plans] == pytest.approx([3, 5, 2, 4])  # windows that always pass whole
    assert all(entry.speedup > 0 and entry.round_cost > 0.5 for entry in plans)
    assert len(measured(target, PROMPTS, plans, 16)) == 4
    assert torch.get_num_threads() == threads
    reader = hf_paradraft.ParallelSpecDrafter.from_target(target, "eagle", 2)
    with pytest.raises(ValueError, match="set overlap=False"):
        plan(target, reader, PROMPTS, (2,), 24, overlap=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ngram", "ppd"])
def test_copies_and_prompt_tokens_are_planned(kind):
    target = tiny_model(num_hidden_layers=8)
    drafter = (
        hf_paradraft.NgramDrafter()
        if kind == "ngram"
        else hf_paradraft.PpdDrafter.from_model(with_prompts(target, 2, calibrated=True))
    )
    config = drafter.speculation_config
    plans = plan(target, drafter, PROMPTS, (4, 10), 40)
    assert [entry.way.name for entry in plans] == (["ngram-chain-k4", "ngram-chain-k10"] if kind == "ngram" else ["ppd-auto"])
    for entry in plans:
        assert entry.tau >= 1
        assert entry.round_cost > 0.5
        assert entry.speedup > 0
    assert drafter.speculation_config is config
    with pytest.raises(ValueError, match="not for trees, prompt tokens or copied drafts"):
        plan(target, drafter, PROMPTS, (4,), 24, acceptance=0.5)


@pytest.mark.slow
def test_trees_and_copies_are_decoded_as_they_will_be():
    target = tiny_model(num_hidden_layers=8)
    drafter = near_copy(target, 0.0)
    plans = plan(target, drafter, PROMPTS, (1, 3), 24, tree_sizes=(4, "auto"), prompt_lookup=True)
    names = [
        "pard-chain-k1",
        "pard-chain-k3",
        "pard-tree-k3-n4",
        "pard-tree-k3-auto",
        "pard-tree-k3-n4-lookup",
        "pard-tree-k3-auto-lookup",
    ]
    assert [entry.way.name for entry in plans] == names
    assert [entry.way.config.prompt_lookup for entry in plans] == [False] * 4 + [True] * 2
    assert plans[0].tau == pytest.approx(2.0)  # what trees brought is no part of what chains will
    assert all(1 <= entry.tau <= 11 and entry.speedup > 0 for entry in plans[2:])
    never = [entry for entry in plan(target, drafter, PROMPTS, (3,), 24, tree_sizes=(4,)) if entry.way.config.tree_size]
    assert len(measured(target, PROMPTS, never, 16)) == 1
    with pytest.raises(ValueError, match="not for trees"):
        plan(target, drafter, PROMPTS, (3,), 24, acceptance=0.5, tree_sizes=(4,))


@pytest.mark.slow
def test_drafters_that_draft_less_than_asked_are_planned():
    short = hf_paradraft.PardDrafter.from_causal_lm(tiny_model("gpt2", max_position_embeddings=24), mask_token_id=MASK)
    ahead = hf_paradraft.PromptedDrafter(with_prompts(tiny_model(), 3))
    for drafter in (short, ahead):
        assert all(entry.round_cost > 0 for entry in plan(tiny_model(), drafter, PROMPTS, (16,), 24))
    with pytest.raises(ValueError, match="before anything could be drafted"):
        plan(tiny_model(), hf_paradraft.NgramDrafter(), PROMPTS, (4,), 1)


@pytest.mark.slow
def test_a_drafter_of_blocks_goes_as_far_as_it_can():
    target = tiny_model(num_hidden_layers=8)
    drafter = hf_paradraft.DSparkDrafter.from_target(target, MASK, block_size=3, num_features=2, markov_rank=4)
    plans = plan(target, drafter, PROMPTS, (2, 8), 12)
    assert [entry.way.config.num_draft_tokens for entry in plans] == [2, 3]


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


@pytest.mark.slow
def test_the_check_measures_other_prompts(tmp_path):
    command = ["plan", "--prompts", "1", "-k", "2", "-k", "4", "--check", "2", "--max-new-tokens", "16", "--dtype", "float32"]
    result = CliRunner().invoke(app, [*command, "--plot", str(tmp_path / "plan.png")])
    assert result.exit_code == 0, result.output
    assert "off by" in result.output
    assert (tmp_path / "plan.png").stat().st_size > 1000
    result = CliRunner().invoke(app, ["plan", "--plot", str(tmp_path / "plan.png")])
    assert result.exit_code == 2
    assert "needs --check" in result.output
