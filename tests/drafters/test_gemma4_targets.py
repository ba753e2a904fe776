"""Gemma 4 targets: heads that differ by layer, layers that share keys and values, inputs of each
layer's own.
"""

import pytest
import torch
from lossless import assert_lossless
from published import check_guesses, guesses_of_a_call
from tiny import tiny_model

from hf_paradraft import Eagle3Drafter, MtpDrafter, ParallelSpecDrafter, SpeculationConfig

PROMPTS = torch.tensor([[0, 0, 0, 5, 9], [1, 2, 3, 4, 5], [0, 9, 8, 7, 6]])
KINDS = {
    "eagle3": lambda target: Eagle3Drafter.from_target(target, 3),
    "mtp": lambda target: MtpDrafter.from_target(target, True),
    "parallelspec": lambda target: ParallelSpecDrafter.from_target(target, "eagle", 3),
}


@pytest.mark.parametrize("size", [None, 7])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [0, 2])
def test_drafters_that_read_states_are_made_for_them(shared, kind, size):
    layers = {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4}
    target = tiny_model("gemma4", num_kv_shared_layers=shared, **layers)
    drafter = KINDS[kind](target).to(torch.float64)
    drafter.speculation_config = SpeculationConfig(3, size, never_slower=False)
    seen = {"attention_mask": (PROMPTS != 0).long()}
    options = {
        "do_sample": False,
        "max_new_tokens": 16,
        "pad_token_id": 0,
        "eos_token_id": None,
        **seen,
    }
    assert_lossless(target, drafter, PROMPTS, **options)
    assert check_guesses(drafter, target, guesses_of_a_call(drafter, target, PROMPTS, **seen)) > 10
