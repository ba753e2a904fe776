"""The hook acts on our drafters only, installs once, and steps aside for a transformers it does not
know.
"""

import inspect
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import generate, make_tokenizer, near_copy, tiny_model
from transformers import (
    GenerationMixin,
    WhisperConfig,
    WhisperForConditionalGeneration,
    pipeline,
)

import hf_paradraft
from hf_paradraft.integration import hook
from hf_paradraft.outer_names import WRAPPED


def test_installing_again_changes_nothing():
    before = GenerationMixin._assisted_decoding
    assert hook.install()
    assert GenerationMixin._assisted_decoding is before


def test_signatures_are_kept():
    """`generate` inspects them to decide what to pass."""
    for name, parameters in WRAPPED.items():
        assert (
            parameters is None
            or set(inspect.signature(getattr(GenerationMixin, name)).parameters) == parameters
        )


def test_an_unknown_transformers_is_left_alone(monkeypatch):
    def another(self, input_ids, something_new):
        pass

    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", another)
    for name in ("_validate_generation_mode", "_prepare_generation_config", "generate"):
        monkeypatch.setattr(GenerationMixin, name, getattr(GenerationMixin, name).__wrapped__)
    with pytest.warns(
        UserWarning, match="no GenerationMixin._assisted_decoding with the arguments"
    ):
        assert not hook.install()
    assert GenerationMixin._assisted_decoding is another


@pytest.mark.parametrize("kind", ["ngram", "pard"])
def test_a_target_whose_own_generate_writes_into_its_assistant_is_refused(kind):
    config = WhisperConfig(
        vocab_size=32,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=20,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    target = WhisperForConditionalGeneration(config).eval()
    drafter = hf_paradraft.NgramDrafter() if kind == "ngram" else near_copy(tiny_model(), 0.2)
    with pytest.raises(ValueError, match="WhisperForConditionalGeneration is an encoder-decoder"):
        target.generate(torch.randn(1, 8, 20), assistant_model=drafter, max_new_tokens=5)
    assert len(target.generate(torch.randn(1, 8, 20), max_new_tokens=5)) == 1


def test_wrong_pairs_are_refused_however_the_drafter_is_passed(tmp_path, prompt):
    """A drafter with other tokens, an adapter of another base and an ordinary model are found out
    before work starts.
    """
    for name, words in (("target", "a b c"), ("drafter", "c b a")):
        tiny_model().save_pretrained(tmp_path / name)
        make_tokenizer(words).save_pretrained(tmp_path / name)
    target = type(tiny_model()).from_pretrained(tmp_path / "target")
    drafter = hf_paradraft.PardDrafter.from_causal_lm(tmp_path / "drafter", mask_token_id=31)
    adapter = hf_paradraft.PpdDrafter.from_model(
        get_peft_model(tiny_model(hidden_size=16), hf_paradraft.PpdConfig(num_prompt_tokens=2))
    )
    for wrong, message in (
        (drafter, "shared ids mean other tokens"),
        (adapter, "embedding of 32 × 16"),
    ):
        for door in (
            {"assistant_model": wrong},
            {"custom_generate": hf_paradraft.speculative_decoding, "drafter": wrong},
        ):
            with pytest.raises(ValueError, match=message):
                target.generate(prompt, max_new_tokens=5, do_sample=False, **door)
    assert (
        pickle.loads(pickle.dumps(hf_paradraft.speculative_decoding))
        is hf_paradraft.speculative_decoding
    )
    with pytest.raises(ValueError, match="LlamaForCausalLM is no drafter"):
        target.generate(
            prompt,
            max_new_tokens=5,
            custom_generate=hf_paradraft.speculative_decoding,
            drafter=tiny_model(),
        )


def test_a_model_with_prompts_drafts_through_both_doors(prompt):
    target = tiny_model()
    small = get_peft_model(near_copy(target), hf_paradraft.PpdConfig(num_prompt_tokens=2))
    plain = target.generate(prompt, do_sample=False, max_new_tokens=20)
    for door in (
        {"assistant_model": small},
        {"custom_generate": hf_paradraft.speculative_decoding, "drafter": small},
    ):
        assert torch.equal(
            plain, target.generate(prompt, do_sample=False, max_new_tokens=20, **door)
        )


def test_prompt_drafters_refuse_transformers_own_loop(monkeypatch, prompt):
    for name in WRAPPED:
        monkeypatch.setattr(GenerationMixin, name, getattr(GenerationMixin, name).__wrapped__)
    target = tiny_model()
    adapter = hf_paradraft.PpdDrafter.from_model(
        get_peft_model(tiny_model(), hf_paradraft.PpdConfig(num_prompt_tokens=2))
    )
    prompted = hf_paradraft.PromptedDrafter(
        get_peft_model(tiny_model(), hf_paradraft.PpdConfig(num_prompt_tokens=2))
    )
    for drafter, message in (
        (adapter, "ride along in the target's own forward"),
        (prompted, "hf_paradraft's loop alone"),
    ):
        with pytest.raises(ValueError, match=message):
            target.generate(prompt, max_new_tokens=5, do_sample=False, assistant_model=drafter)


def test_special_tokens_that_were_renamed_are_no_other_tokenizer(tmp_path, prompt, caplog):
    """Newer models of a family rename reserved ones, and nobody could use the older drafter."""
    tiny_model().save_pretrained(tmp_path / "target")
    tokenizer = make_tokenizer("a b c")
    tokenizer.add_special_tokens({"additional_special_tokens": ["w5"]})
    tokenizer.save_pretrained(tmp_path / "target")
    tiny_model().save_pretrained(tmp_path / "drafter")
    tokenizer.save_pretrained(tmp_path / "drafter")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = tmp_path / "drafter" / name
        file.write_text(file.read_text().replace('"w5"', '"reserved"'))
    target = type(tiny_model()).from_pretrained(tmp_path / "target", dtype=torch.float64)
    drafter = hf_paradraft.PardDrafter.from_causal_lm(
        tmp_path / "drafter", mask_token_id=31, dtype=torch.float64
    )
    assert torch.equal(generate(target, drafter, prompt), generate(target, None, prompt))
    assert "1 special tokens have another name" in caplog.text


@pytest.mark.parametrize("kind", ["pard", "ngram", "eagle3", "autoregressive"])
def test_pipelines_take_any_drafter(kind):
    target = tiny_model(num_hidden_layers=8)
    drafter = {
        "pard": lambda: near_copy(target),
        "ngram": hf_paradraft.NgramDrafter,
        "eagle3": lambda: hf_paradraft.Eagle3Drafter.from_target(target),
        "autoregressive": lambda: hf_paradraft.AutoregressiveDrafter.from_causal_lm(tiny_model()),
    }[kind]()
    texts = []
    for options in ({}, {"assistant_model": drafter}):
        pipe = pipeline("text-generation", model=target, tokenizer=make_tokenizer(), **options)
        texts.append(pipe("a b c a b c", max_new_tokens=12, do_sample=False))
    assert texts[0] == texts[1]
    assert drafter.last_stats.num_rounds


def test_adapters_of_rows_are_refused_before_anything_is_measured(prompt):
    adapted = get_peft_model(
        tiny_model(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    ).double()
    adapted.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    adapted.double().eval()
    ids = prompt.repeat(2, 1)
    options = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "adapter_names": ["default", "other"],
        "pad_token_id": 0,
    }
    adapted.generate(**options, max_new_tokens=4)
    with pytest.raises(ValueError, match="differ from row to row"):
        adapted.generate(**options, max_new_tokens=4, assistant_model=hf_paradraft.NgramDrafter())
