"""A drafter that is set leaves no trace: where it stands back, and in what its calls return."""

import pytest
import torch
from test_setting import drafted, text
from tiny import near_copy, tiny_model

from hf_paradraft import set_drafter


def pair():
    target = tiny_model()
    return target, near_copy(target, 0.01)


@pytest.mark.parametrize(
    ("acceptance", "sampled"), [("typical", False), ("rejection", False), ("greedy", True)]
)
def test_an_acceptance_that_does_not_fit_a_call_breaks_none(acceptance, sampled):
    target, drafter = pair()
    plain = text(target, do_sample=sampled)
    drafter.speculation_config.acceptance = acceptance
    with set_drafter(target, drafter):
        assert torch.equal(text(target, do_sample=sampled), plain)
    with pytest.raises(ValueError, match="does not fit"):
        text(target, do_sample=sampled, assistant_model=drafter)


def test_what_is_returned_has_no_field_more():
    target, drafter = pair()
    options = {"return_dict_in_generate": True, "output_scores": True}
    plain = text(target, **options)
    with set_drafter(target, drafter):
        got, took_part = drafted(drafter, lambda: text(target, **options))
    assert took_part
    assert list(got.keys()) == list(plain.keys())
    assert text(target, assistant_model=drafter, **options).speculation is drafter.last_stats


def test_a_call_that_is_not_drafted_has_the_cache_of_a_plain_one():
    """A window's layers had been replaced by then, and kept every token."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    target = tiny_model("mistral-sliding", max_position_embeddings=16, rope_parameters=rope)
    plain = text(target, return_dict_in_generate=True)
    with set_drafter(target, near_copy(tiny_model())):
        got = text(target, return_dict_in_generate=True)
    assert torch.equal(got.sequences, plain.sequences)
    assert [type(layer) for layer in got.past_key_values.layers] == [
        type(layer) for layer in plain.past_key_values.layers
    ]
