"""A small model with prompt tokens decodes ahead of the target: its own text, in fewer forwards, and the target's output."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import EOS, VOCAB, near_copy, tiny_model, with_prompts
from torch.nn.functional import one_hot
from transformers import AutoModelForCausalLM, BloomConfig

import hf_paradraft as pd
from hf_paradraft.decoding.pace import Pace
from hf_paradraft.drafters.ppd.ahead import AheadDrafting

NAMES = ["llama", "qwen3", "gpt2", "mistral-sliding"]
TARGET = tiny_model("llama")


def ahead(model, m=2, calibrated=False, **options):
    """A drafter of more tokens than it has prompts, which decides nothing by the clock."""
    options = {"num_draft_tokens": 9, "tree_size": None, "never_slower": False, **options}
    return pd.PromptedDrafter(with_prompts(model, m, calibrated=calibrated, seed=1), pd.SpeculationConfig(**options))


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.lists(st.lists(st.integers(1, EOS - 1), min_size=4, max_size=4), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(6, 14),
    st.sampled_from([None, 6, 20]),
    st.booleans(),
    st.booleans(),
)
def test_the_output_is_the_targets(name, prompts, m, num_draft_tokens, tree_size, calibrated, related):
    small = near_copy(TARGET, 0.05) if related else tiny_model(name)
    drafter = ahead(small, m, calibrated, num_draft_tokens=num_draft_tokens, tree_size=tree_size)
    ids = torch.tensor(prompts)
    mask = torch.ones_like(ids)
    mask[0, : len(prompts) - 1] = 0  # the first row of a batch is shorter
    options = {"do_sample": False, "max_new_tokens": 24, "attention_mask": mask, "pad_token_id": 0}
    plain = TARGET.generate(ids, **options)
    assert torch.equal(plain, TARGET.generate(ids, **options, assistant_model=drafter))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_the_models_own_text(name, prompt):
    """Each draft of 9 is what plain decoding of the small model gives, whatever was rejected before."""
    small = tiny_model(name, seed=3)
    drafter = ahead(small, trace=True)
    out = TARGET.generate(prompt, do_sample=False, max_new_tokens=40, eos_token_id=None, assistant_model=drafter)
    known = prompt.shape[1]
    alone = tiny_model(name, seed=3)
    for round_ in drafter.last_stats.trace:
        drafted = round_.drafted[: 9 - 2]  # the last two may be the prompts' guesses
        own = alone.generate(out[:, :known], do_sample=False, max_new_tokens=9, eos_token_id=None)[0, known:].tolist()
        assert drafted == own[: len(drafted)]
        known += len(round_.emitted)
    assert known == out.shape[1]


def test_right_guesses_save_forwards(prompt, monkeypatch):
    """With prompts that guess right, a forward brings m + 1 tokens; and the target, which is the same model, takes them all."""
    plain = TARGET.generate(prompt, do_sample=False, max_new_tokens=60, eos_token_id=None)

    class Foreseeing(AheadDrafting):
        def _further(self):
            last = self.prefixes[0].ids.shape[1] + len(self.decoded[0])
            self.drafting.guesses = [10.0 * one_hot(plain[0, last + 1 : last + 4], VOCAB)]
            return super()._further()

    monkeypatch.setattr("hf_paradraft.drafters.ppd.prompted.AheadDrafting", Foreseeing)
    drafter = ahead(tiny_model("llama"), m=3, num_draft_tokens=9)
    calls = []
    drafter.model.register_forward_hook(lambda *_: calls.append(1))
    TARGET.generate(prompt, do_sample=False, max_new_tokens=36, eos_token_id=None, assistant_model=drafter)
    stats = drafter.last_stats
    assert min(stats.acceptance_by_position) == 1.0
    assert len(calls) <= 3 * stats.num_rounds  # one for the first token, two for the other eight
    assert stats.mean_emitted > 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_context_that_is_shorter_than_the_text(name):
    small = tiny_model(name, max_position_embeddings=32)
    ids = torch.arange(1, 29)[None]
    options = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": None}
    drafter = ahead(small, m=5, num_draft_tokens=7, tree_size=10)
    plain = TARGET.generate(ids, **options)
    for new in (2, 3, 4, 60):  # with room for fewer tokens than there are prompts, too
        options["max_new_tokens"] = new
        assert torch.equal(plain[:, : 28 + new], TARGET.generate(ids, **options, assistant_model=drafter))
    assert drafter.last_stats.num_drafted > 5 * drafter.last_stats.num_rounds  # it never stops drafting


def test_sampling_with_the_same_seed_gives_the_same_text(prompt):
    drafter = ahead(near_copy(TARGET, 0.05), tree_size=12)
    options = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 40, "eos_token_id": None}
    torch.manual_seed(5)
    plain = TARGET.generate(prompt, **options)
    torch.manual_seed(5)
    assert torch.equal(plain, TARGET.generate(prompt, **options, assistant_model=drafter))


def test_targets_share_a_drafter_by_turns(prompt):
    """Nothing of one call is left for the next."""
    drafter = ahead(tiny_model("qwen3"), tree_size=8)
    other = tiny_model("llama", seed=7)
    for target in (TARGET, other, TARGET):
        options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None}
        assert torch.equal(target.generate(prompt, **options), target.generate(prompt, **options, assistant_model=drafter))


def test_it_stops_where_the_target_is_cheap():
    pace = Pace(12, chain=True)
    assert pace.goes_on(gain=0.1, cost=1.0, promised=2.0, spent=1.0)  # nothing is known yet
    pace.verify.append(10.0)
    pace.other.append(1.0)
    assert pace.goes_on(gain=0.5, cost=1.0, promised=4.0, spent=2.0)
    assert not pace.goes_on(gain=0.2, cost=1.0, promised=4.0, spent=2.0)
    assert Pace(12, chain=True, adaptive=False).goes_on(gain=0.0, cost=1.0, promised=4.0, spent=2.0)


def test_a_model_that_takes_no_masks_cannot_decode_ahead(prompt):
    small = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=32, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(ValueError, match="drafts 3 tokens at most"):
        TARGET.generate(prompt, max_new_tokens=4, assistant_model=ahead(small))


def test_by_default_models_decode_ahead_where_they_can(prompt):
    bloom = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=32, hidden_size=32, n_layer=1, n_head=4))
    options = {"do_sample": False, "max_new_tokens": 12}
    plain = TARGET.generate(prompt, **options)
    for small, length in ((bloom, 3), (tiny_model("qwen3"), 12)):
        model = with_prompts(small)
        assert pd.PromptedDrafter(model).speculation_config.num_draft_tokens == length
        assert torch.equal(plain, TARGET.generate(prompt, **options, assistant_model=model))
