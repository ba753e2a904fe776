"""A model with prompt tokens as the drafter of another one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless import assert_lossless
from peft import get_peft_model
from test_ppd_drafting import NAMES, TARGETS
from tiny import EOS, tiny_model

import hf_paradraft
from hf_paradraft.drafters.ppd import PpdConfig


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.lists(st.lists(st.integers(1, EOS - 1), min_size=4, max_size=4), min_size=1, max_size=3),
    st.integers(1, 4),
    st.sampled_from([None, 6]),
)
def test_a_prompted_model_drafts_for_another(name, prompts, m, tree_size):
    torch.manual_seed(1)
    small = get_peft_model(tiny_model(name), PpdConfig(num_prompt_tokens=m))
    drafter = hf_paradraft.PromptedDrafter(
        small, hf_paradraft.SpeculationConfig(m + 1, tree_size=tree_size, never_slower=False)
    )
    ids = torch.tensor(prompts)
    target = TARGETS["llama"]
    options = {
        "do_sample": False,
        "max_new_tokens": 20,
        "attention_mask": torch.ones_like(ids),
        "pad_token_id": 0,
    }
    assert_lossless(target, drafter, ids, **options)
    assert_lossless(target, small, ids, **options)


def test_prompts_guess_behind_the_models_own_guess(prompt):
    """A drafter that is the target itself is right at distance 1, always."""
    base = tiny_model()
    drafter = hf_paradraft.PromptedDrafter(
        get_peft_model(tiny_model(), PpdConfig()),
        hf_paradraft.SpeculationConfig(4, never_slower=False),
    )
    base.generate(
        prompt, do_sample=False, max_new_tokens=20, eos_token_id=None, assistant_model=drafter
    )
    assert drafter.last_stats.acceptance_by_position[0] == 1.0


def test_prompted_models_that_cannot_draft():
    with pytest.raises(ValueError, match="one embedding per prompt"):
        hf_paradraft.PromptedDrafter(get_peft_model(tiny_model(), PpdConfig(num_ensembles=2)))


def turn_off(model):
    model.base_model.disable_adapter_layers()


def deactivate(model):
    model.get_base_model().get_input_embeddings().set_adapter([])


@pytest.mark.parametrize("change", [turn_off, deactivate])
@pytest.mark.parametrize(
    "make",
    [
        hf_paradraft.PromptedDrafter,
        hf_paradraft.PpdDrafter.from_model,
        lambda model: TARGETS["llama"].generate(torch.ones(1, 4).long(), assistant_model=model),
        lambda model: model.get_base_model().generate(
            torch.ones(1, 4).long(), assistant_model=model
        ),
    ],
)
def test_an_adapter_that_is_not_active_makes_no_drafter(change, make):
    change(model := get_peft_model(tiny_model(), PpdConfig()))
    with pytest.raises(ValueError, match="adapter is disabled: enable it first"):
        make(model)


@pytest.mark.parametrize("num_draft_tokens", [2, 6])
def test_an_adapter_changed_under_its_drafter_is_refused(prompt, num_draft_tokens):
    model = get_peft_model(tiny_model(), PpdConfig(num_prompt_tokens=3))
    model.add_adapter("other", PpdConfig(num_prompt_tokens=1))
    drafter = hf_paradraft.PromptedDrafter(model, hf_paradraft.SpeculationConfig(num_draft_tokens))
    model.set_adapter("other")
    with pytest.raises(ValueError, match="make it anew"):
        TARGETS["llama"].generate(prompt, max_new_tokens=4, assistant_model=drafter)
    with model.disable_adapter(), pytest.raises(ValueError, match="make it anew"):
        TARGETS["llama"].generate(prompt, max_new_tokens=4, assistant_model=drafter)
