"""PARD drafters in files: what is refused, whose tokens they have, and options of other
versions.
"""

import json

import pytest
import torch
from lossless import assert_lossless
from safetensors.torch import load_file, save_file
from test_pard import edit_config
from tiny import MASK, VOCAB, make_tokenizer, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

import hf_paradraft


@pytest.fixture
def folder(drafter, tmp_path):
    drafter.save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def test_a_model_without_a_mask_token_is_refused(target, tmp_path):
    target.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="names no mask token"):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="names no mask token"):
        hf_paradraft.PardDrafter.from_causal_lm(target)


@pytest.mark.parametrize("mask_token_id", [VOCAB, -1, True, "5"])
def test_mask_token_without_an_embedding(target, mask_token_id):
    with pytest.raises(ValueError, match="has no embedding"):
        hf_paradraft.PardDrafter.from_causal_lm(target, mask_token_id=mask_token_id)


def test_mask_token_keys_that_disagree_are_refused(folder):
    edit_config(folder, pard_token=3)
    with pytest.raises(ValueError, match="different mask tokens"):
        hf_paradraft.AutoDrafter.from_pretrained(folder)
    assert hf_paradraft.PardDrafter.from_pretrained(folder, mask_token_id=3).mask_token_id == 3


def test_truncated_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(OSError, match="truncated or damaged"):
        hf_paradraft.AutoDrafter.from_pretrained(folder)


def test_missing_weights(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OSError, match="lacks 1 of the model's weights"):
        hf_paradraft.AutoDrafter.from_pretrained(folder)


def test_folders_without_a_model_are_refused(tmp_path):
    with pytest.raises(OSError, match=r"no config\.json"):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path)
    with pytest.raises(OSError, match="neither a folder"):
        hf_paradraft.AutoDrafter.from_pretrained("nobody/nothing")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="PEFT adapter"):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path)
    with pytest.raises(OSError, match="from_pretrained"):
        hf_paradraft.AutoDrafter()


def test_remote_code_is_never_run(folder):
    with pytest.raises(ValueError, match="trust_remote_code"):
        hf_paradraft.PardDrafter.from_pretrained(folder, trust_remote_code=True)


def test_different_tokenizers(target, tmp_path):
    for name, words in (("one", "a b c d"), ("two", "a b d c")):
        target.save_pretrained(tmp_path / name)
        make_tokenizer(words).save_pretrained(tmp_path / name)
    big = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    drafter = hf_paradraft.PardDrafter.from_causal_lm(tmp_path / "two", mask_token_id=MASK)
    prompt = torch.tensor([[1, 2, 3]])
    with pytest.raises(
        ValueError, match=r"2 of 32 shared ids mean other tokens.*'c' for the target and 'd'"
    ):
        big.generate(prompt, assistant_model=drafter, max_new_tokens=5)
    with pytest.raises(ValueError, match="first id 2"):
        target.generate(
            prompt,
            assistant_model=drafter,
            tokenizer=make_tokenizer("a b c d"),
            assistant_tokenizer=make_tokenizer("a b d c"),
            max_new_tokens=5,
        )


def test_same_tokenizer_by_name(tmp_path, prompt):
    """Padded vocabularies of one family, as people have them on disk."""
    for name, size in (("big", 40), ("small", 32)):
        tiny_model(vocab_size=size).save_pretrained(tmp_path / name)
        make_tokenizer().save_pretrained(tmp_path / name)
    big = AutoModelForCausalLM.from_pretrained(tmp_path / "big").eval()
    drafter = hf_paradraft.PardDrafter.from_causal_lm(str(tmp_path / "small"), mask_token_id=MASK)
    assert_lossless(big, drafter, prompt, max_new_tokens=10)


def test_a_model_that_is_no_causal_lm(target):
    with pytest.raises(ValueError, match="no causal language model"):
        hf_paradraft.PardDrafter.from_causal_lm(
            T5ForConditionalGeneration(
                T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
            ),
            mask_token_id=MASK,
        )
    with pytest.raises(ValueError, match="not the causal LM"):
        hf_paradraft.PardDrafter.from_causal_lm(target.model, mask_token_id=MASK)


def test_config_of_the_base_is_untouched(folder):
    """Registering our class anywhere would hijack other loads."""
    assert type(AutoConfig.from_pretrained(folder)).__module__.startswith("transformers.")


@pytest.mark.parametrize(
    "saved", [None, [1], {"speculation_config": None}, {"speculation_config": {"from_tomorrow": 1}}]
)
def test_options_of_another_version_do_not_stop_loading(folder, saved):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "paradraft": saved}))
    assert (
        hf_paradraft.AutoDrafter.from_pretrained(folder).speculation_config
        == hf_paradraft.SpeculationConfig()
    )


@pytest.mark.parametrize("kind", [hf_paradraft.PardDrafter, hf_paradraft.AutoregressiveDrafter])
def test_a_base_that_says_how_to_sample_and_does_not(kind, tmp_path):
    """Many models come so, and saving failed at a training's first checkpoint."""
    base = tiny_model()
    base.generation_config.temperature, base.generation_config.top_p = 0.6, 0.9
    options = {"mask_token_id": 31} if kind is hf_paradraft.PardDrafter else {}
    kind.from_causal_lm(base, **options).save_pretrained(tmp_path)
    hf_paradraft.AutoDrafter.from_pretrained(tmp_path)
