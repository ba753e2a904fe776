"""Drafting stops where it does not pay, comes back where it does, and chooses its size by what sizes cost."""

import numpy
import pytest
import torch
from tiny import EOS, MASK, near_copy, tiny_model
from transformers import LogitsProcessorList

import hf_paradraft as pd
from hf_paradraft.decoding.cost import RoundCost, round_cost
from hf_paradraft.decoding.grow import Growing
from hf_paradraft.decoding.latency import RowLatency
from hf_paradraft.decoding.pace import Pace
from hf_paradraft.decoding.shape import best_first_tree
from hf_paradraft.decoding.steps import Steps
from hf_paradraft.protocol import Draft, Prefix
from hf_paradraft.trees.growing import ROOT

K = 8


def play(pace, tokens, accepted, draft=0.4, row=0.02):
    """Decode with made-up costs (a plain forward is 1 second): seconds, and the depths that were chosen."""
    done = seconds = 0
    depths = []
    while done < tokens:
        depth = pace.depth()
        depths.append(depth)
        path = list(range(min(depth, accepted(done))))
        costs = (draft if depth else 0.0, 1 + row * depth)
        whole = sum(costs) + 0.02
        pace.observe([Draft.chain(torch.arange(depth))], [path], *costs, whole)
        seconds += whole
        done += 1 + len(path)
    return seconds, depths


def test_a_hopeless_drafter_costs_little():
    seconds, depths = play(Pace(K, chain=True), 256, lambda done: 0)
    assert seconds < 1.018 * 256 * 1.02
    assert depths[-20:].count(0) > 15
    assert any(depths[20:])  # it still looks again


def test_a_good_drafter_is_never_interrupted():
    seconds, depths = play(Pace(K, chain=True), 400, lambda done: 4)
    assert set(depths) == {K}
    assert seconds < 400 / 3


def test_drafting_comes_back():
    _, depths = play(Pace(K, chain=True), 2000, lambda done: 0 if done < 300 else 5)
    assert depths.count(0) > 150
    assert depths[-50:].count(K) > 45


def test_a_chain_is_shortened_where_rows_are_dear():
    _, depths = play(Pace(K, chain=True), 400, lambda done: 2, draft=0.1, row=0.15)
    assert depths[-1] in (2, 3)


def test_trees_are_drafted_whole_or_not_at_all():
    _, depths = play(Pace(K, chain=False), 400, lambda done: 0)
    assert set(depths) == {0, K}


def test_without_adaption_nothing_changes():
    _, depths = play(Pace(K, chain=True, adaptive=False), 60, lambda done: 0)
    assert set(depths) == {K}


def tree_of(size=64):
    logits = torch.randn(K, 100, generator=torch.Generator().manual_seed(0)) * 2
    return best_first_tree(logits, size)


def size_of(pace):
    return len(pace.cut([tree_of()])[0])


def test_a_batch_has_one_size():
    """What a sure row wants, an unsure one pays for; rows that have ended want nothing."""
    sure = Draft(torch.arange(20), list(range(-1, 19)), beliefs=[0.99] * 20)
    unsure = Draft(torch.arange(20), list(range(-1, 19)), beliefs=[0.1] * 20)
    none = Draft.chain(torch.arange(0))
    pace = Pace(20, chain=False, cost=RoundCost(RowLatency([1, 64], [1.0, 7.3]), 3))
    sizes = {
        name: [len(tree) for tree in pace.cut(trees)] for name, trees in (("one", [sure]), ("many", [sure, unsure, unsure, none]))
    }
    assert sizes["many"][0] == sizes["many"][1] == sizes["many"][2] < sizes["one"][0]
    assert sizes["many"][3] == 0
    assert [len(tree) for tree in pace.cut([none, none])] == [0, 0]


@pytest.mark.parametrize(("slope", "expected"), [(0.0, range(40, 65)), (1.0, range(1, 3)), (0.02, range(3, 64))])
def test_a_trees_size_follows_the_latency(slope, expected):
    latency = RowLatency([1, 64], [1.0, 1.0 + 63 * slope])
    assert size_of(Pace(K, chain=False, cost=RoundCost(latency))) in expected


def test_the_first_nodes_of_a_best_first_tree_are_the_smaller_tree():
    big, small = tree_of(64).first(20), tree_of(20)
    assert big.token_ids == small.token_ids
    assert big.parents == small.parents


def test_promises_that_do_not_come_true_are_corrected():
    pace = Pace(2, chain=False, cost=RoundCost(RowLatency([1, 64], [1.0, 1.0])))
    for turn in range(400):
        tree = Draft(torch.tensor([1, 2]), [-1, -1], beliefs=[0.6 * pace.factors[1], 0.3 * pace.factors[1]])
        pace.observe([tree], [[0] if turn % 3 == 0 else []], 0.1, 1.0, 1.2)
    assert pace.factors[1] == pytest.approx((1 / 3) / 0.9, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3])
def test_auto_is_lossless(tmp_path, monkeypatch, batch_size):
    monkeypatch.setattr("hf_paradraft.decoding.latency.FOLDER", tmp_path)
    target = tiny_model()
    drafter = near_copy(target, 0.05)
    drafter.speculation_config.tree_size = "auto"
    for seed in range(6):
        ids = torch.randint(1, EOS, (batch_size, 7), generator=torch.Generator().manual_seed(seed))
        options = {"do_sample": False, "max_new_tokens": 30, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
        assert torch.equal(target.generate(ids, **options), target.generate(ids, assistant_model=drafter, **options))


def test_a_worse_than_useless_drafter_is_rarely_asked(prompt):
    target = tiny_model()
    drafter = pd.PardDrafter.from_causal_lm(tiny_model(seed=5, num_hidden_layers=8), mask_token_id=MASK)
    drafter.speculation_config = pd.SpeculationConfig(tree_size=None)
    plain = target.generate(prompt, do_sample=False, max_new_tokens=200, eos_token_id=None)
    assert torch.equal(
        plain, target.generate(prompt, do_sample=False, max_new_tokens=200, eos_token_id=None, assistant_model=drafter)
    )
    assert drafter.last_stats.num_drafted < 40 * drafter.speculation_config.num_draft_tokens
    assert drafter.last_stats.num_rounds > 150


def test_what_rows_cost_beyond_the_table_is_learnt():
    """The table says that rows are free; masks and acceptance, and a slower machine, say otherwise."""
    pace = Pace(K, chain=False, cost=RoundCost(RowLatency([1, 64], [1.0, 1.0])))
    free = size_of(pace)
    for turn in range(40):
        size = (6, 24, 48)[turn % 3]
        pace.observe([tree_of(size)], [[]], 0.1, 1.0 + 0.03 * size, 1.2 + 0.05 * size)
    assert size_of(pace) < 0.7 * free
    rows = numpy.array([2, 25, 49])
    assert pace.cost(rows) == pytest.approx(1.1 + 0.05 * (rows - 1), rel=0.1)


def test_calls_of_one_target_share_what_rounds_cost(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_paradraft.decoding.latency.FOLDER", tmp_path)
    target, other = tiny_model(), tiny_model()
    assert round_cost(target, 1) is round_cost(target, 1)
    assert round_cost(target, 1) is not round_cost(target, 2)
    assert round_cost(target, 1) is not round_cost(other, 1)
    cost = round_cost(target, 1)
    before = cost(numpy.array([8]))
    for _ in range(20):
        cost.observe(8, 3 * float(cost.latency(8)))
    assert round_cost(target, 1)(numpy.array([8])) == pytest.approx(3 * before, rel=0.05)
    for _ in range(20):
        cost.observe(8, 1e6)  # the machine slept
    assert cost(numpy.array([8])) <= 5 * before + 1e-9


def test_no_larger_tree_is_built_than_may_be_worth_it():
    dear, cheap = ([1, 64], [1.0, 64.0]), ([1, 64], [1.0, 1.0])
    for table, few in ((dear, True), (cheap, False)):
        pace = Pace(K, chain=False, cost=RoundCost(RowLatency(*table)))
        assert pace.most_nodes > 32
        for _ in range(8):
            pace.cut([tree_of(pace.most_nodes)])
        assert (pace.most_nodes < 8) == few


def test_paths_that_cannot_pay_are_not_followed():
    for slope in (0.0, 0.02):
        pace = Pace(K, chain=False, cost=RoundCost(RowLatency([1, 64], [1.0, 1.0 + 63 * slope])))
        assert pace.least == 0
        (kept,) = pace.cut([tree_of()])
        assert (0 < pace.least < min(kept.reach())) if slope else pace.least == 0


def test_trees_have_few_sizes():
    """Each number of rows may be compiled once."""
    found = set()
    for rows in numpy.linspace(1.1, 8.0, 40):
        pace = Pace(K, chain=False, cost=RoundCost(RowLatency([1, 64], [1.0, float(rows)])))
        found.add(len(pace.cut([Draft(torch.arange(32), list(range(-1, 31)), None, [0.9] * 32)])[0]))
    assert len(found) > 3
    assert all(size < 4 or size % 4 == 3 for size in found)


def test_a_bad_drafter_has_no_large_trees():
    """What its rounds bring in the long run is little; what plain rounds bring is not."""
    pace = Pace(K, chain=False, cost=RoundCost(RowLatency([1, 64], [1.0, 2.0])))
    pace.habit.observe(pace.habit.tried, pace.habit.held, None, tokens=10.0, seconds=100.0)
    guesses = [Draft(torch.arange(32), [-1] * 32, None, [0.3 * 0.9**rank for rank in range(32)])]
    slow = len(pace.cut(guesses, 9.0)[0])
    pace.plain.append(1.0)
    assert len(pace.cut(guesses, 9.0)[0]) < 0.8 * slow


def growing(chances, size, least=0.0):
    """A tree behind a head that changes nothing."""
    guess = pd.GuessedLogits(
        torch.tensor(chances).log(), bias=lambda depths, tokens, states: (torch.zeros(len(tokens), 3), states)
    )
    prefix = Prefix(torch.tensor([[1, 2]]), len(chances), 0)
    return Growing(guess, prefix, LogitsProcessorList(), size, 3, False, None, least)


def test_a_tree_follows_what_is_worth_it():
    own = growing([[0.6, 0.25, 0.15]] * 3, 8, least=0.2)
    own.look([ROOT])
    assert [own.tree.tokens[node] for node in own.wanted()] == [0, 1]
    own.look(own.wanted())
    assert [own.tree.path(node) for node in own.wanted()] == [[0, 0]]


def test_a_tree_that_was_flat_may_go_deeper_later():
    """Levels brought nothing so far, for siblings had filled the tree; that is no reason never to look again."""
    pace = Pace(K, chain=False)
    pace.goes_on = lambda gain, *times: gain > 0
    steps, own = Steps(pace), growing([[0.98, 0.01, 0.01]] * 3, 3)
    steps.seconds.append(0.01)
    steps.gains += [0.0] * 32
    steps.grow({0: own}, 1, 0.0)
    assert own.draft().parents == [-1, 0, 1]


def test_a_first_step_that_was_compiled_stops_nothing(monkeypatch):
    pace, times = Pace(K, chain=False), iter([0.0, 60.0, *[60.0] * 99])
    pace.goes_on = lambda gain, cost, *rest: cost < 1
    monkeypatch.setattr("hf_paradraft.decoding.steps.perf_counter", lambda: next(times))
    steps = Steps(pace)
    for _ in range(2):
        own = growing([[0.98, 0.01, 0.01]] * 3, 3)
        steps.grow({0: own}, 1, 0.0)
        assert own.draft().parents == [-1, 0, 1]


def riders(count):
    """A draft of prompt tokens alone."""
    return Draft(
        torch.arange(0), [], rider_nodes=[-1] * count, rider_parents=[-1] * count, rider_embeddings=torch.zeros(count, 4)
    )


def test_prompt_tokens_come_back_from_a_pause():
    """After a plain round they know nothing: the first drafted round only asks, and is not held against them."""
    pace, drafted, known = Pace(3, chain=False), [], False
    for turn in range(400):
        good = turn > 60
        depth = pace.depth()
        draft = Draft.chain(torch.arange(0)) if depth == 0 else Draft.chain(torch.arange(3)) if known else riders(3)
        path = [0, 1, 2] if good and known and depth else []
        verify = 1.0 if depth == 0 else 1.2
        pace.observe([draft], [path], 0.0, verify, verify + 0.01)
        known = depth > 0
        drafted.append(depth > 0)
    assert sum(drafted[20:60]) < 20
    assert all(drafted[-200:])


def test_a_machine_that_has_become_fast_costs_something_still():
    cost = RoundCost(RowLatency([1, 64], [1.0, 5.0]))
    for _ in range(300):
        cost.observe(64, 1.5)
    assert (cost(numpy.arange(1, 65)) > 0.2).all()


@pytest.mark.parametrize("tree_size", [None, 6, "auto"])
def test_no_drafts_at_all(tree_size, prompt):
    target = tiny_model()
    drafter = near_copy(target, 0.0)
    drafter.speculation_config = pd.SpeculationConfig(0, tree_size)
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
    assert torch.equal(target.generate(prompt, **options), target.generate(prompt, **options, assistant_model=drafter))
    assert drafter.last_stats.num_drafted == 0
