"""Targets that read drafts, or padded prompts, in another way than tokens one by one are refused, and no others are."""

import pytest
import torch
import transformers
from lossless import assert_lossless
from tiny import ARCHITECTURES, near_copy, tiny_model
from transformers import FalconMambaConfig, FalconMambaForCausalLM

import hf_paradraft as pd
from hf_paradraft.integration import probe
from hf_paradraft.integration.probe import check_reads

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
SIGHT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
QWEN_SIGHT = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 4,
    "intermediate_size": 48,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [0],
}


def of(name, config, **options):
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForConditionalGeneration")(getattr(transformers, config)(**options)).eval()


def git():
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    torch.manual_seed(0)
    config = transformers.GitConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0, vision_config=SIGHT)
    return transformers.GitForCausalLM(config).eval()


def paligemma(text):
    sizes = {"model_type": text, **SIZES, "head_dim": 8}
    sight = {"model_type": "siglip_vision_model", **SIGHT}
    options = {"text_config": sizes, "vision_config": sight, "image_token_index": 63, "projection_dim": 32, "hidden_size": 32}
    return of("PaliGemma", "PaliGemmaConfig", **options)


def exaone():
    text = {"model_type": "exaone4", **SIZES, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
    return of("Exaone4_5_", "Exaone4_5_Config", text_config=text, vision_config=QWEN_SIGHT)


def hyperclova():
    sight = {"model_type": "qwen2_5_vl_vision", **QWEN_SIGHT}
    text = {"model_type": "hyperclovax", **SIZES}
    return of("HyperCLOVAXVisionV2", "HyperCLOVAXVisionV2Config", text_config=text, vision_config=sight)


ODD = {  # which of drafts and padded prompts they read in another way
    "git": (git, False, True),
    "paligemma": (lambda: paligemma("gemma"), True, True),
    "paligemma 2": (lambda: paligemma("gemma2"), True, True),
    "exaone 4.5": (exaone, False, True),
    "hyperclova x vision": (hyperclova, False, True),
}


@pytest.mark.parametrize("name", ODD)
def test_targets_that_make_positions_themselves_are_refused(name):
    make, drafts, padded = ODD[name]
    target = make()
    for several, refused in ((False, drafts), (True, padded)):
        if refused:
            with pytest.raises(ValueError, match="as it reads tokens one by one"):
                check_reads(target, several)
        else:
            check_reads(target, several)


def test_images_that_are_attended_to_across_are_refused():
    """Their keys were cropped with a draft's; text alone is served."""
    text = {**SIZES, "num_hidden_layers": 4, "cross_attention_layers": [1, 3], "pad_token_id": 0}
    sight = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 4,
        "image_size": 16, "patch_size": 8, "vision_output_dim": 64, "intermediate_layers_indices": [0], "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]],
    }  # fmt: skip
    target = of("Mllama", "MllamaConfig", text_config=text, vision_config=sight, image_token_index=63)
    ids = torch.tensor([[1, 5, 6, 7, 5, 6, 7]])
    assert_lossless(target, pd.NgramDrafter(), ids, max_new_tokens=8)
    image = {
        "pixel_values": torch.randn(1, 1, 1, 3, 16, 16),
        "aspect_ratio_ids": torch.tensor([[1]]),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, 7, 1, 1, dtype=torch.long),
    }
    with pytest.raises(ValueError, match="attends to images across"):
        target.generate(ids, max_new_tokens=8, assistant_model=pd.NgramDrafter(), **image)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_is_forgotten_is_noticed_in_any_dtype(dtype):
    """In bf16 it passed for rounding."""
    torch.manual_seed(0)
    config = FalconMambaConfig(
        vocab_size=64, hidden_size=32, state_size=8, num_hidden_layers=2, intermediate_size=64, time_step_rank=4
    )
    with pytest.raises(ValueError, match="does not read drafts"):
        check_reads(FalconMambaForCausalLM(config).to(dtype).eval(), several=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_targets_that_read_drafts_correctly_are_served(architecture, dtype):
    for several in (False, True):
        check_reads(tiny_model(architecture, dtype=dtype), several)


@pytest.mark.parametrize("vocab_size", [2, 6, 12])
def test_a_small_vocabulary_is_served(vocab_size):
    for several in (False, True):
        check_reads(tiny_model(vocab_size=vocab_size, bos_token_id=0, eos_token_id=1, pad_token_id=0), several)


def test_one_look_at_a_target_is_enough(target, drafter, prompt, monkeypatch, tmp_path):
    """In other processes too: what is sound is noted on disk."""
    monkeypatch.setattr(probe, "FOLDER", tmp_path / "reads")
    looks, sound = [], probe._is_sound
    monkeypatch.setattr(probe, "_is_sound", lambda model, several: looks.append(several) or sound(model, several))
    batch = {"attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]), "pad_token_id": 0}
    for _ in range(2):
        target.generate(prompt, assistant_model=drafter, max_new_tokens=3)
        target.generate(prompt.repeat(2, 1), assistant_model=near_copy(target), max_new_tokens=3, **batch)
    assert looks == [False, True]
    assert not target.training
    again = tiny_model(seed=5)
    again.train()
    again.generate(prompt, assistant_model=drafter, max_new_tokens=3)
    assert looks == [False, True]
    assert again.training
    again.to(torch.float32).generate(prompt, assistant_model=near_copy(again), max_new_tokens=3)
    assert looks == [False, True, False]
    assert again.training
