"""The budget within calls: copies alone where drafts are dear, automatic trees, and as many tokens
as a call wants.
"""

import pytest
import torch
from lossless import assert_lossless
from test_budget import one_round, table
from tiny import EOS, MASK, near_copy, tiny_model

import hf_paradraft
from hf_paradraft.copies.lookup import PromptLookup
from hf_paradraft.decoding.accept import Greedy
from hf_paradraft.decoding.budget import Budget
from hf_paradraft.decoding.drafts import DraftBuilder
from hf_paradraft.protocol import Draft, Prefix


class Scripted(hf_paradraft.Drafting):
    """Guesses what it is told to."""

    def __init__(self, guess):
        self.guess, self.asked = guess, 0

    def propose(self, prefixes):
        self.asked += 1
        return [self.guess] * len(prefixes)


REPEATS = [5, 6, 7] * 9


@pytest.mark.parametrize(
    ("draft_seconds", "text", "asked"),
    [(4.0, REPEATS, False), (0.01, REPEATS, True), (4.0, [5], True)],
)
def test_copies_alone_where_a_draft_costs_more_than_it_brings(draft_seconds, text, asked):
    """A sure copy spares a dear drafter its forward; without one it is asked, whatever it takes."""
    budget = Budget(table(0.02), 12)
    for turn in range(40):  # a guess is right in three of ten rounds
        budget.observe(
            one_round(
                Draft.chain(torch.arange(4), None, [0.3] * 4),
                [0] if turn % 3 == 0 else [],
                draft_seconds,
                1.1,
            )
        )
    builder = DraftBuilder(hf_paradraft.SpeculationConfig(4, "auto"), Greedy(), budget, 32)
    lookups = [PromptLookup()]
    drafting = Scripted(hf_paradraft.GuessedLogits(torch.zeros(4, 32)))
    for length in range(max(1, len(text) - 8), len(text) + 1):  # copies earn their credit
        ids = torch.tensor([text[:length]])
        builder(drafting, [Prefix(ids, 4, 0)], [[]], True, [20], lookups)
    before = drafting.asked
    builder(drafting, [Prefix(torch.tensor([text]), 4, 0)], [[]], True, [20], lookups)
    assert (drafting.asked > before) == asked


def test_a_drafter_answers_for_its_own_drafts_alone():
    """Else copies that fail would make it seem useless, and it would not be asked any more."""
    budget = Budget(table(0.02), 4)
    for _ in range(40):
        budget.observe(
            one_round(Draft.chain(torch.arange(4), None, [0.9] * 4), [0, 1, 2, 3], 0.5, 1.1)
        )
    acceptance, calibration = budget.acceptance, budget.calibration
    for _ in range(40):
        budget.observe(
            one_round(Draft.chain(torch.arange(4), None, [0.9] * 4), [], 0.0, 1.1, asked=False)
        )
    assert (budget.acceptance == acceptance).all()
    assert (budget.calibration == calibration).all()


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3])
def test_automatic_trees_are_lossless(tmp_path, monkeypatch, batch_size):
    monkeypatch.setattr("hf_paradraft.decoding.latency.FOLDER", tmp_path)
    target = tiny_model()
    drafter = near_copy(target, 0.05)
    drafter.speculation_config.tree_size = "auto"
    for seed in range(6):
        ids = torch.randint(1, EOS, (batch_size, 7), generator=torch.Generator().manual_seed(seed))
        assert_lossless(target, drafter, ids, attention_mask=torch.ones_like(ids), pad_token_id=0)


def test_a_worse_than_useless_drafter_is_rarely_asked(prompt):
    target = tiny_model()
    drafter = hf_paradraft.PardDrafter.from_causal_lm(
        tiny_model(seed=5, num_hidden_layers=8), mask_token_id=MASK
    )
    drafter.speculation_config = hf_paradraft.SpeculationConfig(tree_size=None)
    assert_lossless(target, drafter, prompt, max_new_tokens=200, eos_token_id=None)
    assert drafter.last_stats.num_drafted < 40 * drafter.speculation_config.num_draft_tokens
    assert drafter.last_stats.num_rounds > 150


@pytest.mark.parametrize("tree_size", [None, 6, "auto"])
def test_no_draft_tokens_means_plain_output(tree_size, prompt):
    target = tiny_model()
    drafter = near_copy(target, 0.0)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(0, tree_size)
    assert_lossless(target, drafter, prompt, max_new_tokens=12, eos_token_id=None)
    assert drafter.last_stats.num_drafted == 0


def test_a_call_says_itself_how_many_tokens_it_wants(prompt):
    target = tiny_model()
    drafter = near_copy(target, 0.0)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        4, None, never_slower=False, trace=True
    )
    for asked, drafted in ((2, 2), (7, 7), (20, 20), (None, 4)):
        more = {} if asked is None else {"num_assistant_tokens": asked}
        assert_lossless(target, drafter, prompt, max_new_tokens=60, eos_token_id=None, **more)
        assert len(drafter.last_stats.trace[1].drafted) == drafted
    assert drafter.speculation_config.num_draft_tokens == 4
    with pytest.raises(ValueError, match="num_draft_tokens"):
        target.generate(prompt, max_new_tokens=4, assistant_model=drafter, num_assistant_tokens=-1)


@pytest.mark.parametrize("rows", [1, 2])
def test_chains_in_the_place_of_trees_have_all_their_tokens(rows):
    """Rejection drafts chains where a tree would choose its size; a batch had five tokens of 12."""
    target = tiny_model()
    drafter = near_copy(target, 0.0)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        12, "auto", "rejection", never_slower=False, trace=True
    )
    ids = torch.arange(1, 5).expand(rows, -1)
    options = {"do_sample": True, "max_new_tokens": 40, "eos_token_id": None}
    target.generate(ids, assistant_model=drafter, **options)
    assert max(len(one.drafted) for one in drafter.last_stats.trace) == 12
