"""How much is drafted, tested by playing rounds with made-up costs: nothing here knows how a budget
decides.
"""

import numpy
import pytest
import torch
from tiny import tiny_model

import hf_paradraft
from hf_paradraft.admission import budget_of
from hf_paradraft.decoding.budget import Budget, RowLatency
from hf_paradraft.decoding.trees import best_first_tree, part
from hf_paradraft.protocol import Draft, PromptRows, Round, SequenceRound

K = 8
FLAT, STEEP = RowLatency([1, 64], [1.0, 1.0]), RowLatency([1, 64], [1.0, 64.0])


def table(slope):
    """A plain forward takes a second, each further row `slope` seconds."""
    return RowLatency([1, 64], [1.0, 1.0 + 63 * slope])


def one_round(draft, path, draft_seconds, verify_seconds, asked=None, first=False):
    """The record of a round of one sequence."""
    emitted = [0] * (len(path) + 1)
    part = SequenceRound(0, draft, list(path), emitted, min(len(draft), len(path) + 1))
    asked = draft_seconds > 0 if asked is None else asked
    return Round(
        [part],
        draft_seconds,
        verify_seconds,
        draft_seconds + verify_seconds + 0.02,
        0.0,
        asked,
        first,
    )


def play(budget, tokens, accepted, draft=0.4, row=0.02, chances=0.8, begin=True):
    """Decode `tokens` with chains of up to K whose drafter believes each guess with `chances`:
    seconds, and what was drafted.
    """
    done = seconds = 0
    lengths = []
    if begin:
        budget.begin()
    while done < tokens:
        length = 0
        if not budget.rest():
            believed = numpy.minimum(1.0, chances * budget.calibration[1 : K + 1])
            length = budget.size([numpy.cumprod(believed).tolist()])
        lengths.append(length)
        acceptance = (chances * budget.calibration[1 : length + 1]).tolist()
        guess = Draft.chain(torch.arange(length), None, acceptance)
        record = one_round(
            guess, range(min(length, accepted(done))), draft if length else 0.0, 1 + row * length
        )
        budget.observe(record)
        seconds += record.total_seconds
        done += len(record.sequences[0].emitted)
    return seconds, lengths


def test_a_hopeless_drafter_costs_little():
    seconds, lengths = play(Budget(table(0.02), K), 256, lambda done: 0)
    assert seconds < 1.03 * 256 * 1.02
    assert lengths[-40:].count(0) > 30
    assert any(lengths[20:])  # it still looks again


def test_what_a_text_that_ended_never_looked_at_counts_for_nothing():
    budget = Budget(table(0.02), K)
    guess = Draft.chain(torch.arange(5), None, [0.9] * 5)
    ended = SequenceRound(0, guess, [0, 1], [0, 1], judged=2)  # its second draft token ended it
    budget.observe(Round([ended], 0.1, 1.0, 1.1))
    assert budget.tried.tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0]
    assert budget.accepted.tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0]


def test_a_good_drafter_is_hardly_interrupted():
    seconds, lengths = play(Budget(table(0.02), K), 400, lambda done: 4)
    assert lengths.count(0) <= 2  # to see what a plain round takes
    assert seconds < 400 / 3


def test_drafting_comes_back_when_guesses_get_right():
    _, lengths = play(Budget(table(0.02), K), 2000, lambda done: 0 if done < 300 else 5)
    assert lengths[:250].count(0) > 150
    assert lengths[-50:].count(0) == 0


def test_a_wrong_table_is_found_out():
    """It says that rows are free and the forward slow; plain rounds show that drafting loses."""
    budget = Budget(RowLatency([1, 64], [1.45, 1.5]), K)
    seconds, lengths = play(
        budget, 400, lambda done: 1 if done % 5 == 0 else 0, draft=0.3, row=0.03
    )
    assert lengths[-100:].count(0) > 80
    assert seconds < 1.06 * 400 * 1.02


def test_a_plain_round_that_takes_longer_than_the_table_says_speaks_for_drafting():
    """Drafting seemed to lose before plain rounds were timed, and rested for a hundred rounds."""
    budget = Budget(RowLatency([16, 48, 1024], [0.6, 1.04, 1.3]), K, batch_size=16)
    seconds, lengths = play(budget, 200, lambda done: 1, row=0.01)
    assert lengths.count(0) <= 2
    assert seconds < 0.8 * 200 * 1.02


def test_a_chain_is_shortened_where_rows_are_dear():
    _, lengths = play(Budget(table(0.15), K), 400, lambda done: 2, draft=0.1, row=0.15)
    assert set(lengths[-20:]) <= {2, 3}


@pytest.mark.parametrize("chances", [0.3, 0.95])
def test_a_drafter_that_pays_is_not_given_up_for_bad_luck(chances):
    """A drafter that is right in two rounds of five, and then pays, is not given up for a few
    rounds without a hit.
    """
    asked = []
    for seed in range(12):
        generator, budget = numpy.random.default_rng(seed), Budget(table(0.04), K)
        for _ in range(4):
            _, lengths = play(
                budget,
                90,
                lambda done, generator=generator: int(generator.random() < 0.4),
                0.1,
                0.01,
                chances,
            )
            asked.append(numpy.mean(numpy.array(lengths) > 0))
    assert numpy.mean(asked) > 0.9


def test_good_calls_do_not_pay_for_a_hopeless_one():
    """What they brought is soon forgotten where the text has changed."""
    budget, generator = Budget(table(0.01), K), numpy.random.default_rng(0)
    for _ in range(6):
        play(budget, 128, lambda done: 2 if generator.random() < 0.8 else 0, draft=0.1, row=0.01)
    seconds, lengths = play(budget, 256, lambda done: 0, draft=0.1, row=0.01)
    assert seconds < 1.03 * 256 * 1.02
    assert lengths[60:].count(0) > 0.8 * len(lengths[60:])


def test_a_call_remembers_that_drafting_did_not_pay():
    """What it lost is paid back before it is tried again, in a later call."""
    budget, asked, seconds = Budget(table(0.3), K), [], 0.0
    for _ in range(12):
        spent, lengths = play(budget, 60, lambda done: 0, draft=0.1, row=0.3)
        seconds += spent
        asked.append(sum(length > 0 for length in lengths))
    assert asked[0]
    assert any(asked[1:])
    assert asked.count(0) > 4
    assert seconds < 1.01 * 12 * 60 * 1.02 + 4 * (0.1 + 0.3 * K)


def test_good_rounds_are_not_paid_for_with_bad_ones():
    """Trees by what rounds bring in the long run beat trees that are each as fast as they can be by
    themselves.
    """

    def speed(by_itself, most=32):
        latency, tokens, seconds = RowLatency([1, 64], [1.0, 8.0]), 0.0, 0.0
        shared = Budget(latency, most)
        for sure in [0.98, 0.8] * 100:
            budget = Budget(latency, most) if by_itself else shared
            chances = [sure**depth for depth in range(1, most + 1)]
            size = budget.size([chances], 0.2)
            brought, verify = 1 + sum(chances[:size]), float(latency(1 + size))
            path = range(round(brought) - 1)
            budget.observe(
                one_round(Draft.chain(torch.arange(size), None, [sure] * size), path, 0.2, verify)
            )
            tokens, seconds = tokens + brought, seconds + 0.2 + verify
        return tokens / seconds

    assert speed(False) > 1.03 * speed(True)


def tree_of(size=64):
    logits = torch.randn(K, 100, generator=torch.Generator().manual_seed(0)) * 2
    return best_first_tree(logits, size)


@pytest.mark.parametrize(
    ("slope", "expected"), [(0.0, range(40, 65)), (1.0, range(1, 3)), (0.02, range(3, 64))]
)
def test_a_trees_size_follows_the_latency(slope, expected):
    assert Budget(table(slope), K).size([tree_of().path_probability]) in expected


def test_a_batch_has_one_size():
    """What a sure sequence wants, an unsure one pays for."""
    sure, unsure = [0.99**depth for depth in range(1, 21)], [0.1**depth for depth in range(1, 21)]
    budget = Budget(RowLatency([1, 64], [1.0, 7.3]), 20, batch_size=3)
    assert budget.size([sure, unsure, unsure]) < budget.size([sure])
    assert budget.size([]) == 0


def test_the_first_nodes_of_a_best_first_tree_are_the_smaller_tree():
    big, small = part(tree_of(64), [*range(20)]), tree_of(20)
    assert big.token_ids == small.token_ids
    assert big.parents == small.parents


def test_promises_that_do_not_come_true_are_corrected():
    budget = Budget(FLAT, 2)
    for turn in range(400):
        tree = Draft(
            torch.tensor([1, 2]),
            [-1, -1],
            None,
            [chance * budget.calibration[1] for chance in (0.6, 0.3)],
        )
        budget.observe(one_round(tree, [0] if turn % 3 == 0 else [], 0.1, 1.0))
    assert budget.calibration[1] == pytest.approx((1 / 3) / 0.9, rel=0.15)


def test_a_slower_machine_is_noticed():
    """The table was made when it was three times as fast; a single round that was disturbed says
    nothing.
    """
    budget = Budget(table(0.02), K)
    before = float(budget.cost(9))
    for _ in range(20):
        budget.observe(one_round(tree_of(8), [], 0.1, 3 * before))
    budget.observe(one_round(tree_of(8), [], 0.1, 1e6))
    assert float(budget.cost(9)) == pytest.approx(3 * before, rel=0.05)


def test_calls_of_one_pair_share_a_budget(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_paradraft.decoding.latency.FOLDER", tmp_path)
    target, other, drafter = tiny_model(), tiny_model(), hf_paradraft.NgramDrafter()
    shared = budget_of(target, drafter, True, K, None, ("greedy",), 1)
    assert budget_of(target, drafter, True, K, None, ("greedy",), 1) is shared
    for *pair, size in (
        (other, drafter, 1),
        (target, hf_paradraft.NgramDrafter(), 1),
        (target, drafter, 2),
    ):
        assert budget_of(*pair, True, K, None, ("greedy",), size) is not shared


def test_a_batch_size_begins_with_what_another_one_has_learned():
    """And with hope: whether drafting pays there is to be seen."""
    budget = Budget(table(0.02), K, 4)
    for _ in range(30):
        budget.observe(one_round(tree_of(8), [], 1.0, 2 * float(table(0.02)(36))))
    other = budget.for_batch(2)
    assert (other.acceptance == budget.acceptance).all()
    assert other.factor() == budget.factor() == pytest.approx(2)
    assert other.batch_size == 2
    assert budget.gain < 0.98 < other.gain
    assert budget.debt > other.debt == 0
    before = budget.acceptance
    other.observe(one_round(tree_of(8), [0], 0.1, 1.0))
    assert (budget.acceptance == before).all()
    assert (other.acceptance != before).any()


def test_paths_that_cannot_pay_are_not_followed():
    for slope in (0.0, 0.02):
        budget = Budget(table(slope), K)
        assert budget.least == 0
        size = budget.size([tree_of().path_probability])
        budget.observe(one_round(tree_of(size), [], 0.4, float(budget.cost(1 + size))))
        assert (
            (0 < budget.least < min(tree_of(size).path_probability)) if slope else budget.least == 0
        )


def test_trees_have_few_sizes():
    """Each number of rows may be compiled once."""
    chances, sizes = [0.9**depth for depth in range(1, 33)], set()
    for most in numpy.linspace(1.1, 8.0, 40):
        sizes.add(Budget(RowLatency([1, 64], [1.0, float(most)]), 32).size([chances]))
    assert len(sizes) > 3
    assert all(size < 4 or size % 4 == 3 or size == 32 for size in sizes)


def test_compiled_forwards_cost_what_their_padded_rows_cost():
    """Of 17 rows, 16 beside the last token's are paid for in any case."""
    chances = [0.7**depth for depth in range(1, 33)]
    assert Budget(table(0.05), 32).size([chances]) < 12
    assert Budget(table(0.05), 32, row_counts=[1, 17, 33, 65]).size([chances]) >= 11


def prompts_alone(count):
    """A draft of prompt rows without a token."""
    rows = PromptRows([-1] * count, [-1] * count, torch.zeros(count, 4))
    return Draft(torch.arange(0), [], prompt_rows=rows)


def test_prompt_tokens_come_back_from_a_pause():
    """After a plain round they know nothing: the first drafted round only asks, and is not held
    against them.
    """
    budget, drafted, guesses = Budget(table(0.05), 3), [], False
    for turn in range(400):
        good, rests = turn > 60, budget.rest()
        draft = (
            Draft.chain(torch.arange(0))
            if rests
            else Draft.chain(torch.arange(3))
            if guesses
            else prompts_alone(3)
        )
        path = range(3) if good and guesses and not rests else []
        budget.observe(one_round(draft, path, 0.0, 1.0 if rests else 1.2, asked=not rests))
        guesses = not rests
        drafted.append(guesses)
    assert sum(drafted[20:60]) < 20
    assert all(drafted[-200:])


@pytest.mark.parametrize("begun", [6, 30, 60])
def test_a_machine_that_becomes_slower_is_no_loss_of_drafting(begun):
    """Everything takes three times as long for a while, or from now on; each draft of four brings
    two tokens.
    """
    budget, rested = Budget(table(0.05), 4), []
    for call in range(4):
        budget.begin()
        for turn in range(30):
            busy = 3.0 if begun <= 30 * call + turn < begun + 45 else 1.0
            rests = budget.rest() if turn else False
            draft = Draft.chain(torch.arange(0 if rests else 4), None, [] if rests else [0.5] * 4)
            record = one_round(draft, [] if rests else range(turn % 3), 0.0, 0.0, asked=not rests)
            record.draft_seconds, record.verify_seconds = (
                (0.0, busy) if rests else (0.3 * busy, 1.2 * busy)
            )
            record.total_seconds = record.draft_seconds + record.verify_seconds + 0.02 * busy
            budget.observe(record)
            rested.append(rests)
    assert sum(rested) == 2  # whose seconds are compared
