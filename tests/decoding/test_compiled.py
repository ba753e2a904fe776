"""Compiled rounds: the same tokens, and nothing is compiled again once it is warm."""

import gc
import weakref

import pytest
import torch
from lossless import assert_lossless
from tiny import CACHE, EOS, near_copy, tiny_model

import hf_paradraft
from hf_paradraft.decoding import compiled


def compilations():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("tree_size", [None, pytest.param(12, marks=pytest.mark.nightly)])
def test_compiled_rounds_are_lossless(tree_size):
    torch._dynamo.reset()
    target = tiny_model(num_hidden_layers=1)
    drafter = near_copy(target, 0.05)
    options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None}

    def both(seed, **more):
        drafter.speculation_config = hf_paradraft.SpeculationConfig(
            4, tree_size, compile=True, never_slower=False
        )
        ids = torch.randint(1, EOS, (1, 4 + seed), generator=torch.Generator().manual_seed(seed))
        assert_lossless(target, drafter, ids, **{**options, **more})

    before = compilations()
    for seed in range(4):
        both(seed, max_new_tokens=12 + 5 * seed)
    warm = compilations()
    assert warm - before <= 3  # the target's forward with a draft and without, and the drafter's
    for seed in range(4, 10):
        both(seed, max_new_tokens=4 + 5 * seed)
    assert compilations() == warm


@pytest.mark.nightly
@torch._dynamo.config.patch(recompile_limit=3)
def test_compiled_forwards_keep_no_model_alive(monkeypatch):
    """More shapes than PyTorch keeps run uncompiled, with the same output; and a compiled model can
    be let go.
    """
    torch._dynamo.reset()
    compiled._compiled.cache_clear()
    monkeypatch.setattr(compiled, "SHAPES", 3)
    target = tiny_model(num_hidden_layers=1)
    drafter = near_copy(target, 0.05)
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
    ids = torch.tensor([[1, 2, 3, 4]])
    plain = target.generate(ids, **options)
    for size in range(1, 5):
        drafter.speculation_config = hf_paradraft.SpeculationConfig(
            size, compile=True, never_slower=False
        )
        assert_lossless(target, drafter, ids, plain=plain, **options)
    gone = weakref.ref(target)
    del target, drafter
    gc.collect()
    assert gone() is None
    compiled._compiled.cache_clear()


@pytest.mark.slow
def test_the_callers_own_cache_is_filled(prompt):
    from transformers import DynamicCache

    target = tiny_model(num_hidden_layers=1)
    drafter = near_copy(target, 0.05)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, compile=True, never_slower=False)
    cache = DynamicCache(config=target.config)
    options = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": None}
    out = target.generate(prompt, **options, **{CACHE: cache}, assistant_model=drafter)
    assert int(cache.get_seq_length()) == out.shape[1] - 1


@pytest.mark.slow
def test_inputs_that_cannot_be_compiled_run_uncompiled(prompt):
    gpt2 = tiny_model("gpt2")
    drafter = near_copy(gpt2, 0.05)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, compile=True, never_slower=False)
    options = {"do_sample": False, "max_new_tokens": 12, "token_type_ids": torch.zeros_like(prompt)}
    drafter.speculation_config.compile = True
    assert_lossless(gpt2, drafter, prompt, **options)
