"""UNO: a target that guesses over noise, with an adapter that nothing else passes."""

import json

import pytest
import torch
from lossless import assert_lossless
from published import check_guesses, guesses_of_a_call
from tiny import EOS, tiny_model, with_noise_adapter
from transformers import DynamicCache, OPTConfig, OPTForCausalLM

from hf_paradraft import AutoDrafter, SpeculationConfig, UnoDrafter
from hf_paradraft.drafters.formats.folder import DrafterFolder
from hf_paradraft.drafters.uno import noise_at
from hf_paradraft.integration.publish import describe_kind
from hf_paradraft.names import with_cache
from hf_paradraft.protocol.drafter import KeyValues

PROMPTS = torch.tensor([[0, 0, 0, 5, 9], [1, 2, 3, 4, 5], [0, 9, 8, 7, 6]])
SEEN = (PROMPTS != 0).long()
TARGETS = ["llama", "qwen3", "mistral-sliding", "gpt2"]


@torch.no_grad()
def two_forwards(target, adapted, ids, noise):
    """The formula by PEFT alone: text and newest token without the adapter, then noise with it over
    their keys and values.
    """
    cache = DynamicCache(config=target.config)
    given = with_cache(target, cache)
    logits = [target(ids, use_cache=True, **given).logits[:, -1:]]
    if noise.shape[1]:
        logits.append(adapted.get_base_model()(noise, use_cache=True, **given).logits)
    return torch.cat(logits, dim=1)


@torch.no_grad()
def features_behind(target, ids):
    cache = DynamicCache(config=target.config)
    target(ids[:, :-1], use_cache=True, **with_cache(target, cache))
    return {
        KeyValues(index): torch.cat(
            [part.transpose(1, 2).flatten(2) for part in (layer.keys, layer.values)], dim=-1
        )
        for index, layer in enumerate(cache.layers)
    }


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("length", [2, 9])
def test_logits_are_those_of_peft(kind, length):
    """The first row is the target's own, noise sees noise, and only noise passes the adapter."""
    target = tiny_model(kind)
    adapted, drafter = with_noise_adapter(target)
    drafter.attach(target)
    ids = torch.randint(1, EOS, (2, length), generator=torch.Generator().manual_seed(length))
    noise = noise_at(torch.arange(length, length + 3), target.config.vocab_size).expand(2, -1)
    logits = drafter.draft_logits(ids, features_behind(target, ids), 4)
    torch.testing.assert_close(logits, two_forwards(target, adapted, ids, noise))
    # Others are told apart: the adapter in the newest token's row too, other noise, and noise that
    # sees no noise.
    everywhere = two_forwards(adapted.get_base_model(), adapted, ids, noise)
    other = two_forwards(target, adapted, ids, noise + 1)
    alone = two_forwards(target, adapted, ids, noise[:, 2:])
    for wrong, right in (
        (everywhere, logits),
        (other[:, 1:], logits[:, 1:]),
        (alone[:, 1:], logits[:, 3:]),
    ):
        assert (wrong - right).abs().max() > 1e-3


@pytest.mark.parametrize("size", [None, 7, "auto"])
@pytest.mark.parametrize("kind", TARGETS)
def test_outputs_are_the_targets_and_guesses_those_of_whole_texts(kind, size):
    target = tiny_model(kind)
    before = {name: parameter.clone() for name, parameter in target.state_dict().items()}
    _, drafter = with_noise_adapter(target)
    drafter.speculation_config = SpeculationConfig(4, size, never_slower=False)
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "attention_mask": SEEN}
    assert_lossless(target, drafter, PROMPTS, max_new_tokens=24, **options)
    assert drafter.last_stats.acceptance_by_position[0] == 1  # the first guess is the target's own
    assert all(
        torch.equal(before[name], parameter) for name, parameter in target.state_dict().items()
    )
    assert all(parameter.requires_grad for parameter in target.parameters())
    if kind in ("llama", "qwen3"):
        assert (
            check_guesses(drafter, target, guesses_of_a_call(drafter, target, PROMPTS, **options))
            > 5
        )


def test_a_seed_has_its_own_text():
    target = tiny_model("llama")
    _, drafter = with_noise_adapter(target)
    drafter.speculation_config = SpeculationConfig(4, 7, never_slower=False)
    torch.manual_seed(11)
    options = {"do_sample": True, "max_new_tokens": 24, "pad_token_id": 0, "eos_token_id": None}
    plain, state = target.generate(PROMPTS[1:2], **options), torch.get_rng_state()
    torch.manual_seed(11)
    assert torch.equal(target.generate(PROMPTS[1:2], assistant_model=drafter, **options), plain)
    assert torch.equal(torch.get_rng_state(), state)


def test_saved_and_loaded(tmp_path):
    target = tiny_model("llama")
    _, drafter = with_noise_adapter(target)
    drafter.speculation_config = SpeculationConfig(3, None)
    drafter.save_pretrained(tmp_path)
    again = AutoDrafter.from_pretrained(tmp_path)
    assert isinstance(again, UnoDrafter)
    assert again.speculation_config == drafter.speculation_config
    ids = torch.tensor([[1, 2, 3]])
    for one in (drafter, again):
        one.attach(target)
    features = features_behind(target, ids)
    assert torch.equal(again.draft_logits(ids, features, 3), drafter.draft_logits(ids, features, 3))
    assert ("rank", 4) in describe_kind(UnoDrafter, DrafterFolder(tmp_path))
    (
        tmp_path / "paradraft.json"
    ).unlink()  # as others publish it, an adapter does not say whose it is
    with pytest.raises(ValueError, match=r"UnoDrafter\.from_pretrained if it is UNO's"):
        AutoDrafter.from_pretrained(tmp_path)
    assert UnoDrafter.from_pretrained(tmp_path).speculation_config == SpeculationConfig(5)


def changed(folder, **values):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


REFUSED = {
    "of type IA3": lambda folder: changed(folder, peft_type="IA3"),
    r"rows of noise \(bias\)": lambda folder: changed(folder, bias="all"),
    "modules_to_save": lambda folder: changed(folder, modules_to_save=["lm_head"]),
    "has no adapter_model": lambda folder: (folder / "adapter_model.safetensors").unlink(),
}


@pytest.mark.parametrize("message", REFUSED)
def test_other_adapters_are_refused(message, tmp_path):
    with_noise_adapter(tiny_model("llama"))[1].save_pretrained(tmp_path)
    REFUSED[message](tmp_path)
    with pytest.raises((ValueError, OSError), match=message):
        UnoDrafter.from_pretrained(tmp_path)


def test_targets_that_it_was_not_made_for_are_refused():
    _, drafter = with_noise_adapter(tiny_model("llama"))
    with pytest.raises(ValueError, match="was made for another target"):
        drafter.attach(tiny_model("llama", hidden_size=16))
    with pytest.raises(ValueError, match="shares keys and values between layers"):
        drafter.attach(tiny_model("gemma4"))
    with pytest.raises(ValueError, match="does not fit"):
        drafter.attach(tiny_model("llama", num_hidden_layers=1))
    tensors = {
        name.replace(".mlp.", ".mlp.experts.0."): tensor for name, tensor in drafter.tensors.items()
    }
    routed = UnoDrafter(drafter.config, tensors)
    with pytest.raises(ValueError, match="changes experts"):
        routed.attach(tiny_model("llama"))
    drafter.speculation_config = SpeculationConfig(4, compile=True)
    with pytest.raises(ValueError, match="leave compile off"):
        drafter.attach(tiny_model("llama"))


def test_a_batch_fills_learned_positions():
    target = tiny_model("gpt2", max_position_embeddings=32)
    drafter = with_noise_adapter(target, std=0.05)[1]
    drafter.speculation_config.never_slower = False
    prompts = [
        torch.randint(1, 28, (size,), generator=torch.Generator().manual_seed(size)).tolist()
        for size in (20, 13, 5)
    ]
    assert_lossless(target, drafter, prompts, max_new_tokens=13, eos_token_id=None)


def test_a_target_that_is_resized_between_calls(prompt):
    target = tiny_model()
    drafter = with_noise_adapter(target, std=0.05)[1]
    drafter.speculation_config.never_slower = False
    assert_lossless(target, drafter, prompt)
    target.resize_token_embeddings(29)
    assert_lossless(target, drafter, prompt % 29)


def test_a_target_that_flattens_its_texts_is_refused(prompt):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 32,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    target = OPTForCausalLM(
        OPTConfig(**sizes, max_position_embeddings=64, word_embed_proj_dim=32)
    ).eval()
    drafter = with_noise_adapter(target, std=0.05)[1]
    with pytest.raises(ValueError, match="see rows without their texts"):
        target.generate(prompt, assistant_model=drafter, max_new_tokens=4)
