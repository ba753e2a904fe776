"""A drafter and its targets: what it holds of each, for how long, and what of it is saved."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from lossless import assert_lossless
from peft import get_peft_model
from tiny import CACHE, generate, make_tokenizer, near_copy, tiny_model, with_prompts
from transformers import AutoModelForCausalLM, BambaConfig, pipeline

import hf_paradraft

OPTIONS = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None}


def test_one_drafter_for_two_targets_at_once():
    """Each call reads its own target's head and layers."""
    targets = [tiny_model(seed=seed, num_hidden_layers=layers) for seed, layers in ((0, 4), (1, 6))]
    drafter = hf_paradraft.ParallelSpecDrafter.from_target(targets[0], "eagle", 3)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, 6, never_slower=False)
    prompt = torch.tensor([[1, 2, 3, 4]])
    plain = [target.generate(prompt, **OPTIONS) for target in targets]
    alone = []
    for target in targets:
        target.generate(prompt, assistant_model=drafter, **OPTIONS)
        alone.append(drafter.last_stats.emitted_per_round)
    barrier, outs = threading.Barrier(2), [None, None]

    def call(index):
        for _ in range(8):
            barrier.wait(30)
            out = targets[index].generate(
                prompt, assistant_model=drafter, return_dict_in_generate=True, **OPTIONS
            )
            assert out.speculation.emitted_per_round == alone[index]
            outs[index] = out.sequences

    threads = [threading.Thread(target=call, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(*pair) for pair in zip(plain, outs, strict=True))


@pytest.mark.parametrize(
    "copied", [lambda drafter: pickle.loads(pickle.dumps(drafter)), copy.deepcopy]
)
def test_a_copy_does_not_carry_the_target(copied, prompt):
    target = tiny_model()
    drafter = hf_paradraft.PpdDrafter.from_model(with_prompts(tiny_model(), 2))
    before = len(pickle.dumps(drafter))
    generate(target, drafter, prompt)
    assert len(pickle.dumps(drafter)) < 1.5 * before
    again, gone = copied(drafter), weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None
    generate(tiny_model(), again, prompt)


def test_a_calls_cache_is_freed_when_it_ends(prompt):
    """No cycle keeps its cache until the collector runs."""
    target = tiny_model()
    drafter = near_copy(target, 0.02)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        4, None, never_slower=False, overlap=True
    )
    caches, make = [], target._prepare_cache_for_generation

    def made(*args, **kwargs):
        made = make(*args, **kwargs)
        caches.append(weakref.ref(args[1][CACHE]))
        return made

    target._prepare_cache_for_generation = made
    generate(target, drafter, prompt)
    gc.collect()
    gc.disable()
    try:
        generate(target, drafter, prompt)
        assert caches[-1]() is None
    finally:
        gc.enable()


def test_a_peft_model_is_one_drafter_in_all_calls(prompt):
    """What was learned of it stays, and its statistics are found again; another adapter is another
    drafter.
    """
    target = tiny_model()
    model = with_prompts(target, 2)
    drafter = hf_paradraft.PpdDrafter.adopt(target, model)
    target.generate(prompt, assistant_model=model, **OPTIONS)
    assert drafter.last_stats.num_rounds > 0
    assert hf_paradraft.PpdDrafter.adopt(target, model) is drafter
    assert hf_paradraft.PpdDrafter.adopt(tiny_model(), model) is not drafter


@pytest.mark.parametrize("kind", ["n-gram", "parallelspec"])
def test_pipelines_take_drafters_with_each_call(kind):
    """Where a pipeline is made, transformers (5.23) asks its assistant for a config with ids, which
    these have not.
    """
    target, tokenizer = tiny_model(), make_tokenizer()
    drafter = (
        hf_paradraft.NgramDrafter()
        if kind == "n-gram"
        else hf_paradraft.ParallelSpecDrafter.from_target(target, "eagle", 2)
    )
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer)
    pipe("a b c", max_new_tokens=8, do_sample=False, assistant_model=drafter)
    assert drafter.last_stats is not None


def test_parallelspec_refuses_a_target_of_mixed_layers():
    """Bamba's layers are of two classes: it is served, or refused with a sentence."""
    torch.manual_seed(0)
    config = BambaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
        mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, attn_layer_indices=[1,
        3],
    )  # fmt: skip
    target = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="computes the kinds of its layers"):
        hf_paradraft.ParallelSpecDrafter.from_target(target)


def test_right_padded_prompts_are_decoded_plainly_by_a_model_with_prompt_tokens():
    base = tiny_model()
    ids = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    plain = base.generate(ids, attention_mask=mask, pad_token_id=0, **OPTIONS)
    model = get_peft_model(copy.deepcopy(base), hf_paradraft.PpdConfig(num_prompt_tokens=2))
    assert torch.equal(
        plain, model.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, **OPTIONS)
    )


def test_a_drafter_with_sliding_layers_overlaps(prompt):
    """What its windows have dropped is read again."""
    target = tiny_model()
    drafter = hf_paradraft.PardDrafter.from_causal_lm(
        tiny_model("mistral-sliding", seed=1), mask_token_id=31
    )
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        4, None, never_slower=False, overlap=True
    )
    assert_lossless(target, drafter, prompt, max_new_tokens=60, eos_token_id=None)
