"""The hook acts on our drafters only, installs once, and steps aside for a transformers it does not know."""

import inspect
import pickle

import pytest
import torch
from peft import get_peft_model
from tiny import make_tokenizer, near_copy, tiny_model
from transformers import GenerationMixin

import hf_paradraft as pd
from hf_paradraft.integration import hook
from hf_paradraft.names import WRAPPED


def test_installing_again_changes_nothing():
    before = GenerationMixin._assisted_decoding
    assert hook.install()
    assert GenerationMixin._assisted_decoding is before


def test_signatures_are_kept():
    """`generate` inspects them to decide what to pass."""
    for name, parameters in WRAPPED.items():
        assert set(inspect.signature(getattr(GenerationMixin, name)).parameters) == parameters


def test_an_unknown_transformers_is_left_alone(monkeypatch):
    def another(self, input_ids, something_new):
        pass

    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", another)
    for name in ("_validate_generation_mode", "_prepare_generation_config"):
        monkeypatch.setattr(GenerationMixin, name, getattr(GenerationMixin, name).__wrapped__)
    with pytest.warns(UserWarning, match="no GenerationMixin._assisted_decoding with the arguments"):
        assert not hook.install()
    assert GenerationMixin._assisted_decoding is another


def test_wrong_pairs_are_refused_however_the_drafter_is_passed(tmp_path, prompt):
    """A drafter with other tokens, an adapter of another base and an ordinary model are found out before work starts."""
    for name, words in (("target", "a b c"), ("drafter", "c b a")):
        tiny_model().save_pretrained(tmp_path / name)
        make_tokenizer(words).save_pretrained(tmp_path / name)
    target = type(tiny_model()).from_pretrained(tmp_path / "target")
    drafter = pd.PardDrafter.from_causal_lm(tmp_path / "drafter", mask_token_id=31)
    adapter = pd.PpdDrafter.from_model(get_peft_model(tiny_model(hidden_size=16), pd.PpdConfig(num_prompt_tokens=2)))
    for wrong, message in ((drafter, "shared ids mean other tokens"), (adapter, "embedding of 32 × 16")):
        for door in ({"assistant_model": wrong}, {"custom_generate": pd.speculative_decoding, "drafter": wrong}):
            with pytest.raises(ValueError, match=message):
                target.generate(prompt, max_new_tokens=5, do_sample=False, **door)
    assert pickle.loads(pickle.dumps(pd.speculative_decoding)) is pd.speculative_decoding
    with pytest.raises(ValueError, match="LlamaForCausalLM is no drafter"):
        target.generate(prompt, max_new_tokens=5, custom_generate=pd.speculative_decoding, drafter=tiny_model())


def test_a_model_with_prompts_drafts_through_both_doors(prompt):
    target = tiny_model()
    small = get_peft_model(near_copy(target), pd.PpdConfig(num_prompt_tokens=2))
    plain = target.generate(prompt, do_sample=False, max_new_tokens=20)
    for door in ({"assistant_model": small}, {"custom_generate": pd.speculative_decoding, "drafter": small}):
        assert torch.equal(plain, target.generate(prompt, do_sample=False, max_new_tokens=20, **door))


def test_prompt_drafters_refuse_transformers_own_loop(monkeypatch, prompt):
    for name in WRAPPED:
        monkeypatch.setattr(GenerationMixin, name, getattr(GenerationMixin, name).__wrapped__)
    target = tiny_model()
    adapter = pd.PpdDrafter.from_model(get_peft_model(tiny_model(), pd.PpdConfig(num_prompt_tokens=2)))
    prompted = pd.PromptedDrafter(get_peft_model(tiny_model(), pd.PpdConfig(num_prompt_tokens=2)))
    for drafter, message in ((adapter, "ride along in the target's own forward"), (prompted, "hf_paradraft's loop alone")):
        with pytest.raises(ValueError, match=message):
            target.generate(prompt, max_new_tokens=5, do_sample=False, assistant_model=drafter)
