"""Targets that read drafts, or padded prompts, in another way than tokens one by one are refused,
and no others are.
"""

import functools

import pytest
import torch
import transformers
from lossless import assert_lossless
from packaging.version import Version
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tiny import ARCHITECTURES, generate, near_copy, tiny_model
from transformers import FalconMambaConfig, FalconMambaForCausalLM

import hf_paradraft
from hf_paradraft.integration import look
from hf_paradraft.integration.look import check_reads

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4,
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
    return getattr(transformers, f"{name}ForConditionalGeneration")(
        getattr(transformers, config)(**options)
    ).eval()


def git():
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    torch.manual_seed(0)
    config = transformers.GitConfig(
        **sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0, vision_config=SIGHT
    )
    return transformers.GitForCausalLM(config).eval()


def paligemma(text):
    sizes = {"model_type": text, **SIZES, "head_dim": 8}
    sight = {"model_type": "siglip_vision_model", **SIGHT}
    options = {
        "text_config": sizes,
        "vision_config": sight,
        "image_token_index": 63,
        "projection_dim": 32,
        "hidden_size": 32,
    }
    return of("PaliGemma", "PaliGemmaConfig", **options)


def exaone():
    text = {
        "model_type": "exaone4",
        **SIZES,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    return of("Exaone4_5_", "Exaone4_5_Config", text_config=text, vision_config=QWEN_SIGHT)


def hyperclova():
    sight = {"model_type": "qwen2_5_vl_vision", **QWEN_SIGHT}
    text = {"model_type": "hyperclovax", **SIZES}
    return of(
        "HyperCLOVAXVisionV2", "HyperCLOVAXVisionV2Config", text_config=text, vision_config=sight
    )


ODD = {  # which of drafts and padded prompts they read in another way
    "git": (git, False, True),
    "paligemma": (lambda: paligemma("gemma"), True, True),
    "paligemma 2": (lambda: paligemma("gemma2"), True, True),
    "exaone 4.5": (exaone, False, True),
    "hyperclova x vision": (hyperclova, False, True),
}


TODAY = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="these models read otherwise before 5.23",
)


@TODAY
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


@TODAY
def test_images_that_are_attended_to_across_are_refused():
    """Their keys were cropped with a draft's; text alone is served."""
    text = {**SIZES, "num_hidden_layers": 4, "cross_attention_layers": [1, 3], "pad_token_id": 0}
    sight = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_global_layers": 1,
        "attention_heads": 4,
        "image_size": 16, "patch_size": 8, "vision_output_dim": 64,
        "intermediate_layers_indices": [0], "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]],
    }  # fmt: skip
    target = of(
        "Mllama", "MllamaConfig", text_config=text, vision_config=sight, image_token_index=63
    )
    ids = torch.tensor([[1, 5, 6, 7, 5, 6, 7]])
    assert_lossless(target, hf_paradraft.NgramDrafter(), ids, max_new_tokens=8)
    image = {
        "pixel_values": torch.randn(1, 1, 1, 3, 16, 16),
        "aspect_ratio_ids": torch.tensor([[1]]),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, 7, 1, 1, dtype=torch.long),
    }
    with pytest.raises(ValueError, match="attends to images across"):
        target.generate(ids, max_new_tokens=8, assistant_model=hf_paradraft.NgramDrafter(), **image)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_is_forgotten_is_noticed_in_any_dtype(dtype):
    """In bf16 it passed for rounding."""
    torch.manual_seed(0)
    config = FalconMambaConfig(
        vocab_size=64,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
        intermediate_size=64,
        time_step_rank=4,
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
        check_reads(
            tiny_model(vocab_size=vocab_size, bos_token_id=0, eos_token_id=1, pad_token_id=0),
            several,
        )


def test_one_look_at_a_target_is_enough(target, drafter, prompt, monkeypatch):
    looks, fault = [], look._fault
    monkeypatch.setattr(
        look,
        "_fault",
        lambda model, several, text: looks.append(several) or fault(model, several, text),
    )
    batch = {"attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]), "pad_token_id": 0}
    for _ in range(2):
        target.generate(prompt, assistant_model=drafter, max_new_tokens=3)
        target.generate(
            prompt.repeat(2, 1), assistant_model=near_copy(target), max_new_tokens=3, **batch
        )
    assert looks == [False, True]
    assert not target.training
    again = tiny_model(seed=5)
    again.generate(prompt, assistant_model=drafter, max_new_tokens=3)
    assert looks == [False, True, False]
    again.train()  # which is another way to be called
    for _ in range(2):
        again.generate(prompt, assistant_model=drafter, max_new_tokens=3)
    assert looks == [False, True, False, False]
    assert again.training
    again.eval().to(torch.float32).generate(
        prompt, assistant_model=near_copy(again), max_new_tokens=3
    )
    assert looks == [False, True, False, False, False]


def refused(target, drafter, ids, **options):
    """What a drafted call says, after the same call without a drafter answered."""
    target.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
    )
    with pytest.raises(ValueError, match=r"generate without|before generate") as error:
        target.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=6,
            assistant_model=drafter,
            **options,
        )
    return str(error.value)


# PEFT 0.21 hands prefixes over by the former name
@pytest.mark.filterwarnings("ignore:Both `past_key_values` and `cache`")
@pytest.mark.parametrize("config", [PrefixTuningConfig, PromptTuningConfig])
def test_virtual_tokens_around_a_target_that_was_looked_at_before(config, prompt):
    """The verdict of the first look was remembered by the model inside, and the prefix was lost
    without a word.
    """
    base = tiny_model()
    drafter = near_copy(base)
    expected = generate(base, drafter, prompt)
    wrapped = get_peft_model(base, config(num_virtual_tokens=5, task_type="CAUSAL_LM")).double()
    with torch.no_grad():
        for parameter in wrapped.prompt_encoder.parameters():
            parameter.mul_(20)
    assert "does not read drafts" in refused(wrapped, drafter, prompt)
    # the model inside, called by itself
    assert torch.equal(generate(base, drafter, prompt), expected)


def test_hooks_that_count_the_rows_of_a_forward(prompt):
    """Plain decoding has one row a forward, verification many; each hook is another target."""
    target = tiny_model()
    drafter = near_copy(target)
    generate(target, drafter, prompt)

    def steers_the_last(module, args, output):
        states = output if isinstance(output, torch.Tensor) else output[0]
        states[:, -1] += 1.0

    def steers_all(module, args, output):
        (output if isinstance(output, torch.Tensor) else output[0]).add_(0.1)

    handle = target.model.layers[0].register_forward_hook(steers_the_last)
    assert "does not read drafts" in refused(target, drafter, prompt)
    handle.remove()
    handle = target.model.layers[0].register_forward_hook(steers_all)
    assert_lossless(target, drafter, prompt)
    handle.remove()
    assert_lossless(target, drafter, prompt)


def test_a_method_that_was_put_over_the_classes(prompt):
    target = tiny_model()
    drafter = near_copy(target)
    generate(target, drafter, prompt)
    forward = target.forward
    for shift, right in ((0, True), (1, False)):

        def shifted(input_ids, *args, shift=shift, **kwargs):
            ids = torch.cat([input_ids[:, :-1], (input_ids[:, -1:] + shift) % 32], dim=1)
            return forward(ids, *args, **kwargs)

        target.forward = functools.wraps(forward)(shifted)
        if right:
            assert_lossless(target, drafter, prompt)
        else:
            refused(target, drafter, prompt)
    del target.forward
    assert_lossless(target, drafter, prompt)


def test_adapters_that_are_on_from_certain_tokens_on(prompt):
    base = tiny_model()
    for words, right in ((None, True), ([3, 4], False)):
        adapted = get_peft_model(
            base,
            LoraConfig(
                task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=words
            ),
        ).double()
        if right:
            assert_lossless(adapted, near_copy(tiny_model()), prompt)
            base = adapted.unload()
        else:
            assert "aLoRA" in refused(adapted, near_copy(tiny_model()), prompt)


# which is called activation_checkpointing_… since 5.24
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_")
def test_training_mode_is_served_where_it_changes_nothing(prompt):
    target = tiny_model().train()
    drafter = near_copy(target)
    assert_lossless(target, drafter, prompt)
    target.gradient_checkpointing_enable()
    assert "drops the target's cache" in refused(target, drafter, prompt)
    target.gradient_checkpointing_disable()
    assert_lossless(target, drafter, prompt)
    state = torch.get_rng_state()
    other = tiny_model("gpt2").train()  # with dropout
    assert "draws random numbers" in refused(other, near_copy(other), prompt)
    torch.set_rng_state(state)
    assert_lossless(other.eval(), near_copy(other), prompt)


def test_a_look_leaves_the_callers_seed_alone(prompt):
    target, other = tiny_model(), tiny_model("gpt2").train()
    torch.manual_seed(7)
    check_reads(target, several=False)
    with pytest.raises(ValueError, match="random numbers"):
        check_reads(other, several=True)
    after = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(3))
