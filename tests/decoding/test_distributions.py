"""Drawn drafts through `generate`: joint frequencies of the first tokens against the exact ones, for every way to guess.

Some thousand rows are drawn in one batch, so that a case takes seconds.
"""

import pytest
import torch
from scipy.stats import chisquare
from tiny import MASK, near_copy, tiny_model, with_prompts

import hf_paradraft as pd

VOCAB, ROWS, CALLS = 32, 400, 4
TARGET = tiny_model(seed=0)
PROMPT = torch.tensor([[1, 2, 3, 4]])
WARPERS = {
    "top-k": {"top_k": 3, "temperature": 1.4},
    "top-p": {"top_k": 0, "top_p": 0.6, "temperature": 2.5},
    "repetition": {"top_k": 3, "repetition_penalty": 1.6, "temperature": 1.2},
}


class Guessing(pd.Drafter, pd.Drafting):
    """Random logits that depend on the text's length alone, with whatever a case adds."""

    def __init__(self, **more):
        self.more, self.speculation_config = more, None

    def start_drafting(self, target, max_length):
        return self

    def propose(self, prefixes):
        return [self.guess(prefix) for prefix in prefixes]

    def guess(self, prefix):
        size = len(self.more["vocabulary"]) if "vocabulary" in self.more else VOCAB
        logits = 2 * torch.randn(3, size, generator=torch.Generator().manual_seed(prefix.ids.shape[1]))
        return pd.GuessedLogits(logits, **self.more)


PREFERENCES = 3 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(8))


def reverses(depths, tokens, states):
    """A head that turns preferences around by the token before, and counts its steps."""
    states = [0 if state is None else state + 1 for state in states]
    return PREFERENCES[tokens] * torch.tensor([(-1.0) ** state for state in states])[:, None], states


class Copying(Guessing):
    """Tokens that were not drawn: siblings, one of them likely."""

    def guess(self, prefix):
        best = int(TARGET(prefix.ids).logits[0, -1].argmax())
        count = 3 if prefix.room > 1 else 2
        return pd.GuessedTokens(torch.tensor([best ^ 1, best, 5])[:count], [-1, -1, 1][:count])


DRAFTERS = {
    "pard": lambda: near_copy(TARGET, 0.1),
    "another pard": lambda: pd.PardDrafter.from_causal_lm(tiny_model(seed=3), mask_token_id=MASK),
    "autoregressive": lambda: pd.AutoregressiveDrafter(near_copy(TARGET, 0.1)),
    "ahead": lambda: pd.PromptedDrafter(with_prompts(near_copy(TARGET, 0.1), 1)),
    "ppd": lambda: pd.PpdDrafter.from_model(with_prompts(tiny_model(seed=0), 2, calibrated=True)),
    "n-grams": pd.NgramDrafter,
    "copied trees": Copying,
    "a smaller vocabulary": lambda: Guessing(vocabulary=torch.tensor([3, 30, 7, 1, 12, 40, 22])),
    "a head on the token before": lambda: Guessing(bias=reverses),
}


def exact(options):
    """Probabilities of the first two tokens, `(V, V)`."""
    from transformers import GenerationConfig, LogitsProcessorList

    config = GenerationConfig(do_sample=True, **options)
    config._eos_token_tensor = None
    processors = TARGET._get_logits_processor(config, input_ids_seq_length=4, logits_processor=LogitsProcessorList())
    joint = torch.zeros(VOCAB, VOCAB)
    with torch.no_grad():
        first = processors(PROMPT, TARGET(PROMPT).logits[:, -1].float()).softmax(-1)[0]
        for token in first.nonzero()[:, 0].tolist():
            ids = torch.cat([PROMPT, torch.tensor([[token]])], dim=1)
            joint[token] = first[token] * processors(ids, TARGET(ids).logits[:, -1].float()).softmax(-1)[0]
    return joint


def p_value(drafter, rule, tree_size, options):
    torch.manual_seed(1)
    length = 2 if isinstance(drafter, pd.PpdDrafter) else 3
    size = max(tree_size, 5) if isinstance(drafter, pd.PpdDrafter) and tree_size else tree_size
    drafter.speculation_config = pd.SpeculationConfig(length, size, acceptance=rule, never_slower=False)
    arguments = {"do_sample": True, "eos_token_id": None, "pad_token_id": 0, "num_return_sequences": ROWS, "max_new_tokens": 3}
    counts = torch.zeros(VOCAB, VOCAB)
    for _ in range(CALLS):
        samples = TARGET.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), assistant_model=drafter, **arguments, **options)
        counts.index_put_((samples[:, 4], samples[:, 5]), torch.ones(ROWS), accumulate=True)
    wanted = exact(options) * ROWS * CALLS
    assert (counts[wanted == 0] == 0).all()
    often, rare = wanted >= 5, (wanted < 5) & (wanted > 0)
    got, expected = counts[often].tolist(), wanted[often].tolist()
    if wanted[rare].sum() > 0:
        got.append(float(counts[rare].sum()))
        expected.append(float(wanted[rare].sum()))
    scale = sum(got) / sum(expected)
    return chisquare(got, [scale * value for value in expected]).pvalue


@pytest.mark.slow
@pytest.mark.parametrize("warper", ["top-k", "top-p"])
@pytest.mark.parametrize("tree_size", [None, 6])
@pytest.mark.parametrize("name", DRAFTERS)
def test_rejection(name, tree_size, warper):
    assert p_value(DRAFTERS[name](), "rejection", tree_size, WARPERS[warper]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_sample_match(name):
    assert p_value(DRAFTERS[name](), "sample_match", 6, WARPERS["top-k"]) > 1e-3


@pytest.mark.slow
def test_a_head_that_is_forgotten_is_found_out(monkeypatch):
    """If `q` were without the bias that its tokens were drawn with, frequencies would show it."""
    from hf_paradraft.decoding.grow import Growing

    draft = Growing.draft

    def wrong(self):
        made = draft(self)
        made.q = self.guess.logits[:1].softmax(-1).expand(len(made), -1)
        return made

    monkeypatch.setattr(Growing, "draft", wrong)
    assert p_value(Guessing(bias=reverses), "rejection", 6, {"top_k": 0, "temperature": 1.0}) < 1e-6
