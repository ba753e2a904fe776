"""A drafter of one's own: anything with the calls of `Drafter` works, and nothing but speed depends
on what it guesses.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import EOS, VOCAB, tiny_model

import hf_paradraft

TARGET = tiny_model()


class Bigrams(hf_paradraft.Drafter, hf_paradraft.Drafting):
    """Continues with what followed the last token before; remembers what it was shown."""

    tree_size = None

    def __init__(self):
        self.speculation_config = hf_paradraft.SpeculationConfig(
            4, self.tree_size, never_slower=False
        )
        self.observed, self.unchanged = [], []

    def start_drafting(self, target, max_length):
        return self

    def propose(self, prefixes):
        self.unchanged.append(prefixes[0].kept)
        return [self.guess(prefix) for prefix in prefixes]

    def guess(self, prefix):
        ids = prefix.ids[0].tolist()
        seen = [i for i, token in enumerate(ids[:-1]) if token == ids[-1]]
        guess = ids[seen[-1] + 1 :][: prefix.room] if seen else []
        return hf_paradraft.GuessedTokens(torch.tensor(guess, dtype=torch.long))

    def observe(self, observations):
        self.observed.append(observations[0].tokens.tolist())


class Forest(Bigrams):
    """Random trees: almost always wrong, sometimes right, of any shape."""

    tree_size = 12

    def guess(self, prefix):
        size = int(torch.randint(1, 12, ()))
        parents, depth = [], []
        for node in range(size):
            parent = int(torch.randint(-1, node, ())) if node else -1
            level = 1 + (depth[parent] if parent >= 0 else 0)
            if level > prefix.room:
                parent, level = -1, 1
            parents.append(parent)
            depth.append(level)
        tokens = torch.randint(0, EOS, (size,))
        tokens[0] = self.peek(prefix)
        return hf_paradraft.GuessedTokens(tokens, parents)

    def peek(self, prefix):
        """Cheats, so that paths are accepted: the target's own next token."""
        with torch.no_grad():
            return TARGET(prefix.ids).logits[0, -1].argmax()


class Chain(Forest):
    """The same where trees are not wanted."""

    tree_size = None


class Auto(Forest):
    tree_size = "auto"


class Distributions(Forest):
    """Random logits over a vocabulary of its own, one guess in five right."""

    def __init__(self, size=20):
        super().__init__()
        # some of its ids are none of the target's
        self.vocabulary = torch.randperm(VOCAB + 4)[:size]

    def guess(self, prefix):
        logits = torch.randn(prefix.room, len(self.vocabulary))
        if torch.rand(()) < 0.1:
            logits[:] = float("nan")
        return hf_paradraft.GuessedLogits(logits, vocabulary=self.vocabulary)


@pytest.mark.parametrize("drafter_class", [Bigrams, Forest, Chain, Auto, Distributions])
@settings(max_examples=12, deadline=None)
@given(
    ids=st.lists(st.integers(0, EOS - 1), min_size=1, max_size=12),
    new=st.integers(1, 16),
    seed=st.integers(0, 99),
)
def test_any_drafter_is_lossless(drafter_class, ids, new, seed):
    torch.manual_seed(seed)
    drafter, ids = drafter_class(), torch.tensor([ids])
    plain = TARGET.generate(ids, do_sample=False, max_new_tokens=new)
    for door in (
        {"custom_generate": hf_paradraft.speculative_decoding, "drafter": drafter},
        {"assistant_model": drafter},
    ):
        drafter.observed.clear()
        drafter.unchanged.clear()
        assert torch.equal(plain, TARGET.generate(ids, do_sample=False, max_new_tokens=new, **door))
        stats = drafter.last_stats
        assert len(drafter.observed) == stats.num_rounds
        assert [token for tokens in drafter.observed for token in tokens] == plain[
            0, ids.shape[1] :
        ].tolist()
        lengths = [ids.shape[1]]
        for emitted in stats.emitted_per_round[:-1]:
            lengths.append(lengths[-1] + emitted)
        # nothing was taken back
        assert drafter.unchanged == [0, *lengths][: len(drafter.unchanged)]


WRONG = {
    "ids outside": (
        lambda prefix: hf_paradraft.GuessedTokens(torch.tensor([1, VOCAB])),
        "outside of the target's vocabulary",
    ),
    "negative ids": (
        lambda prefix: hf_paradraft.GuessedTokens(torch.tensor([-1])),
        "outside of the target's vocabulary",
    ),
    "too deep": (
        lambda prefix: hf_paradraft.GuessedTokens(torch.arange(prefix.room + 1)),
        "there is room for",
    ),
    "too many": (
        lambda prefix: hf_paradraft.GuessedTokens(torch.arange(20), [-1] * 20),
        "at most 8 are allowed",
    ),
    "parents behind": (
        lambda prefix: hf_paradraft.GuessedTokens(torch.tensor([1, 2]), [1, -1]),
        "parents come first",
    ),
    "too few parents": (
        lambda prefix: hf_paradraft.GuessedTokens(torch.tensor([1, 2]), [-1]),
        "1 parents",
    ),
    "too few chances": (
        lambda prefix: hf_paradraft.GuessedTokens(torch.tensor([1, 2]), None, [0.5]),
        "one acceptance",
    ),
    "no ids": (lambda prefix: hf_paradraft.GuessedTokens(torch.tensor([0.5])), "wanted ids"),
    "a draft": (lambda prefix: hf_paradraft.Draft.chain(torch.tensor([1])), "a Draft as a guess"),
    "nothing": (lambda prefix: None, "a NoneType as a guess"),
    "logits of a batch": (
        lambda prefix: hf_paradraft.GuessedLogits(torch.zeros(1, 2, VOCAB)),
        "for one sequence",
    ),
    "another map": (
        lambda prefix: hf_paradraft.GuessedLogits(torch.zeros(2, 7), vocabulary=torch.arange(6)),
        "maps 6 ids",
    ),
}


class Wrong(Bigrams):
    tree_size = 8


@pytest.mark.parametrize("name", WRONG)
def test_malformed_guesses_are_refused(name, prompt):
    guess, message = WRONG[name]
    drafter = Wrong()
    drafter.guess = guess
    with pytest.raises(ValueError, match=message):
        TARGET.generate(
            prompt, do_sample=False, max_new_tokens=20, eos_token_id=None, assistant_model=drafter
        )


def test_fewer_guesses_than_prefixes_are_refused(prompt):
    drafter = Wrong()
    drafter.propose = lambda prefixes: []
    with pytest.raises(ValueError, match="as many guesses"):
        TARGET.generate(prompt, do_sample=False, max_new_tokens=20, assistant_model=drafter)


class HalfADrafter:
    """Derives from nothing, and lacks what `Drafter` brings."""

    def __init__(self):
        self.speculation_config, self.last_stats = hf_paradraft.SpeculationConfig(4), None

    def start_drafting(self, max_length):
        return self


def test_a_drafter_that_lacks_calls_is_told_which(prompt):
    drafter = HalfADrafter()
    for door in (
        {"custom_generate": hf_paradraft.speculative_decoding, "drafter": drafter},
        {"assistant_model": drafter},
    ):
        with pytest.raises(
            ValueError, match=r"lacks attach\(target\), needs\(target\).*add-a-drafter"
        ):
            TARGET.generate(prompt, max_new_tokens=4, do_sample=False, **door)


def test_half_a_drafter_says_what_is_missing(prompt):
    with pytest.raises(NotImplementedError, match="Drafter has no start_drafting"):
        hf_paradraft.Drafter().start_drafting(TARGET, 4)
    with pytest.raises(NotImplementedError, match="has no propose"):
        hf_paradraft.Drafting().propose([])
    nameless = hf_paradraft.Drafter()
    with pytest.raises(ValueError, match="no speculation_config"):
        TARGET.generate(prompt, max_new_tokens=4, do_sample=False, assistant_model=nameless)
