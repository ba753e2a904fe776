"""A caller's cache is left as plain decoding leaves it: for the next turn, and after an error."""

import pytest
import torch
from lossless import left_padded
from tiny import CACHE, generate, near_copy, tiny_model
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Lfm2Config,
    LogitsProcessor,
    MistralConfig,
    StaticCache,
    StoppingCriteria,
)

import hf_paradraft
from hf_paradraft.names import OUTPUT_CACHE as CACHE_FIELD

PROMPTS = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]


@pytest.mark.parametrize("size", [None, 9])
def test_the_second_turn_of_a_batch_continues_the_first(size):
    """A text that ends early leaves its end token, and what plain decoding reads behind it, in the
    cache.
    """
    target = tiny_model()
    drafter = near_copy(target, 0.05)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, size, never_slower=False)
    inputs = left_padded(PROMPTS)
    ends = target.generate(**inputs, do_sample=False, max_new_tokens=20, eos_token_id=None)[
        1, 8
    ].item()
    turns = []
    for assistant in (None, drafter):
        cache = DynamicCache(config=target.config)
        options = {"do_sample": False, "eos_token_id": ends, CACHE: cache}
        first = target.generate(**inputs, max_new_tokens=20, assistant_model=assistant, **options)
        more = torch.cat([first, torch.tensor([[4, 5], [6, 7], [8, 9]])], dim=1)
        mask = torch.cat(
            [inputs["attention_mask"], torch.ones(3, more.shape[1] - 4, dtype=torch.long)], dim=1
        )
        assert cache.get_seq_length() == first.shape[1] - 1
        turns.append(
            target.generate(more, attention_mask=mask, max_new_tokens=12, pad_token_id=0, **options)
        )
    assert torch.equal(*turns)


def test_the_second_turn_of_a_recurrent_target_continues_the_first():
    """Its cache holds what was accepted in the last round too."""
    torch.manual_seed(0)
    layers = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32,
    }
    config = Lfm2Config(
        **sizes,
        **layers,
        initializer_range=0.3,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=None,
    )
    target = AutoModelForCausalLM.from_config(config).double().eval()
    drafter = hf_paradraft.NgramDrafter(
        speculation_config=hf_paradraft.SpeculationConfig(6, None, never_slower=False)
    )
    ids = torch.tensor([[3, 4, 5, 3, 4, 5, 3]])
    for new in range(8, 20):
        turns = []
        for assistant in (None, drafter):
            cache = DynamicCache(config=config)
            options = {"do_sample": False, CACHE: cache}
            first = target.generate(ids, max_new_tokens=new, assistant_model=assistant, **options)
            more = torch.cat([first, torch.tensor([[4, 5]])], dim=1)
            with torch.no_grad():
                turns.append(target(more[:, first.shape[1] - 1 :], **{CACHE: cache}).logits[:, -1])
        torch.testing.assert_close(*turns, rtol=1e-6, atol=1e-6)


class Raises(LogitsProcessor):
    def __init__(self, after):
        self.left = after

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("mine")
        return scores


class RaisesToo(StoppingCriteria):
    def __init__(self, after):
        self.left = after

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("mine")
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("size", [None, 9])
@pytest.mark.parametrize("where", ["processor", "criterion"])
def test_a_call_that_raises_leaves_what_was_accepted_in_the_cache(target, where, size, prompt):
    drafter = near_copy(target, 0.02)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, size, never_slower=False)
    for after in range(3, 12):
        lengths = []
        for assistant in (None, drafter):
            cache = DynamicCache(config=target.config)
            given = (
                {"logits_processor": [Raises(after)]}
                if where == "processor"
                else {"stopping_criteria": [RaisesToo(after)]}
            )
            with pytest.raises(RuntimeError, match="mine"):
                generate(target, assistant, prompt, **{CACHE: cache}, eos_token_id=None, **given)
            lengths.append(cache.get_seq_length())
        assert lengths[0] == lengths[1]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_batch_that_raises_leaves_an_even_cache(target, prompt, overlap):
    """Rows go at their own pace, and the one behind had stale entries."""
    drafter = near_copy(target, 0.05)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        4, 9, never_slower=False, overlap=overlap
    )
    prompts = torch.cat([prompt, prompt.flip(1)])
    options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
    text = target.generate(prompts, **options)
    for after in range(1, 12):
        caches = []
        for assistant in (None, drafter):
            caches.append(DynamicCache(config=target.config))
            given = {
                CACHE: caches[-1],
                "stopping_criteria": [RaisesToo(after)],
                "assistant_model": assistant,
            }
            with pytest.raises(RuntimeError, match="mine"):
                target.generate(prompts, **options, **given)
        plain, drafted = caches
        assert plain.get_seq_length() == drafted.get_seq_length() == prompts.shape[1] + after
        with torch.no_grad():
            target(
                text[:, : plain.get_seq_length()],
                **{CACHE: (read := DynamicCache(config=target.config))},
            )
        for ours, theirs in zip(drafted.layers, read.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys)
            torch.testing.assert_close(ours.values, theirs.values)


@pytest.mark.parametrize("own", [False, True])
def test_a_static_cache_is_left_whole_after_a_text_that_ended_early(target, own):
    """Plain decoding reads padding there, for which drafts leave little room."""
    ids = torch.randint(1, 29, (2, 6), generator=torch.Generator().manual_seed(0))
    options = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "pad_token_id": 0,
        "max_new_tokens": 60,
    }
    end = int(target.generate(ids, eos_token_id=None, **options)[0, 12])
    drafter = near_copy(target, 0.05)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, None, never_slower=False)
    made = []
    for assistant in (None, drafter):
        cache = StaticCache(config=target.config, max_cache_len=80)
        given = {CACHE: cache} if own else {"cache_implementation": "static"}
        made.append(
            target.generate(
                ids,
                eos_token_id=end,
                return_dict_in_generate=True,
                assistant_model=assistant,
                **given,
                **options,
            )
        )
    plain, drafted = made
    assert torch.equal(plain.sequences, drafted.sequences)
    assert int((plain.sequences[0] == 0).sum()) > 40
    length = plain[CACHE_FIELD].get_seq_length()
    assert drafted[CACHE_FIELD].get_seq_length() == length
    for ours, theirs in zip(drafted[CACHE_FIELD].layers, plain[CACHE_FIELD].layers, strict=True):
        torch.testing.assert_close(ours.keys[:, :, :length], theirs.keys[:, :, :length])


def test_a_callers_sliding_cache_goes_on_sliding():
    """It keeps no more tokens than plain decoding leaves in it."""
    config = tiny_model("mistral-sliding").config
    assert isinstance(config, MistralConfig)
    target = tiny_model("mistral-sliding")
    drafter = near_copy(target, 0.02)
    slots = []
    for assistant in (None, drafter):
        cache = DynamicCache(config=config)
        with torch.no_grad():
            target(torch.arange(1, 6)[None], **{CACHE: cache})
        generate(
            target,
            assistant,
            torch.arange(1, 9)[None],
            **{CACHE: cache},
            max_new_tokens=40,
            eos_token_id=None,
        )
        with torch.no_grad():
            target(torch.tensor([[3]]), **{CACHE: cache})
        slots.append(max(layer.keys.shape[-2] for layer in cache.layers))
    assert slots[0] == slots[1]


class StopsSecond(StoppingCriteria):
    """Stops the second text at nine tokens, which drafts may have passed."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([False, input_ids.shape[1] >= 9])


def test_tokens_that_a_criterion_takes_back_leave_the_cache():
    target = tiny_model()
    drafter = near_copy(target)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(6, None, never_slower=False)
    for seed in range(12):
        ids = torch.randint(0, 30, (2, 5), generator=torch.Generator().manual_seed(seed))
        options = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": 14,
            "eos_token_id": 30,
            "pad_token_id": 0,
            "do_sample": False,
            "return_dict_in_generate": True,
        }
        plain, drafted = (
            target.generate(ids, stopping_criteria=[StopsSecond()], **options, **given)
            for given in ({}, {"assistant_model": drafter})
        )
        assert torch.equal(plain.sequences, drafted.sequences)
        for layer, other in zip(
            plain[CACHE_FIELD].layers, drafted[CACHE_FIELD].layers, strict=True
        ):
            assert torch.allclose(layer.keys, other.keys)
