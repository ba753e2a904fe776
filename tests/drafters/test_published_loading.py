"""Published drafters load and are saved again, or are refused in a sentence; no code of theirs is
run.
"""

import copy
import dataclasses
import json

import pytest
import torch
from layouts import LAYOUTS, write
from layouts.blocks import zlab
from layouts.eagle import nvidia
from layouts.parts import LAYERS, D, V
from published import EXPECTED, LENGTH, TARGET, features_of
from safetensors.torch import load_file, save_file
from tiny import pard_folder, tiny_model
from transformers import PreTrainedModel

import hf_paradraft
from hf_paradraft.drafters import kind_of
from hf_paradraft.drafters.blocks.config import BlockConfig
from hf_paradraft.drafters.formats.files import weights_in
from hf_paradraft.drafters.formats.folder import DrafterFolder
from hf_paradraft.files import read_json
from hf_paradraft.integration.publish import describe_kind


@pytest.mark.parametrize("name", LAYOUTS)
def test_saved_in_the_layout_of_speculators(name, load, tmp_path):
    drafter = load(name)
    ids, features = EXPECTED["ids"][None, :LENGTH], features_of(drafter)
    windows = (
        "z-lab, sliding",
        "z-lab, use_swa",
        "z-lab, causal",
        "JetSpec",
        "DeepSpec DSpark, behind the anchor",
        "transformers",
        "z-lab DFlash2",
        "DSpine",
    )
    if name in windows or "Gemma 4" in name or "Qwen3.5" in name:
        with pytest.raises(ValueError, match="keep its own files"):
            drafter.save_pretrained(tmp_path)
        return
    drafter.save_pretrained(tmp_path)
    again = hf_paradraft.AutoDrafter.from_pretrained(tmp_path)
    assert again.features == drafter.features
    again.target_head = drafter.target_head
    assert again.speculation_config == drafter.speculation_config
    assert torch.equal(drafter.draft_logits(ids, features, 3), again.draft_logits(ids, features, 3))
    asked = read_json(tmp_path / "config.json")["speculators_config"]  # by vLLM
    assert (
        asked["proposal_methods"][0]["speculative_tokens"]
        == drafter.speculation_config.num_draft_tokens
    )
    assert asked["verifier"]["name_or_path"] is None
    again.record_training({"target": "user/model"})
    again.save_pretrained(tmp_path)
    assert (
        read_json(tmp_path / "config.json")["speculators_config"]["verifier"]["name_or_path"]
        == "user/model"
    )
    kind = kind_of(saved := DrafterFolder(tmp_path))
    kind.check_folder(saved)
    assert dict(describe_kind(kind, saved))["kind"]
    assert (
        not {"embed_tokens.weight"} & load_file(tmp_path / "model.safetensors").keys()
        or drafter.embedding is not None
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_is_a_model_of_transformers(name, load):
    """Its sizes, dtype, attention and config are asked for as any model's."""
    drafter = load(name, attach=False)
    assert isinstance(drafter, PreTrainedModel)
    assert isinstance(drafter.config, type(drafter).config_class)
    assert drafter.num_parameters() == sum(part.numel() for part in drafter.parameters())
    drafter.set_attn_implementation("eager")
    assert drafter.stack.config._attn_implementation == "eager"
    config = drafter.config.to_dict()
    assert config["layers"]["hidden_size"] == drafter.hidden_size
    assert copy.deepcopy(drafter.config).to_dict() == config
    assert "hidden_size" in str(drafter.config)


def test_a_field_that_a_config_does_not_have_is_refused():
    config = hf_paradraft.DFlashDrafter.from_target(TARGET, 0, 1, 4, 2).config
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(BlockConfig)}
    with pytest.raises(TypeError, match="BlockConfig has no field embeding_scale"):
        BlockConfig(**fields, embeding_scale=2.0)


@pytest.mark.parametrize(("proposed", "fill_in"), [(None, False), (6, False), (5, True)])
def test_an_anchor_that_is_not_written_follows_from_what_is_proposed(load, proposed, fill_in):
    """A block whose newest token guesses nothing proposes a token less than it has rows."""
    config, tensors = LAYOUTS["speculators DSpark"]()
    del config["sample_from_anchor"]
    config["block_size"] = 6
    if proposed is not None:
        methods = [{"proposal_type": "greedy", "speculative_tokens": proposed}]
        config["speculators_config"] = {"algorithm": "dspark", "proposal_methods": methods}
    drafter = load((config, tensors), attach=False)
    assert drafter.config.fill_in is fill_in
    assert drafter.most_drafts == 6 - fill_in
    assert dict(drafter.config.notes)["anchor"].startswith("not in the config")


def test_layers_named_at_the_top(load):
    """By `DFlashDraftModel` it is z-lab's, whose first row guesses nothing."""
    config, tensors = zlab()
    nested = config.pop("dflash_config")
    drafter = load(({**config, **nested}, tensors))
    assert drafter.config.fill_in is True
    assert drafter.features == (1, 3, 5)


def test_a_padded_head_is_cut(load):
    config, tensors = LAYOUTS["DeepSpec DSpark"]()
    plain, padded = load((config, tensors)), dict(tensors)
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        padded[name] = torch.nn.functional.pad(tensors[name], (0, 0, 0, 8), value=9.0)
    drafter = load(({**config, "draft_vocab_size": V + 8}, padded))
    ids, features = EXPECTED["ids"][None, :LENGTH], features_of(drafter)
    assert torch.equal(plain.draft_logits(ids, features, 3), drafter.draft_logits(ids, features, 3))


def test_pickled_weights_are_loaded_where_that_is_safe(load, tmp_path, monkeypatch):
    config, tensors = LAYOUTS["SafeAI"]()
    write(tmp_path / "pickled", config, tensors, pickled=True)
    drafter, plain = hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "pickled"), load("SafeAI")
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, drafter.state_dict()[name])

    class Evil:
        def __reduce__(self):
            return print, ("ran",)

    write(tmp_path / "evil", config, {})
    (tmp_path / "evil" / "model.safetensors").unlink()
    torch.save({"a": Evil()}, tmp_path / "evil" / "pytorch_model.bin")
    with pytest.raises(OSError, match="can be read safely"):
        hf_paradraft.Eagle3Drafter.from_pretrained(tmp_path / "evil")
    with pytest.raises(OSError, match="save_pretrained it"):
        kind_of(saved := DrafterFolder(tmp_path / "pickled")).check_folder(saved)


def test_targets_that_do_not_fit_are_refused_on_attaching(load):
    drafter = load("z-lab", attach=False)
    with pytest.raises(ValueError, match="hidden states of 32 numbers"):
        drafter.attach(tiny_model("llama", num_hidden_layers=LAYERS, hidden_size=64))
    with pytest.raises(ValueError, match="target of 8 layers, and this one has 4"):
        drafter.attach(tiny_model("llama", num_hidden_layers=4))
    with pytest.raises(ValueError, match="more than 7 layers"):
        load("speculators DFlash", attach=False).attach(tiny_model("llama", num_hidden_layers=6))
    with pytest.raises(ValueError, match="count outputs"):
        load(nvidia([0, 2, 7]), attach=False).attach(TARGET)
    with pytest.raises(ValueError, match="ids up to"):
        load("SafeAI", attach=False).attach(
            tiny_model("llama", num_hidden_layers=LAYERS, vocab_size=20)
        )
    with pytest.raises(ValueError, match="mask token 900, and its embedding ends at 31"):
        load(zlab({"mask_token_id": 900}), attach=False).attach(TARGET)
    with pytest.raises(ValueError, match="a vocabulary of 5000, and the target's has 32"):
        load(zlab(vocab_size=5000), attach=False).attach(TARGET)
    load(zlab(vocab_size=40), attach=False).attach(TARGET)  # padded
    drafter.speculation_config.num_draft_tokens = 9
    with pytest.raises(ValueError, match="guesses 4 tokens at most"):
        TARGET.generate(torch.tensor([[1, 2]]), assistant_model=drafter, max_new_tokens=4)
    with pytest.raises(ValueError, match="attach"):
        load("z-lab", attach=False).draft_logits(
            torch.tensor([[1, 2]]), {key: torch.zeros(1, 1, D) for key in (1, 3, 5)}
        )
    with pytest.raises(ValueError, match="guesses 4 tokens at most"):
        drafter.draft_logits(torch.tensor([[1, 2]]))
    drafter.speculation_config.num_draft_tokens = 4
    with pytest.raises(ValueError, match="pass features"):
        drafter.draft_logits(torch.tensor([[1, 2]]))


@pytest.mark.parametrize("name", ["z-lab", "SafeAI", "DeepSpec Gemma 4 DSpark"])
def test_positions_are_exact_in_every_dtype(name, tmp_path):
    """Files are in bf16, whose three digits are too few for an angle."""
    config, tensors = LAYOUTS[name]()
    exact = dict(
        hf_paradraft.AutoDrafter.from_pretrained(
            write(tmp_path / "a", config, tensors)
        ).stack.rotary_emb.named_buffers()
    )
    half = {
        key: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for key, tensor in tensors.items()
    }
    folder = write(tmp_path / "b", config, half)
    saved, asked = (
        hf_paradraft.AutoDrafter.from_pretrained(folder),
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "a", dtype="bfloat16"),
    )
    for drafter in (saved, asked, copy.deepcopy(saved).half(), saved.to("cpu")):
        assert drafter.dtype in (torch.bfloat16, torch.float16)
        for buffer, angles in drafter.stack.rotary_emb.named_buffers():
            assert angles.dtype == torch.float32
            assert torch.equal(angles, exact[buffer])
        if "Gemma" in name:
            assert float(drafter.embedding.embed_scale) == pytest.approx(D**0.5, rel=1e-6)
    empty = copy.deepcopy(asked).to("meta").to_empty(device="cpu")
    assert not any(buffer.is_meta for buffer in empty.buffers())


@pytest.mark.parametrize("name", ["z-lab, sliding", "speculators EAGLE-3", "speculators P-EAGLE"])
def test_attention_as_it_is_asked_for(name, load, tmp_path):
    folder = write(tmp_path, *LAYOUTS[name]())
    plain = load(name)
    eager = hf_paradraft.AutoDrafter.from_pretrained(folder, attn_implementation="eager")
    eager.target_head = plain.target_head
    ids, features = EXPECTED["ids"][None, :LENGTH], features_of(plain)
    attentions = {
        drafter.stack.layers[0].self_attn.config._attn_implementation for drafter in (plain, eager)
    }
    assert attentions == {"sdpa", "eager"}
    torch.testing.assert_close(
        plain.draft_logits(ids, features, 3),
        eager.draft_logits(ids, features, 3),
        rtol=1e-4,
        atol=1e-5,
    )
    with pytest.raises(ValueError, match="is sdpa or eager, not flash_attention_2"):
        hf_paradraft.AutoDrafter.from_pretrained(folder, attn_implementation="flash_attention_2")


def test_remote_code_is_refused(load, tmp_path):
    write(tmp_path, *zlab())
    with pytest.raises(ValueError, match="remote code"):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path, trust_remote_code=True)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_positions_in_several_dimensions_are_those_of_texts(key, kind, load):
    """As transformers reads them; it was a KeyError."""
    config, tensors = LAYOUTS["SafeAI"]()
    theta = {"rope_theta": config["rope_theta"]} if key == "rope_parameters" else {}
    several = load(({**config, key: {kind: "mrope", "mrope_section": [2, 1, 1], **theta}}, tensors))
    plain = load((config, tensors))
    ids, features = torch.arange(1, LENGTH + 1)[None], features_of(plain)
    assert torch.equal(plain.draft_logits(ids, features, 3), several.draft_logits(ids, features, 3))


def test_an_index_decides_which_files_are_read(tmp_path):
    """A whole file of an older epoch lay beside new pieces, and won."""
    config, tensors = LAYOUTS["z-lab"]()
    folder = write(
        tmp_path / "drafter",
        config,
        {name: torch.full_like(tensor, 7.0) for name, tensor in tensors.items()},
    )
    names = sorted(tensors)
    pieces = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = {name: pieces[number % 2] for number, name in enumerate(names)}
    for piece in pieces:
        save_file({name: tensors[name] for name in names if index[name] == piece}, folder / piece)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    loaded = weights_in(folder)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in loaded.items())
    hf_paradraft.AutoDrafter.from_pretrained(folder)
    (folder / pieces[1]).unlink()
    with pytest.raises(OSError, match=r"lacks model-00002-of-00002\.safetensors"):
        hf_paradraft.AutoDrafter.from_pretrained(folder)
    (
        folder / "model.safetensors.index.json"
    ).unlink()  # then the whole file is read, and the piece that is left is not
    assert all(bool((tensor == 7).all()) for tensor in weights_in(folder).values())


def test_a_causal_lm_with_two_sets_of_weights_is_refused(tmp_path):
    """transformers reads the whole file, and nobody knows which is meant."""
    folder = pard_folder(tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file(weights, folder / "model-00001-of-00001.safetensors")
    index = {
        "metadata": {},
        "weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors"),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="in one piece and in several"):
        hf_paradraft.AutoDrafter.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    hf_paradraft.AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize(
    "options", [{"dtype": "float17"}, {"dtype": "int8"}, {"dtype": 3}, {"device_map": "gpu"}]
)
def test_a_dtype_or_device_that_is_none_is_refused(load, tmp_path, options):
    load("z-lab", attach=False).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"dtype|device"):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path, **options)


def test_heads_of_other_kinds_are_no_options():
    with pytest.raises(TypeError, match="markov_rank"):
        hf_paradraft.DFlashDrafter.from_target(TARGET, 31, num_features=2, markov_rank=8)
