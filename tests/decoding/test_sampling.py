"""Sampling with drafts has the target's distribution: joint frequencies of three tokens against the
exact ones.
"""

import itertools

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_paradraft.decoding.accept import Rule, accept
from hf_paradraft.protocol import Draft
from hf_paradraft.rules import RULES
from hf_paradraft.rules.rejection import sampled_tree

V, STEPS, SAMPLES = 5, 3, 2_000
# the target: logits given the last token
TABLE = torch.randn(V + 1, V, generator=torch.Generator().manual_seed(3)) * 1.5
# the drafter: independent of what it drew
GUESS = torch.randn(STEPS, V, generator=torch.Generator().manual_seed(4))


def foreign(ids, scores):
    """Might remember its calls, for all that the loop knows: chains are judged token by token then.
    Does nothing.
    """
    return scores


PROCESSORS = {
    "foreign": [foreign],
    "none": [],
    "temperature 0.5": [TemperatureLogitsWarper(0.5)],
    "temperature 1.5": [TemperatureLogitsWarper(1.5)],
    "top-k": [TopKLogitsWarper(3)],
    "top-p": [TopPLogitsWarper(0.7)],
    "repetition penalty": [RepetitionPenaltyLogitsProcessor(1.8), TemperatureLogitsWarper(0.8)],
}


def exact(processors):
    """Probability of every continuation of the prefix [0]."""
    joint = {}
    for tokens in itertools.product(range(V), repeat=STEPS):
        probability, ids = 1.0, torch.tensor([[0]])
        for token in tokens:
            scores = processors(ids, TABLE[ids[0, -1]][None].clone())
            probability *= scores.softmax(-1)[0, token].item()
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
        joint[tokens] = probability
    return joint


class Remembered:
    """Processors whose results are looked up: there are few prefixes, and many samples.

    After each prefix they are shown the same logits, its own.
    """

    def __init__(self, processors):
        self.processors, self.scores = LogitsProcessorList(processors), {}

    def __iter__(self):
        return iter(self.processors)

    def __len__(self):
        return len(self.processors)

    def __bool__(self):
        return True

    def __call__(self, ids, logits):
        key = tuple(ids[0].tolist())
        if key not in self.scores:
            self.scores[key] = logits.clone(), self.processors(ids, logits)
        own, scores = self.scores[key]
        assert torch.equal(logits, own)
        return scores


def draw(rule, processors, make_draft):
    """Three tokens, in rounds of drafts."""
    ids = torch.zeros(1, 12, dtype=torch.long)
    length = 1
    while length <= STEPS:
        draft = make_draft(ids[:, :length], STEPS + 1 - length)
        last = [int(ids[0, length - 1]), *draft.tokens.tolist()]
        for _ in accept(draft, TABLE[torch.tensor(last)], ids, length, processors, rule):
            length += 1
            if length > STEPS:
                break
    return tuple(ids[0, 1 : STEPS + 1].tolist())


def sampled_chain(ids, room):
    q = GUESS[:room].softmax(-1)
    return Draft.chain(torch.multinomial(q, 1)[:, 0], q)


def top_chain(ids, room):
    return Draft.chain(GUESS[:room].argmax(-1))


def sampled_tree_by_hand(ids, room):
    """Two children without replacement below the root, and two below the first of them."""
    q = GUESS[:2].softmax(-1)
    first, second = torch.multinomial(q[0], 2), torch.multinomial(q[1], 2)
    return Draft(torch.cat([first, second]), [-1, -1, 0, 0], torch.stack([q[0], q[0], q[1], q[1]]))


def top_tree(ids, room):
    first, second = GUESS[0].topk(2).indices, GUESS[1].topk(2).indices
    return Draft(torch.cat([first, second]), [-1, -1, 0, 0])


def p_value(rule, processors, make_draft):
    torch.manual_seed(0)
    processors = Remembered(processors)
    expected = exact(processors)
    counts = dict.fromkeys(expected, 0)
    for _ in range(SAMPLES):
        counts[draw(rule, processors, make_draft)] += 1
    assert all(counts[tokens] == 0 for tokens, p in expected.items() if p == 0)
    cells = [(counts[tokens], p * SAMPLES) for tokens, p in expected.items() if p > 0]
    rare = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5]
    if sum(want for _, want in rare) > 0:
        cells.append((sum(got for got, _ in rare), sum(want for _, want in rare)))
    got, want = zip(*cells, strict=True)
    return chisquare(got, [w * sum(got) / sum(want) for w in want]).pvalue


def recursive_tree(ids, room):
    """As a PARD drafter draws it: the shape of the five best paths, siblings without
    replacement.
    """
    return sampled_tree(GUESS[: min(room, 2)].softmax(-1), 5)


SHAPES = [
    ("rejection", sampled_chain),
    ("rejection", sampled_tree_by_hand),
    ("rejection", recursive_tree),
]
CASES = [(*shape, name) for shape in SHAPES[:3] for name in PROCESSORS]
# the drafts play no part
CASES += [
    (*shape, name) for shape in SHAPES[3:] for name in ("none", "top-p", "repetition penalty")
]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "make_draft", "processors"), CASES)
def test_joint_distribution(rule, make_draft, processors, record_property):
    value = p_value(RULES[rule](), PROCESSORS[processors], make_draft)
    record_property("p_value", float(value))
    print(f"{rule}, {make_draft.__name__}, {processors}: p = {value:.3f}")
    assert value > 1e-3


def test_chi_square_notices_a_wrong_rule():
    class AcceptsTooMuch(Rule):
        def judge(self, draft, node, scores, row):
            p = scores.softmax(-1)[0]
            for child in draft.children(node):
                if torch.rand(()) < p[draft.tokens[child]] ** 0.5:
                    return int(draft.tokens[child]), child
            return int(torch.multinomial(p, 1)), None

    assert p_value(AcceptsTooMuch(), [], sampled_chain) < 1e-6


def test_a_chain_is_judged_as_a_whole():
    """The example of Sun et al. (2403.10444, section 3): 11/9 of two drafted tokens are kept, and
    10/9 one by one.
    """
    target = torch.tensor([[1 / 3, 2 / 3]]).log().expand(3, 2)
    q = torch.tensor([[2 / 3, 1 / 3]]).expand(2, 2)
    for processors, wanted in ((Remembered([]), 11 / 9), (Remembered([foreign]), 10 / 9)):
        torch.manual_seed(0)
        accepted = 0
        for _ in range(4_000):
            draft = Draft.chain(torch.multinomial(q, 1)[:, 0], q)
            ids = torch.zeros(1, 12, dtype=torch.long)
            accepted += sum(
                token.node is not None
                for token in accept(draft, target, ids, 1, processors, RULES["rejection"]())
            )
        assert accepted / 4_000 == pytest.approx(wanted, abs=0.04)


@pytest.mark.slow
def test_chi_square_notices_a_missing_residual():
    """Rejection of drafts that were not sampled from the `q` they claim."""

    def claims_another_q(ids, room):
        return Draft.chain(GUESS[:room].argmax(-1), GUESS[:room].softmax(-1))

    assert p_value(RULES["rejection"](), [], claims_another_q) < 1e-6
