"""Trees change nothing but the number of rounds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless import assert_lossless
from tiny import ARCHITECTURES, CACHE, EOS, Oracle, near_copy, tiny_model
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DynamicCache,
    Gemma3TextConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    OPTConfig,
)

from hf_paradraft.decoding.begin import make_verifier
from hf_paradraft.decoding.features import Features
from hf_paradraft.decoding.sequence import Sequence
from hf_paradraft.protocol import Draft

PAIRS = {name: (model := tiny_model(name), near_copy(model, 0.05)) for name in ARCHITECTURES}


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(list(ARCHITECTURES)),
    st.lists(st.integers(0, EOS - 1), min_size=1, max_size=16),
    st.integers(0, 3),
    st.integers(1, 30),
    st.integers(1, 8),
    st.integers(1, 24),
    st.sampled_from([{}, {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}]),
)
def test_greedy_output_is_plain_generates(architecture, ids, padding, new, depth, size, options):
    target, drafter = PAIRS[architecture]
    drafter.speculation_config.num_draft_tokens, drafter.speculation_config.tree_size = depth, size
    mask = torch.tensor([[0] * padding + [1] * len(ids)])
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": new, **options}
    ids = torch.tensor([[0] * padding + ids])
    assert_lossless(target, drafter, ids, **options)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_tree_is_verified_as_its_paths_are(attention):
    target = tiny_model(attn_implementation=attention)
    prefix = torch.tensor([[1, 2, 3, 4]])
    draft = Draft(torch.tensor([5, 6, 7, 8, 9]), [-1, 0, 0, -1, 3])
    paths = [[], [5], [5, 6], [5, 7], [8], [8, 9]]
    with torch.no_grad():
        cache = DynamicCache(config=target.config)
        options = {CACHE: cache, "use_cache": True}
        args = target, prefix[:, :3], 12, near_copy(target), options, Features(target, ())
        verifier = make_verifier(*args, held=0)
        verifier.verify([Sequence(prefix, None, 3, draft=Draft.chain(prefix[0, :0]))])
        verifier.keep([[]])
        rows = verifier.verify([Sequence(prefix, None, 4, draft=draft)])
        for row, path in zip(rows[0], paths, strict=True):
            alone = target(torch.tensor([[1, 2, 3, 4, *path]])).logits[0, -1]
            torch.testing.assert_close(row, alone, rtol=1e-4, atol=1e-4)
        verifier.keep([[3, 4]])
        assert cache.get_seq_length() == 6
        fresh = DynamicCache(config=target.config)
        target(torch.tensor([[1, 2, 3, 4, 8, 9]]), **{CACHE: fresh})
    for layer, expected in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(layer.keys, expected.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.values, expected.values, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_trees_accept_more_than_chains():
    """And at least as much at every prompt would be too much to ask: a tree is chosen by the
    drafter's own belief.
    """
    target, drafter = tiny_model(), near_copy(tiny_model(), 0.05)
    emitted = {}
    for size in (None, 24):
        drafter.speculation_config.num_draft_tokens, drafter.speculation_config.tree_size = 4, size
        rounds = tokens = 0
        for seed in range(12):
            ids = torch.randint(0, EOS, (1, 5), generator=torch.Generator().manual_seed(seed))
            target.generate(ids, assistant_model=drafter, max_new_tokens=30, do_sample=False)
            rounds += drafter.last_stats.num_rounds
            tokens += drafter.last_stats.num_emitted
        emitted[size] = tokens / rounds
    assert emitted[24] > 1.1 * emitted[None]


def test_same_seed_same_sample(prompt):
    target, drafter = PAIRS["llama"]
    drafter.speculation_config.num_draft_tokens, drafter.speculation_config.tree_size = 4, 16
    for seed in range(8):
        assert_lossless(
            target, drafter, prompt, seed=seed, do_sample=True, top_k=8, max_new_tokens=30
        )


def logits_with_a_tree(target, drafter, ids, **options):
    """Not only tokens: tiny models agree on those by luck."""
    drafter.speculation_config.num_draft_tokens, drafter.speculation_config.tree_size = 5, 16
    both = []
    for assistant in ({}, {"assistant_model": drafter}):
        output = target.generate(
            ids,
            do_sample=False,
            max_new_tokens=16,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
            **assistant,
        )
        both.append(torch.cat(output.logits))
    torch.testing.assert_close(*both, rtol=1e-3, atol=1e-3)


MORE = {
    "opt": OPTConfig(
        vocab_size=32, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=32
    ),
    "gpt_neo": GPTNeoConfig(
        vocab_size=32, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global",
        "local"], 1]], window_size=6
    ),
    "gpt_neox": GPTNeoXConfig(vocab_size=32, hidden_size=32, intermediate_size=48,
    num_hidden_layers=2, num_attention_heads=4),
    "bloom": BloomConfig(vocab_size=32, hidden_size=32, n_layer=2, n_head=4),
    "gemma3": Gemma3TextConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_targets_that_count_positions_themselves_get_chains(name):
    torch.manual_seed(0)
    config = MORE[name]
    config.initializer_range, config.bos_token_id, config.eos_token_id = 0.3, None, None
    config.pad_token_id = None
    target = AutoModelForCausalLM.from_config(config).eval()
    for first in range(3):
        ids = torch.tensor([[first, 2, 3, 4, 5, 6, 7, 8]])
        oracle = Oracle(target.generate(ids, do_sample=False, max_new_tokens=16))
        logits_with_a_tree(target, oracle, ids)
        assert oracle.last_stats.mean_emitted > 2


def test_the_callers_mask_and_positions():
    target, drafter = PAIRS["llama"]
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    logits_with_a_tree(
        target, drafter, ids, attention_mask=torch.tensor([[1, 1, 0, 0, 1, 1, 1, 1]])
    )
    logits_with_a_tree(target, drafter, ids, position_ids=torch.arange(8)[None] * 3)


def test_a_sliding_window_in_a_plain_dynamic_cache():
    target, drafter = PAIRS["mistral-sliding"]
    ids = torch.arange(14)[None]
    drafter.speculation_config.num_draft_tokens, drafter.speculation_config.tree_size = 5, 16
    plain = target.generate(ids, do_sample=False, max_new_tokens=20, **{CACHE: DynamicCache()})
    drafted = target.generate(
        ids, do_sample=False, max_new_tokens=20, **{CACHE: DynamicCache()}, assistant_model=drafter
    )
    assert torch.equal(plain, drafted)
