"""A head in two steps: the logits of the tokens that it chooses are the head's own, and it chooses
those that matter.
"""

import pytest
import torch
from lossless import assert_lossless
from safetensors.torch import save_file
from tiny import EOS, tiny_model

import hf_paradraft
from hf_paradraft.decoding import shortlist
from hf_paradraft.decoding.shortlist import FILE, ROWS, Shortlist
from hf_paradraft.decoding.target_head import TargetHead
from hf_paradraft.drafters.eagle3.training import Eagle3Training
from hf_paradraft.integration.export import Engine, export
from hf_paradraft.training import unrolled
from hf_paradraft.training.run import train

HIDDEN, VOCABULARY = 32, torch.tensor([1, 3, 4, 6, 9, 12, 15, 20, 22, 28])


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(shortlist, "RANK", 6)
    monkeypatch.setattr(shortlist, "COUNT", 4)


def states_of(count, seed=0):
    """States that differ in few directions, as a drafter's do; the head's largest directions are
    others.
    """
    torch.manual_seed(seed)
    return torch.randn(count, 5) @ torch.randn(
        5, HIDDEN, generator=torch.Generator().manual_seed(1)
    ) + 0.02 * torch.randn(count, HIDDEN)


def drafter_for(target):
    torch.manual_seed(3)
    drafter = hf_paradraft.Eagle3Drafter.from_target(target, vocabulary=VOCABULARY)
    drafter.shortlist = Shortlist.fit(states_of(400), target.lm_head.weight.detach()[VOCABULARY])
    drafter.attach(target)
    return drafter


def deep(**options):
    return tiny_model("llama", num_hidden_layers=8, **options)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(1, HIDDEN), (2, 2, HIDDEN)])
def test_logits_of_chosen_tokens_are_the_heads_own(shape):
    target = deep(dtype=torch.float32)
    target.config.final_logit_softcapping = None
    states = states_of(4).flatten()[: torch.Size(shape).numel()].view(shape)
    whole = TargetHead(target, VOCABULARY).logits(states, softcap=2.0, scale=3.0)
    fitted = Shortlist.fit(states_of(400), target.lm_head.weight.detach()[VOCABULARY])
    logits = TargetHead(target, VOCABULARY, fitted).logits(states, softcap=2.0, scale=3.0)
    there = logits.isfinite()
    assert (there.sum(-1) == 4).all()
    torch.testing.assert_close(logits[there], whole[there])
    assert torch.equal(logits.argmax(-1), whole.argmax(-1))
    many = states_of(ROWS + 1)
    torch.testing.assert_close(
        TargetHead(target, VOCABULARY, fitted).logits(many),
        TargetHead(target, VOCABULARY).logits(many),
    )


def test_the_fit_is_to_states_and_not_to_the_head_alone():
    """The head's main axes alone find fewer of the most probable tokens."""
    torch.manual_seed(0)
    rows, states = torch.randn(200, HIDDEN) * torch.linspace(3, 0.1, HIDDEN), states_of(500, 5)
    best = (states @ rows.T).argmax(-1)

    def found(down, up):
        near = states @ down.T @ (rows @ up).T
        return (near.topk(4).indices == best[:, None]).any(-1).float().mean()

    fitted, axes = Shortlist.fit(states_of(500), rows), torch.linalg.svd(rows).Vh[:6]
    assert found(fitted.down, fitted.up) > 0.99
    assert found(axes, axes.T) < 0.9


@torch.no_grad()
def test_it_follows_a_target_that_is_trained():
    target = deep(dtype=torch.float32)
    head = TargetHead(
        target,
        VOCABULARY,
        Shortlist.fit(states_of(400), target.lm_head.weight.detach()[VOCABULARY]),
    )
    states = states_of(1)
    before = head.logits(states)
    target.lm_head.weight.mul_(-1.5)
    after, whole = head.logits(states), TargetHead(target, VOCABULARY).logits(states)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after[after.isfinite()], whole[after.isfinite()])
    assert after.argmax() == whole.argmax()


@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"do_sample": True, "temperature": 1.3, "seed": 5}]
)
@pytest.mark.parametrize("tree_size", [None, 6, "auto"])
def test_texts_are_the_targets_own(options, tree_size):
    target = deep()
    drafter = drafter_for(target).double()
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, tree_size, never_slower=False)
    assert_lossless(
        target, drafter, torch.tensor([[1, 2, 3]]), max_new_tokens=30, eos_token_id=EOS, **options
    )
    assert drafter.last_stats.num_drafted > 0


def test_it_is_saved_beside_the_weights_and_not_exported(tmp_path):
    target = deep(dtype=torch.float32)
    drafter = drafter_for(target)
    drafter.save_pretrained(tmp_path / "drafter")
    again = hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "drafter", dtype=torch.bfloat16)
    assert torch.equal(again.shortlist.down, drafter.shortlist.down)
    assert torch.equal(again.shortlist.up, drafter.shortlist.up)
    target.save_pretrained(tmp_path / "target")
    export(tmp_path / "drafter", tmp_path / "for-vllm", Engine.vllm, str(tmp_path / "target"))
    assert not (tmp_path / "for-vllm" / FILE).exists()
    for down in (torch.zeros(6, HIDDEN - 1), torch.full((6, HIDDEN), torch.nan)):
        save_file({"down": down, "up": down.T.contiguous()}, tmp_path / "drafter" / FILE)
        with pytest.raises(ValueError, match="states of 32 finite numbers"):
            hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "drafter")


def test_training_leaves_one(tmp_path, monkeypatch):
    from test_target_training import OPTIONS, make_tokenizer

    monkeypatch.setattr(unrolled, "LEAST", 8)
    monkeypatch.setattr(unrolled, "RANK", 6)
    deep(dtype=torch.float32).save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "rows.jsonl").write_text('{"text": "a b c d e f g h"}\n' * 16)
    options = {**OPTIONS, "num_draft_tokens": 2, "vocab": 20, "max_steps": 2}
    files = {
        "target": str(tmp_path / "target"),
        "train_file": tmp_path / "rows.jsonl",
        "output_dir": tmp_path / "out",
    }
    drafter = train(Eagle3Training, **files, **options)
    assert drafter.shortlist.down.shape == (6, HIDDEN)
    assert (tmp_path / "out" / FILE).exists()
