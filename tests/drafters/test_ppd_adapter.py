"""A PPD adapter is a well-behaved PEFT adapter: it holds its prompts alone and leaves ordinary
logits as they were.
"""

import json

import pytest
import torch
from lossless import assert_lossless
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from tiny import EOS, SHARED, VOCAB, tiny_model
from transformers import AutoModelForCausalLM, Gemma3nTextConfig, Gemma3TextConfig, QuantoConfig

import hf_paradraft
from hf_paradraft.drafters.ppd import PpdConfig
from hf_paradraft.drafters.ppd.adapter import prompt_embedding

IDS = torch.tensor([[1, 2, 3, 4, 5]])
WITH_PROMPTS = torch.tensor([[1, 2, 3, VOCAB, VOCAB + 1, VOCAB + 2]])


def gemma():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        Gemma3TextConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, sliding_window=6, layer_types=["sliding_attention",
            "full_attention"],
            eos_token_id=EOS, pad_token_id=0, bos_token_id=None,
        )
    ).eval()  # fmt: skip


BASES = {
    "llama": lambda: tiny_model("llama"),
    "llama, tied": lambda: tiny_model("llama", tie_word_embeddings=True),
    "qwen3": lambda: tiny_model("qwen3"),
    "gpt2": lambda: tiny_model("gpt2"),
    "gemma3": gemma,
}


@pytest.mark.parametrize("name", BASES)
def test_ordinary_logits_are_the_bases(name):
    base = BASES[name]()
    with torch.no_grad():
        before = base(IDS).logits
        model = get_peft_model(base, PpdConfig())
        assert torch.equal(model(IDS).logits, before)
        assert model(WITH_PROMPTS).logits.shape[1] == 6
        torch.testing.assert_close(
            model(WITH_PROMPTS).logits[:, :3], model(WITH_PROMPTS[:, :3]).logits
        )


@pytest.mark.parametrize("name", BASES)
def test_only_prompts_are_trained_and_saved(name, tmp_path):
    model = get_peft_model(BASES[name](), PpdConfig(num_prompt_tokens=2, num_ensembles=3))
    trainable = [parameter.shape for parameter in model.parameters() if parameter.requires_grad]
    assert trainable == [(6, 32)]
    prompts = prompt_embedding(model.get_base_model()).prompts().detach().clone()
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", framework="pt") as tensors:
        (key,) = tensors.keys()
        assert torch.equal(tensors.get_tensor(key), prompts)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["vocab_size"], config["hidden_size"]) == ("PPD", VOCAB, 32)
    again = PeftModel.from_pretrained(BASES[name](), tmp_path)
    assert torch.equal(prompt_embedding(again.get_base_model()).prompts(), prompts)
    with torch.no_grad():
        assert torch.equal(again(WITH_PROMPTS).logits, model(WITH_PROMPTS).logits)


def test_peft_and_transformers_load_a_saved_adapter(tmp_path):
    base = tiny_model()
    base.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(base, PpdConfig())
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = model(WITH_PROMPTS).logits
        auto = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
        assert torch.equal(auto(WITH_PROMPTS).logits, expected)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        plain.load_adapter(str(tmp_path / "adapter"))
        assert torch.equal(plain(WITH_PROMPTS).logits, expected)


def test_the_active_adapter_decides_the_prompts(tmp_path):
    model = get_peft_model(tiny_model(), PpdConfig(), adapter_name="first")
    torch.manual_seed(9)
    model.add_adapter("second", PpdConfig(num_prompt_tokens=4))
    layer = prompt_embedding(model.get_base_model())
    assert layer.prompts() is layer.ppd_prompts["first"]
    model.set_adapter("second")
    assert layer.prompts() is layer.ppd_prompts["second"]
    with model.disable_adapter():
        assert layer.prompts() is None
        with pytest.raises(IndexError):
            model(WITH_PROMPTS)
    assert model(WITH_PROMPTS).logits.shape[1] == 6


def test_bf16_bases_keep_their_dtype():
    model = get_peft_model(tiny_model().to(torch.bfloat16), PpdConfig())
    assert model(WITH_PROMPTS).logits.dtype == torch.bfloat16


def test_gradients_reach_the_prompts_alone():
    model = get_peft_model(tiny_model(), PpdConfig())
    model(WITH_PROMPTS).logits.sum().backward()
    with_gradients = [
        name for name, parameter in model.named_parameters() if parameter.grad is not None
    ]
    assert with_gradients == ["base_model.model.model.embed_tokens.ppd_prompts.default"]


@pytest.mark.parametrize("overrides", [{"hidden_size": 64}, {"vocab_size": 40}])
def test_an_adapter_for_another_base_is_refused(tmp_path, overrides):
    get_peft_model(tiny_model(), PpdConfig()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="made for a base model with"):
        PeftModel.from_pretrained(tiny_model(**overrides), tmp_path)


@pytest.mark.parametrize(
    "options", [{"num_prompt_tokens": 0}, {"num_ensembles": 0}, {"num_prompt_tokens": 1.5}]
)
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match="at least 1"):
        PpdConfig(**options)


def test_prompts_are_two_millionths_of_a_7b_model():
    """On Vicuna-7B's shape, counted without memory: the paper's 0.0002 % of parameters."""
    with torch.device("meta"):
        base = tiny_model(
            hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=32,
            vocab_size=32000,
        )  # fmt: skip
    total = sum(parameter.numel() for parameter in base.parameters())
    assert total > 6.7e9
    assert PpdConfig().num_ids * 4096 / total < 2e-6


def test_prompts_beside_lora_are_refused():
    model = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"PPD"):
        model.add_adapter("ppd", PpdConfig())


def test_prompts_are_not_merged_but_taken_off(prompt):
    model = get_peft_model(tiny_model(), PpdConfig())
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ValueError, match="cannot be merged"):
            merge()
    base = model.unload()
    assert torch.equal(base(prompt).logits, tiny_model()(prompt).logits)
    assert not any("ppd" in name for name, _ in base.named_modules())


@pytest.mark.filterwarnings("ignore::FutureWarning")  # quanto's own
def test_prompts_on_a_quantised_base_are_lossless(tmp_path, prompt):
    pytest.importorskip("optimum.quanto", reason="not in the environments of other versions")
    get_peft_model(tiny_model(), PpdConfig()).save_pretrained(tmp_path / "adapter")
    tiny_model().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=QuantoConfig(weights="int8")
    )
    options = {"do_sample": False, "max_new_tokens": 16}
    plain = base.generate(prompt, **options)
    drafter = hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "adapter")
    assert_lossless(base, drafter, prompt, plain=plain, **options)
    assert drafter.last_stats.num_drafted > 0
    assert torch.equal(
        PeftModel.from_pretrained(base, tmp_path / "adapter").generate(input_ids=prompt, **options),
        plain,
    )


def test_a_base_resized_after_training_is_refused(tmp_path, prompt):
    get_peft_model(tiny_model(), PpdConfig()).save_pretrained(tmp_path)
    base = tiny_model()
    base.resize_token_embeddings(40)
    with pytest.raises(ValueError, match="not resized"):
        PeftModel.from_pretrained(base, tmp_path)
    with pytest.raises(ValueError, match="belongs to a model"):
        base.generate(
            prompt,
            max_new_tokens=4,
            assistant_model=hf_paradraft.AutoDrafter.from_pretrained(tmp_path),
        )


def test_prompts_of_another_width_are_refused(prompt):
    drafter = hf_paradraft.PpdDrafter.from_model(
        get_peft_model(tiny_model(hidden_size=64), PpdConfig())
    )
    with pytest.raises(ValueError, match="belongs to a model with an embedding of 32 × 64"):
        tiny_model().generate(
            prompt,
            max_new_tokens=4,
            custom_generate=hf_paradraft.speculative_decoding,
            drafter=drafter,
        )


def test_a_base_that_embeds_for_every_layer_is_refused():
    config = Gemma3nTextConfig(
        **SHARED, head_dim=8, num_kv_shared_layers=0, layer_types=["full_attention"] * 2,
        laurel_rank=4,
        vocab_size_per_layer_input=32, hidden_size_per_layer_input=8,
        activation_sparsity_pattern=[0.0] * 2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="every layer's own input"):
        get_peft_model(AutoModelForCausalLM.from_config(config), PpdConfig(num_prompt_tokens=2))
