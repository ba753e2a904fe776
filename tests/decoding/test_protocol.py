"""A drafter of one's own: anything with the calls of `Drafter` works, and nothing but speed depends on what it guesses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import EOS, tiny_model

import hf_paradraft as pd

TARGET = tiny_model()


class Bigrams:
    """Continues with what followed the last token before; remembers what it was shown."""

    last_stats = None

    def __init__(self):
        self.speculation_config = pd.SpeculationConfig(num_draft_tokens=4, never_slower=False)
        self.observed = []

    def start_drafting(self, max_length):
        return self

    def propose(self, prefixes):
        return [self.guess(prefix) for prefix in prefixes]

    def guess(self, prefix):
        ids = prefix.ids[0].tolist()
        seen = [i for i, token in enumerate(ids[:-1]) if token == ids[-1]]
        guess = ids[seen[-1] + 1 :][: prefix.room] if seen else []
        return pd.Draft.chain(torch.tensor(guess, dtype=torch.long))

    def observe(self, outputs, paths):
        self.observed.append((outputs.logits.shape[1], len(paths[0])))


class Forest(Bigrams):
    """Random trees: almost always wrong, sometimes right, of any shape."""

    def guess(self, prefix):
        if not prefix.branches:
            return super().guess(prefix)
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
        return pd.Draft(tokens, parents)

    def peek(self, prefix):
        """Cheats, so that paths are accepted: the target's own next token."""
        with torch.no_grad():
            return TARGET(prefix.ids).logits[0, -1].argmax()


@pytest.mark.parametrize("drafter_class", [Bigrams, Forest])
@settings(max_examples=25, deadline=None)
@given(ids=st.lists(st.integers(0, EOS - 1), min_size=1, max_size=12), new=st.integers(1, 24), seed=st.integers(0, 99))
def test_any_drafter_is_lossless(drafter_class, ids, new, seed):
    torch.manual_seed(seed)
    drafter, ids = drafter_class(), torch.tensor([ids])
    plain = TARGET.generate(ids, do_sample=False, max_new_tokens=new)
    options = {"custom_generate": pd.speculative_decoding, "drafter": drafter}
    assert torch.equal(plain, TARGET.generate(ids, do_sample=False, max_new_tokens=new, **options))
    assert len(drafter.observed) == drafter.last_stats.num_rounds
    assert sum(accepted for _, accepted in drafter.observed) == sum(drafter.last_stats.successes)
