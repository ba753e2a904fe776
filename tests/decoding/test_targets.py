"""Targets as people have them: adapters, quantised weights, images, parts on several devices."""

import pytest
import torch
from accelerate import cpu_offload
from lossless import assert_lossless
from peft import LoraConfig, get_peft_model
from tiny import EOS, SHARED, near_copy, same_with_an_oracle, tiny_model
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    QuantoConfig,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

import hf_paradraft

IDS = torch.tensor([[1, 2, 3, 4, 5, 6]])
SIZES = [None, 12]


def same_with_and_without(target, drafter, tree_size, **inputs):
    drafter.speculation_config.num_draft_tokens, drafter.speculation_config.tree_size = 5, tree_size
    options = {
        "do_sample": False,
        "max_new_tokens": 24,
        "eos_token_id": None,
        "pad_token_id": 0,
        **inputs,
    }
    plain = target.generate(**options)
    assert torch.equal(plain, target.generate(**options, assistant_model=drafter))
    assert drafter.last_stats.mean_emitted > 1


@pytest.mark.parametrize("tree_size", SIZES)
def test_targets_with_an_adapter_are_lossless(tree_size):
    target = get_peft_model(
        tiny_model(), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ).eval()
    same_with_and_without(target, near_copy(tiny_model()), tree_size, input_ids=IDS)
    same_with_and_without(target, near_copy(tiny_model()), tree_size, input_ids=IDS.repeat(3, 1))


@pytest.mark.parametrize("tree_size", SIZES)
def test_quantised_targets_are_lossless(tmp_path, tree_size):
    pytest.importorskip("optimum.quanto", reason="not in the environments of other versions")
    tiny_model().save_pretrained(tmp_path)
    target = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=QuantoConfig(weights="int8")
    )
    assert type(target.model.layers[0].mlp.up_proj) is not torch.nn.Linear
    same_with_and_without(target, near_copy(tiny_model()), tree_size, input_ids=IDS)


def reads_images_alone(target, inputs):
    """No draft in the round that reads them: a drafter sees placeholders."""
    drafter = near_copy(tiny_model())
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, trace=True, never_slower=False)
    target.generate(
        **inputs, max_new_tokens=8, do_sample=False, eos_token_id=None, assistant_model=drafter
    )
    assert [bool(record.drafted) for record in drafter.last_stats.trace][:2] == [False, True]


def test_images_beside_the_prompt_are_lossless():
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**SHARED),
        image_token_index=29,
        image_seq_length=4,
    )
    target = LlavaForConditionalGeneration(config).eval()
    ids = torch.tensor([[29, 29, 29, 29, 5, 6, 7]])
    same_with_an_oracle(target, input_ids=ids, pixel_values=torch.randn(1, 3, 8, 8))
    reads_images_alone(target, {"input_ids": ids, "pixel_values": torch.randn(1, 3, 8, 8)})
    twice = {"input_ids": ids.repeat(2, 1), "pixel_values": torch.randn(2, 3, 8, 8)}
    same_with_an_oracle(target, **twice, attention_mask=torch.ones_like(twice["input_ids"]))


def mrope_target():
    """A Qwen2-VL, and a prompt with an image."""
    torch.manual_seed(0)
    config = Qwen2VLConfig(
        text_config={**SHARED, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1,
        2], "rope_theta": 10000.0}},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2,
        "mlp_ratio": 1, "patch_size": 2,
                       "spatial_merge_size": 2, "temporal_patch_size": 1},
        image_token_id=29, video_token_id=28, vision_start_token_id=27, vision_end_token_id=26,
    )  # fmt: skip
    target = Qwen2VLForConditionalGeneration(config).eval()
    ids = torch.tensor([[27, 29, 29, 29, 29, 26, 5, 6, 7]])
    images = {"pixel_values": torch.randn(16, 12), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return target, {"input_ids": ids, **images, "mm_token_type_ids": (ids == 29).long()}


def test_mrope_targets_are_lossless():
    """Qwen2-VL counts positions in time, height and width: chains, one prompt at a time."""
    target, inputs = mrope_target()
    same_with_an_oracle(target, **inputs)
    reads_images_alone(target, inputs)


def test_a_drafter_with_one_position_a_token_serves_such_a_target_without_images():
    """transformers hands an empty mapping of images to each call, which is no image."""
    target, inputs = mrope_target()
    drafter = hf_paradraft.DFlashDrafter.from_target(target.double(), 25, num_features=1)
    drafter.speculation_config.never_slower = False
    assert_lossless(target, drafter, IDS[:, :EOS], max_new_tokens=12, eos_token_id=None)
    with pytest.raises(ValueError, match="images give"):
        target.generate(**inputs, assistant_model=drafter, max_new_tokens=4)


def test_a_look_at_a_target_leaves_no_traces():
    """The short text's positions took the place of the image's, and the next turn of a chat had
    another text.
    """
    target, inputs = mrope_target()
    options = {
        "do_sample": False,
        "max_new_tokens": 6,
        "suppress_tokens": [26, 27, 28, 29],
        "pad_token_id": 0,
    }
    target.generate(**inputs, **options)
    left = target.model.rope_deltas
    assert left.item() != 0
    target.generate(**inputs, **options, assistant_model=hf_paradraft.NgramDrafter())
    assert torch.equal(target.model.rope_deltas, left)


def test_the_drafter_has_its_own_dtype_and_vocabulary():
    target = tiny_model()
    larger = hf_paradraft.PardDrafter.from_causal_lm(
        tiny_model(vocab_size=48).to(torch.bfloat16), mask_token_id=47
    )
    larger.speculation_config.never_slower = False
    for tree_size in SIZES:
        larger.speculation_config.tree_size = tree_size
        assert_lossless(target, larger, IDS, max_new_tokens=20)


def test_two_targets_and_one_drafter_in_turn():
    first, second = tiny_model(), tiny_model("qwen2", seed=4)
    drafter = near_copy(first)
    for target in (first, second, first):
        options = {"do_sample": False, "max_new_tokens": 20}
        assert_lossless(target, drafter, IDS[:, :EOS], **options)


@pytest.mark.parametrize("tree_size", SIZES)
def test_offloaded_targets_are_lossless(tree_size):
    """An offloaded model's own device is none: inputs stay where the caller has them."""
    target = cpu_offload(tiny_model(), execution_device="cpu")
    assert target.device.type == "meta"
    same_with_and_without(target, near_copy(tiny_model()), tree_size, input_ids=IDS)


def test_an_offloaded_targets_latency(tmp_path, monkeypatch):
    """Its own device is "meta"; ids belong where it computes."""
    from accelerate import disk_offload

    from hf_paradraft.decoding.latency import row_latency
    from hf_paradraft.hardware import input_device

    monkeypatch.setattr("hf_paradraft.decoding.latency.FOLDER", tmp_path / "latency")
    target = disk_offload(tiny_model(), tmp_path / "one")
    assert target.device.type == "meta"
    assert input_device(target).type == "cpu"
    assert row_latency(target).seconds
