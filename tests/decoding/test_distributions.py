"""Drawn drafts through `generate`: joint frequencies of the first tokens against the exact ones,
for every way to guess.

Some thousand rows are drawn in one batch, so that a case takes seconds.
"""

import pytest
import torch
from scipy.stats import chisquare
from tiny import MASK, near_copy, tiny_model, with_noise_adapter, with_prompts
from transformers import LlamaConfig

import hf_paradraft
from hf_paradraft.drafters.eagle3.config import Eagle3Config

VOCAB, ROWS = 32, 400
TARGET = tiny_model(seed=0)
PROMPT = torch.tensor([[1, 2, 3, 4]])
WARPERS = {
    "top-k": {"top_k": 3, "temperature": 1.4},
    "top-p": {"top_k": 0, "top_p": 0.6, "temperature": 2.5},
    "repetition": {"top_k": 3, "repetition_penalty": 1.6, "temperature": 1.2},
}


class Guessing(hf_paradraft.Drafter, hf_paradraft.Drafting):
    """Random logits that depend on the text's length alone, with whatever a case adds."""

    def __init__(self, **more):
        self.more, self.speculation_config = more, None

    def start_drafting(self, target, max_length):
        return self

    def propose(self, prefixes):
        return [self.guess(prefix) for prefix in prefixes]

    def guess(self, prefix):
        size = len(self.more["vocabulary"]) if "vocabulary" in self.more else VOCAB
        logits = 2 * torch.randn(
            3, size, generator=torch.Generator().manual_seed(prefix.ids.shape[1])
        )
        return hf_paradraft.GuessedLogits(logits, **self.more)


PREFERENCES = 3 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(8))


def reverses(depths, tokens, states):
    """A head that turns preferences around by the token before, and counts its steps."""
    states = [0 if state is None else state + 1 for state in states]
    return PREFERENCES[tokens] * torch.tensor([(-1.0) ** state for state in states])[
        :, None
    ], states


class Copying(Guessing):
    """Tokens that were not drawn: siblings, one of them likely."""

    def __init__(self):
        super().__init__()
        self.best = {}

    def guess(self, prefix):
        text = tuple(prefix.ids[0].tolist())
        if text not in self.best:
            self.best[text] = int(TARGET(prefix.ids).logits[0, -1].argmax())
        best = self.best[text]
        count = 3 if prefix.room > 1 else 2
        return hf_paradraft.GuessedTokens(
            torch.tensor([best ^ 1, best, 5])[:count], [-1, -1, 1][:count]
        )


DRAFTERS = {
    "pard": lambda: near_copy(TARGET, 0.1),
    "another pard": lambda: hf_paradraft.PardDrafter.from_causal_lm(
        tiny_model(seed=3), mask_token_id=MASK
    ),
    "autoregressive": lambda: hf_paradraft.AutoregressiveDrafter(near_copy(TARGET, 0.1)),
    "prompted": lambda: hf_paradraft.PromptedDrafter(with_prompts(near_copy(TARGET, 0.1), 1)),
    "ppd": lambda: hf_paradraft.PpdDrafter.from_model(
        with_prompts(tiny_model(seed=0), 2, calibrated=True)
    ),
    "n-grams": hf_paradraft.NgramDrafter,
    "copied trees": Copying,
    "a smaller vocabulary": lambda: Guessing(vocabulary=torch.tensor([3, 30, 7, 1, 12, 40, 22])),
    "a head on the token before": lambda: Guessing(bias=reverses),
}


def blocks(**options):
    """An untrained drafter of blocks whose head on the token before has a say."""
    drafter = hf_paradraft.DSparkDrafter.from_target(
        TARGET, MASK, num_layers=1, block_size=3, num_features=2, markov_rank=4, **options
    )
    torch.nn.init.normal_(drafter.markov.before.weight)
    torch.nn.init.normal_(drafter.markov.after.weight)
    return drafter


def eagle(parallel):
    """An untrained EAGLE-3 or P-EAGLE drafter for the target."""
    layers = LlamaConfig(
        **{**TARGET.config.to_dict(), "num_hidden_layers": 1, "initializer_range": 0.4}
    )
    config = Eagle3Config(
        layers=layers,
        target_hidden_size=32,
        vocab_size=VOCAB,
        features=(0, 1),
        mask_token_id=MASK if parallel else None,
    )
    torch.manual_seed(2)
    return hf_paradraft.Eagle3Drafter(config, torch.arange(0, VOCAB, 2), own_embedding=parallel)


def relative(kind, **options):
    """An untrained relative of DFlash whose head has a say."""
    torch.manual_seed(2)
    drafter = kind._untrained(TARGET, MASK, 1, 4, 2, None, fill_in=True, **options)
    for name, parameter in drafter.named_parameters():
        if name.startswith(("selector", "refiner", "injection")):
            torch.nn.init.normal_(parameter, std=0.5)
    return drafter


def spine():
    drafter = relative(
        hf_paradraft.DSpineDrafter, causal=("full_attention",), transfer_rank=6, message_size=5
    )
    torch.nn.init.normal_(drafter.transfer_codes)
    return drafter


SELECTS = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 5}
READERS = {
    "dflash2": lambda: relative(hf_paradraft.DFlash2Drafter, **SELECTS),
    "dspine": spine,
    "xpress": lambda: relative(hf_paradraft.XPressDrafter, refiner_rank=4, refiner_size=8),
    "uno": lambda: with_noise_adapter(TARGET)[1],
    "dspark": blocks,
    "dspark, rnn, fewer tokens": lambda: blocks(
        markov_type="rnn", vocabulary=torch.arange(1, VOCAB, 2)
    ),
    "eagle3": lambda: eagle(False),
    "p-eagle": lambda: eagle(True),
    "parallelspec": lambda: hf_paradraft.ParallelSpecDrafter.from_target(TARGET, "eagle", 2),
}


def exact(options, skipped=0):
    """Probabilities of two tokens, `(V, V)`: of the first two, or of those behind `skipped`
    ones.
    """
    from transformers import GenerationConfig, LogitsProcessorList

    config = GenerationConfig(do_sample=True, **options)
    config._eos_token_tensor = None
    processors = TARGET._get_logits_processor(
        config, input_ids_seq_length=4, logits_processor=LogitsProcessorList()
    )
    joint = torch.zeros(VOCAB, VOCAB)
    with torch.no_grad():

        def following(ids):
            return processors(ids, TARGET(ids).logits[:, -1].float()).softmax(-1)[0]

        def behind(ids, chance, left):
            p = following(ids)
            for token in p.nonzero()[:, 0].tolist():
                further = torch.cat([ids, torch.tensor([[token]])], dim=1)
                if left:
                    behind(further, chance * p[token], left - 1)
                else:
                    joint[token] += chance * p[token] * following(further)

        behind(PROMPT, 1.0, skipped)
    return joint


def p_value(drafter, rule, tree_size, options, skipped=0, calls=2):
    torch.manual_seed(1)
    length = 2 if isinstance(drafter, hf_paradraft.PpdDrafter) else 3
    size = (
        max(tree_size, 5)
        if isinstance(drafter, hf_paradraft.PpdDrafter) and tree_size
        else tree_size
    )
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        length, size, acceptance=rule, never_slower=False
    )
    arguments = {
        "do_sample": True,
        "eos_token_id": None,
        "pad_token_id": 0,
        "num_return_sequences": ROWS,
        "max_new_tokens": 3 + skipped,
    }
    counts = torch.zeros(VOCAB, VOCAB)
    for _ in range(calls):
        samples = TARGET.generate(
            PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            assistant_model=drafter,
            **arguments,
            **options,
        )
        counts.index_put_(
            (samples[:, 4 + skipped], samples[:, 5 + skipped]), torch.ones(ROWS), accumulate=True
        )
    wanted = exact(options, skipped) * ROWS * calls
    assert (counts[wanted == 0] == 0).all()
    often, rare = wanted >= 5, (wanted < 5) & (wanted > 0)
    got, expected = counts[often].tolist(), wanted[often].tolist()
    if wanted[rare].sum() > 0:
        got.append(float(counts[rare].sum()))
        expected.append(float(wanted[rare].sum()))
    scale = sum(got) / sum(expected)
    return chisquare(got, [scale * value for value in expected]).pvalue


CASES = [(name, size, "top-k") for name in DRAFTERS for size in (None, 6)]
CASES += [(name, 6, "top-p") for name in ("pard", "ppd", "copied trees")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tree_size", "warper"), CASES)
def test_rejection_has_the_targets_distribution(name, tree_size, warper):
    assert p_value(DRAFTERS[name](), "rejection", tree_size, WARPERS[warper]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tree_size"), [("dspark", None), ("eagle3", None), *((name, 6) for name in READERS)]
)
def test_rejection_is_exact_for_feature_drafters(name, tree_size):
    """They guess from the second token on: the prompt's features come with the forward that gives
    the first.
    """
    assert p_value(READERS[name](), "rejection", tree_size, WARPERS["top-k"], skipped=1) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_sample_match_has_the_targets_distribution(name):
    assert p_value(DRAFTERS[name](), "sample_match", 6, WARPERS["top-k"]) > 1e-3


@pytest.mark.slow
def test_chi_square_notices_a_missing_bias(monkeypatch):
    """If `q` were without the bias that its tokens were drawn with, frequencies would show it."""
    from hf_paradraft.decoding.growing import GrowingDraft

    draft = GrowingDraft.draft

    def wrong(self):
        made = draft(self)
        made.q = self.guess.logits[:1].softmax(-1).expand(len(made), -1)
        return made

    monkeypatch.setattr(GrowingDraft, "draft", wrong)
    assert (
        p_value(Guessing(bias=reverses), "rejection", 6, {"top_k": 0, "temperature": 1.0}, calls=4)
        < 1e-6
    )
