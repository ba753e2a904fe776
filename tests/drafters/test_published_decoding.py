"""Published drafters change nothing that a target says, and their caches give what whole prefixes
give.
"""

import functools
import json

import pytest
import torch
from layouts import LAYOUTS
from layouts.blocks import deepspec, speculators, zlab
from layouts.eagle import safeai, specforge_peagle
from layouts.parts import DRAFTED, KV, LAYERS, D, V
from lossless import assert_lossless
from published import TARGET, check_guesses, guesses_of_a_call
from tiny import EOS, tiny_model
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2VlConfig,
    Lfm2VlForConditionalGeneration,
    Siglip2VisionConfig,
)

import hf_paradraft
from hf_paradraft.decoding import drafts, loop
from hf_paradraft.decoding.verify import Verifier

PROMPTS = torch.tensor([[0, 0, 0, 1, 2], [1, 2, 3, 4, 5], [0, 9, 8, 7, 6]])
SEEN = (PROMPTS != 0).long()
SOME = ("z-lab, sliding", "DeepSpec rnn", "SafeAI", "speculators P-EAGLE")
SLOW = pytest.mark.slow
# each layout in a chain or in a tree; in the other one at night
CHANGED = [
    *(
        pytest.param(
            name,
            size,
            marks=()
            if name in SOME
            else (SLOW if number % 2 == (size is None) else pytest.mark.nightly),
        )
        for number, name in enumerate(LAYOUTS)
        for size in (None, 9)
    ),
    *((name, "auto") for name in SOME),
]


@functools.cache
def plain_text(rows):
    """What the target says behind the prompts, and how it was asked."""
    options = {
        "do_sample": False,
        "max_new_tokens": 16,
        "pad_token_id": 0,
        "attention_mask": SEEN[list(rows)],
        "eos_token_id": None,
    }
    return TARGET.generate(PROMPTS[list(rows)], **options), options


@pytest.mark.parametrize(("name", "size"), CHANGED)
def test_every_layout_changes_nothing(name, size, load):
    """A ragged batch; a row alone in trees."""
    drafter = load(name, attach=False)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        3, size, never_slower=size == "auto"
    )
    for rows in [(0, 1, 2)] if size is None else [(1,)] if name not in SOME else [(1,), (0, 1, 2)]:
        plain, options = plain_text(rows)
        assert_lossless(TARGET, drafter, PROMPTS[list(rows)], plain=plain, **options)
        assert drafter.last_stats.num_drafted > 0


PIECES = [
    *(pytest.param(name, None, marks=() if name in SOME else SLOW) for name in LAYOUTS),
    *((name, 2) for name in SOME),
]


@pytest.mark.parametrize(("name", "piece"), PIECES)
def test_caches_give_what_whole_prefixes_give(name, piece, load):
    """Over rounds, rejections, trees and ragged rows, with prompts in pieces."""
    drafter = load(name, attach=False)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(3, 7, never_slower=False)
    more = (
        {"attention_mask": SEEN, "max_new_tokens": 10}
        if piece is None
        else {"prefill_chunk_size": piece}
    )
    seen = guesses_of_a_call(drafter, TARGET, PROMPTS if piece is None else PROMPTS[1:2], **more)
    assert check_guesses(drafter, TARGET, seen) > 10


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_model("qwen3", num_hidden_layers=LAYERS),
        lambda: tiny_model("mistral-sliding", num_hidden_layers=LAYERS),
    ],
)
@pytest.mark.parametrize("name", ["DeepSpec DSpark", "speculators EAGLE-3"])
def test_published_drafters_are_lossless_on_other_targets(make, name, load):
    target, drafter = make(), load(name, attach=False)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(3, 8, never_slower=False)
    ids = torch.tensor([list(range(1, 25))])
    options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": EOS}
    assert_lossless(target, drafter, ids, **options)


@functools.cache
def lfm2():
    """A target with forgetful states, for which LiquidAI publishes its drafters."""
    sizes = {
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "initializer_range": 0.3,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention"] * (LAYERS // 2),
    }
    torch.manual_seed(0)
    return (
        Lfm2ForCausalLM(
            Lfm2Config(**sizes, **heads, eos_token_id=None, pad_token_id=0, bos_token_id=None)
        )
        .eval()
        .double()
    )


@pytest.mark.parametrize("rows", [(1,), (0, 1, 2)])
def test_lfm2_drafts_in_chains_and_batches(rows, load):
    drafter = load("LFM2 DSpark", attach=False)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, None, never_slower=False)
    ids, seen = PROMPTS[list(rows)], SEEN[list(rows)]
    assert_lossless(lfm2(), drafter, ids, attention_mask=seen, max_new_tokens=20, pad_token_id=0)
    assert drafter.last_stats.num_drafted > 10


def test_lfm2_vl_drafts_after_an_image(load):
    """Its positions are ordinary: the target's states at an image's tokens are read as those of
    words are.
    """
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision = Siglip2VisionConfig(**sizes, patch_size=2, num_patches=16)
    config = {"text_config": lfm2().config, "image_token_id": V - 2, "projector_hidden_size": 32}
    target = (
        Lfm2VlForConditionalGeneration(Lfm2VlConfig(vision_config=vision, **config)).eval().double()
    )
    ids = torch.tensor([[3, 4, *[V - 2] * 4, 5, 6, 7]])
    pixels = {
        "pixel_values": torch.randn(1, 16, 12).double(),
        "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
    }
    image = {**pixels, "spatial_shapes": torch.tensor([[4, 4]])}
    drafter = load("LFM2 DSpark", attach=False).double()
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, None, never_slower=False)
    written = {**image, "suppress_tokens": [V - 2]}
    assert_lossless(target, drafter, ids, **written, max_new_tokens=20)
    guesses = guesses_of_a_call(drafter, target, ids, **written)
    assert check_guesses(drafter, target, guesses, **image) > 5
    with pytest.raises(AssertionError):  # not those of the placeholders' own embeddings
        check_guesses(drafter, target, guesses)


@pytest.mark.slow
def test_confidences_cut_chains(load, monkeypatch):
    """A drafter that is sure of nothing drafts little, where never_slower asks for it; the output
    stays.
    """
    verify, now = Verifier.verify, [0.0]

    def timed(verifier, sequences):
        now[0] += 1 + 0.2 * max(len(sequence.draft) for sequence in sequences)
        return verify(verifier, sequences)

    monkeypatch.setattr(Verifier, "verify", timed)  # rows take what they always take
    for module in (loop, drafts):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    config, tensors = LAYOUTS["DeepSpec DSpark"]()
    lengths = {}
    for bias in (-20.0, 20.0):
        tensors["confidence_head.proj.bias"] = torch.tensor([bias])
        tensors["confidence_head.proj.weight"] = torch.zeros_like(
            tensors["confidence_head.proj.weight"]
        )
        drafter = load((config, tensors), attach=False)
        drafter.speculation_config = hf_paradraft.SpeculationConfig(4, None, trace=True)
        options = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": None}
        assert_lossless(TARGET, drafter, PROMPTS[1:2], **options)
        guess = drafter.guess(torch.zeros(4, D), torch.tensor([0, 1]), 4)
        assert guess.confidences(torch.arange(4)) == pytest.approx(
            [1 / (1 + 2.718281828**-bias)] * 4
        )
        lengths[bias] = drafter.last_stats.num_drafted
    assert lengths[-20.0] < lengths[20.0]


def test_the_target_is_not_copied(load):
    drafter = load("z-lab")
    assert sum(parameter.numel() for parameter in drafter.parameters()) == sum(
        t.numel() for t in zlab()[1].values()
    )
    assert drafter.target_head.head.weight.data_ptr() != 0
    assert not any("target_head" in name for name, _ in drafter.named_modules())


def test_sizes_of_the_tiny_drafters():
    """The layouts' tensors have the shapes that publishers write."""
    assert deepspec()[1]["markov_head.markov_w1.weight"].shape == (V, 4)
    assert speculators()[1]["lm_head.weight"].shape == (len(DRAFTED), D)
    assert safeai()[1]["midlayer.self_attn.k_proj.weight"].shape == (KV * 8, 2 * D)
    assert specforge_peagle()[1]["mask_hidden"].shape == (1, 3 * D)
    assert json.dumps(zlab()[0])
