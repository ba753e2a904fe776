"""With a drafter, the tokens of plain `generate`: greedy, with processors, over architectures,
prompts and lengths.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless import assert_lossless
from tiny import ARCHITECTURES, CACHE, EOS, MASK, generate, near_copy, tiny_model
from transformers import DynamicCache

import hf_paradraft

PAIRS = {name: (model := tiny_model(name), near_copy(model)) for name in ARCHITECTURES}
OPTIONS = {
    "nothing": {},
    "repetition penalty": {"repetition_penalty": 1.7},
    "no repeated bigrams": {"no_repeat_ngram_size": 2},
    "minimum length": {"min_new_tokens": 12},
    "bad words": {"bad_words_ids": [[3], [7, 8]]},
    "suppressed": {"suppress_tokens": [1, 2, 3, 4]},
    "forced end": {"forced_eos_token_id": EOS},
    "exponential decay": {"exponential_decay_length_penalty": (3, 1.5)},
}


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(list(ARCHITECTURES)),
    st.sampled_from(list(OPTIONS)),
    st.lists(st.integers(0, EOS - 1), min_size=1, max_size=20),
    st.integers(1, 40),
    st.integers(0, 16),
)
def test_greedy_output_is_plain_generates(
    architecture, options, ids, max_new_tokens, num_draft_tokens
):
    target, drafter = PAIRS[architecture]
    drafter.speculation_config.num_draft_tokens = num_draft_tokens
    drafted = assert_lossless(
        target, drafter, torch.tensor([ids]), max_new_tokens=max_new_tokens, **OPTIONS[options]
    )
    assert sum(drafter.last_stats.emitted_per_round) == drafted.shape[1] - len(ids)


def test_drafts_are_accepted_and_rejected(target, drafter, prompt):
    """The tests above would pass with a loop that never accepts; this one would not."""
    torch.manual_seed(0)
    accepted = rejected = 0
    for _ in range(20):
        target.generate(
            torch.randint(0, EOS, (1, 6)),
            assistant_model=drafter,
            max_new_tokens=30,
            do_sample=False,
        )
        accepted += sum(drafter.last_stats.successes)
        rejected += sum(drafter.last_stats.attempts) - sum(drafter.last_stats.successes)
    assert accepted > 20
    assert rejected > 20


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_sample_match_draws_as_plain_sampling_does(target, drafter, prompt, temperature):
    options = {
        "do_sample": True,
        "temperature": temperature,
        "top_k": 10,
        "top_p": 0.9,
        "max_new_tokens": 40,
    }
    for seed in range(10):
        assert_lossless(target, drafter, prompt, seed=seed, **options)


def test_left_padding(target, drafter):
    ids, mask = torch.tensor([[0, 0, 0, 4, 5, 6]]), torch.tensor([[0, 0, 0, 1, 1, 1]])
    assert_lossless(target, drafter, ids, attention_mask=mask, max_new_tokens=30)


def test_prompt_longer_than_the_drafters_context(target):
    short = hf_paradraft.PardDrafter.from_causal_lm(
        tiny_model("gpt2", max_position_embeddings=24), mask_token_id=MASK
    )
    ids = torch.randint(0, EOS, (1, 60), generator=torch.Generator().manual_seed(0))
    assert_lossless(target, short, ids, max_new_tokens=60)


def test_continues_a_cache(target, drafter):
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    outputs = []
    for options in ({}, {"assistant_model": drafter}):
        cache = DynamicCache(config=target.config)
        with torch.no_grad():
            target(ids[:, :5], **{CACHE: cache})
        outputs.append(
            target.generate(ids, **{CACHE: cache}, max_new_tokens=20, do_sample=False, **options)
        )
        assert cache.get_seq_length() == outputs[-1].shape[1] - 1
    assert torch.equal(*outputs)


def test_input_embeddings_beside_ids(target, drafter, prompt):
    options = {"inputs_embeds": target.get_input_embeddings()(prompt), "max_new_tokens": 20}
    assert_lossless(target, drafter, prompt, **options)


def test_custom_generate_gives_plain_output(target, drafter, prompt):
    plain = target.generate(prompt, max_new_tokens=20, do_sample=False)
    door = {"custom_generate": hf_paradraft.speculative_decoding, "drafter": drafter}
    assert torch.equal(plain, target.generate(prompt, max_new_tokens=20, do_sample=False, **door))


def test_drafter_in_another_dtype(target, prompt):
    drafter = near_copy(target).to(torch.bfloat16)
    assert_lossless(target, drafter, prompt, max_new_tokens=30)


@pytest.mark.parametrize("sizes", [(32, 40), (40, 32)])
def test_padded_vocabularies(sizes, prompt):
    target, other = tiny_model(vocab_size=sizes[0]), tiny_model(vocab_size=sizes[1])
    drafter = hf_paradraft.PardDrafter.from_causal_lm(other, mask_token_id=MASK)
    assert_lossless(target, drafter, prompt, max_new_tokens=30)
    drafter.speculation_config.acceptance = "rejection"
    target.generate(prompt, max_new_tokens=30, do_sample=True, assistant_model=drafter)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("rows", [1, 2])
def test_scores_have_their_processors_dtype(dtype, rows, target, drafter, prompt):
    options = {
        "max_new_tokens": 9,
        "do_sample": False,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    options |= {"logits_processor": [lambda ids, scores: scores.to(dtype)], "pad_token_id": 0}
    prompts = prompt.repeat(rows, 1)
    plain = target.generate(prompts, **options)
    drafted = target.generate(prompts, assistant_model=drafter, **options)
    assert torch.equal(drafted.sequences, plain.sequences)
    assert {score.dtype for score in (*plain.scores, *drafted.scores)} == {dtype}


def test_scores_and_logits_are_plain_generates(target, drafter, prompt):
    options = {
        "max_new_tokens": 20,
        "repetition_penalty": 1.3,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    plain, drafted = (
        generate(target, assistant, prompt, **options) for assistant in (None, drafter)
    )
    assert torch.equal(plain.sequences, drafted.sequences)
    for name in ("scores", "logits"):
        ours, theirs = torch.cat(drafted[name]), torch.cat(plain[name])
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "bars",
    [lambda ids, scores: scores.fill_diagonal_(-1e9), lambda ids, scores: scores.div_(2) + 1],
)
@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float32), (2, torch.float64)])
def test_logits_that_processors_write_into(bars, rows, dtype, prompt):
    """Some scores of their own, some on the way to others; a row's diagonal depends on its place in
    the batch. Logits in float32 need no conversion, and are copied all the same.
    """
    target = tiny_model(dtype=dtype)
    drafter = near_copy(target)
    options = {
        "max_new_tokens": 9,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    options |= {"output_scores": True, "logits_processor": [bars], "pad_token_id": 0}
    prompts = torch.cat([prompt, prompt.flip(1)])[:rows]
    plain, drafted = (
        target.generate(prompts, assistant_model=assistant, **options)
        for assistant in (None, drafter)
    )
    assert torch.equal(plain.sequences, drafted.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(
            torch.stack(drafted[name]), torch.stack(plain[name]), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    "options", [{"max_length": int(1e30)}, {"max_length": 10**12}, {"max_new_tokens": 20.0}]
)
def test_a_limit_that_nobody_reaches(options, target, prompt):
    """Many tokenizers' `model_max_length` is 1e30."""
    options = {**options, "do_sample": False, "eos_token_id": [*range(3, 20)], "pad_token_id": 0}
    plain = target.generate(prompt, **options)
    assert torch.equal(
        plain, target.generate(prompt, **options, assistant_model=near_copy(target, 0.01))
    )


def test_ids_of_another_dtype(target, prompt):
    plain = target.generate(prompt.int(), do_sample=False, max_new_tokens=8)
    drafted = target.generate(
        prompt.int(), do_sample=False, max_new_tokens=8, assistant_model=near_copy(target, 0.01)
    )
    assert torch.equal(plain, drafted)
    assert plain.dtype == drafted.dtype
