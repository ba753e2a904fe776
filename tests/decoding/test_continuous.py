"""Prompts that take the places of those that have ended: each text is what `generate` writes to it
alone.
"""

import pytest
import torch
from tiny import near_copy, tiny_model
from transformers import (
    AutoModelForCausalLM,
    Lfm2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    StoppingCriteria,
)

from hf_paradraft.continuous import can_join, continuous_batching


def prompts_of(count):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [torch.randint(1, 30, (length,), generator=generator).tolist() for length in lengths]


def alone(target, prompts, count, **options):
    texts = []
    for prompt in prompts:
        ids = target.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=count, pad_token_id=0, **options
        )
        texts.append(ids[0, len(prompt) :].tolist())
    return texts


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("num_slots", [None, 60])
@pytest.mark.parametrize("drafted", [False, True])
def test_every_prompt_has_the_text_that_it_has_alone(batch_size, num_slots, drafted):
    target, prompts = tiny_model(dtype=torch.float64), prompts_of(11)
    ends = alone(target, prompts, 20, eos_token_id=None)[0][7]
    options = {"eos_token_id": ends, "drafter": near_copy(target) if drafted else None}
    expected = alone(target, prompts, 20, eos_token_id=ends)
    assert len({len(text) for text in expected}) > 1
    made = dict(continuous_batching(target, prompts, 20, batch_size, num_slots, **options))
    assert [made[number] for number in range(len(prompts))] == expected


def test_places_that_become_free_are_taken():
    """A batch of four with one long answer: twelve short ones pass beside it, where `generate`
    would wait for it.
    """
    target, prompts = tiny_model(dtype=torch.float64), prompts_of(40)
    texts = alone(target, prompts, 24, eos_token_id=None)
    ends = max(range(32), key=lambda token: sum(token in text for text in texts))
    by_length = sorted(range(40), key=lambda number: (texts[number] + [ends]).index(ends))
    chosen = [by_length[-1], *by_length[:12]]  # one goes on for long
    forwards = []
    target.register_forward_hook(lambda *_: forwards.append(1))
    list(
        continuous_batching(
            target, [prompts[number] for number in chosen], 24, 4, eos_token_id=ends
        )
    )
    lengths = [min(24, 1 + (texts[number] + [ends]).index(ends)) for number in chosen]
    together = sum(max(lengths[begin : begin + 4]) for begin in range(0, 13, 4))
    assert max(lengths) > 2 * sorted(lengths)[-2]
    assert len(forwards) < together


def test_padding_is_what_processors_see_in_a_batch_of_generate():
    """A penalty falls on the padding token, and on no other that has not been written."""
    target, prompts = tiny_model(dtype=torch.float64), [[3, 5, 7, 9], [11]]
    target.generation_config.repetition_penalty = 1.7
    ids = torch.tensor([[3, 5, 7, 9], [31, 31, 31, 11]])
    mask = (ids != 31).long()
    options = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 31, "eos_token_id": None}
    expected = target.generate(ids, attention_mask=mask, **options)[:, 4:].tolist()
    made = dict(continuous_batching(target, prompts, 16, 2, pad_token_id=31, eos_token_id=None))
    assert [made[0], made[1]] == expected


class LastToken(StoppingCriteria):
    """A caller's own, which is asked about all sequences of a call at once."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 7 == 3


def test_criteria_judge_a_text_before_it_is_handed_over():
    """A text that was as long as allowed was handed over while others of its call lagged."""
    target, prompts = tiny_model(dtype=torch.float64), prompts_of(11)
    options = {"eos_token_id": 31, "stopping_criteria": [LastToken()]}
    expected = alone(target, prompts, 8, **options)
    drafter = near_copy(target)
    made = dict(continuous_batching(target, prompts, 8, 8, drafter=drafter, **options))
    assert [made[number] for number in range(len(prompts))] == expected


def test_a_static_cache_is_not_joined():
    target, drafter = tiny_model(), near_copy(tiny_model())
    assert can_join(target, drafter)
    drafter.speculation_config.compile = True
    assert not can_join(target, drafter)
    target.generation_config.cache_implementation = "static"
    assert not can_join(target)


def test_targets_that_take_no_masks_are_not_joined():
    config = Lfm2Config(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
                        intermediate_size=32, layer_types=["conv", "full_attention"])  # fmt: skip
    assert not can_join(AutoModelForCausalLM.from_config(config))
    assert can_join(tiny_model())


def test_targets_of_several_positions_a_token_are_not_joined():
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": rope,
    }
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    config = Qwen2VLConfig(text_config=text, vision_config=vision)
    assert not can_join(Qwen2VLForConditionalGeneration(config))
