"""MTP layers: logits against transformers' own and against the formula written out, and whatever a target's files may bring."""

import json
import shutil
from functools import cache

import pytest
import torch
from checkpoints import config_of, published_names, with_mtp
from huggingface_hub import HfApi
from lossless import assert_lossless
from published import features_behind
from safetensors.torch import load_file, save_file
from tiny import make_tokenizer, tiny_model
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel
from typer.testing import CliRunner

import hf_paradraft
from hf_paradraft.cli import app
from hf_paradraft.drafters.mtp.model import MtpLayer, MtpStep
from hf_paradraft.integration.info import describe

if not hasattr(MtpModel, "forward_layer"):
    pytest.skip("this transformers runs no layer by itself, which logits are compared with", allow_module_level=True)

FAMILIES = ["deepseek", "glm", "qwen3_5", "qwen3_5_moe", "qwen3_next", "mellum", "mimo", "exaone", "ernie"]
IDS = torch.tensor([[3, 5, 7, 11, 13, 17, 19, 23]])
brought = cache(with_mtp)


def target_of(family, count=1, dtype=torch.float32):
    folder, _ = brought(family, count)
    if family == "mimo":
        return Qwen2ForCausalLM.from_pretrained(folder, config=config_of(family), dtype=dtype).eval()
    options = {"experts_implementation": "eager"} if family != "qwen3_5" else {}  # the other kernel takes no float64
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


def exact(family):
    """In which number format equality is tested; a recurrent state and ERNIE's router are float32 whatever the weights are."""
    return torch.float32 if family.startswith(("qwen", "ernie")) else torch.float64


@torch.no_grad()
def recursion(layers, tokens, states, count):
    """One layer again and again, each time over everything: guesses of `count` tokens."""
    rows = []
    for _ in range(count):
        positions = torch.arange(1, tokens.shape[1] + 1)[None]
        behind = layers.forward_layer(0, states, positions, MtpCache(config=layers.config), input_ids=tokens)
        rows.append(layers._project_to_logits(behind[:, -1:]))
        states = torch.cat([states, behind[:, -1:]], 1)
        tokens = torch.cat([tokens, rows[-1].argmax(-1)], 1)
    return torch.cat(rows, 1)


def expected_logits(family, target, count=1, depth=3):
    """By transformers' `MtpModel`, beside the same target."""
    _, layers = brought(family, count)
    layers.tie_with_main_model(target)
    states = features_behind(hf_paradraft.MtpDrafter.from_target(target), target, IDS)["normed"]
    if count == 1:
        return recursion(layers, IDS[:, 1:], states, depth)
    positions = torch.arange(1, IDS.shape[1])[None]
    with torch.no_grad():
        return layers(IDS[:, 1:], states, None, positions, MtpCache(config=layers.config))[1]


def drafted_logits(target, drafter, depth=3):
    return drafter.draft_logits(IDS, features_behind(drafter, target, IDS), depth)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("depth", [1, 3])
def test_logits_are_those_of_transformers_own_layers(family, depth):
    target = target_of(family)
    logits = drafted_logits(target, hf_paradraft.MtpDrafter.from_target(target), depth)
    torch.testing.assert_close(logits, expected_logits(family, target, depth=depth), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["deepseek", "glm"])
@pytest.mark.parametrize("count", [2, 3])
def test_logits_of_several_layers_are_those_of_transformers_own(family, count):
    target = target_of(family, count)
    drafter = hf_paradraft.MtpDrafter.from_target(target)
    assert drafter.most_drafts == drafter.speculation_config.num_draft_tokens == count
    logits = drafted_logits(target, drafter, count)
    torch.testing.assert_close(logits, expected_logits(family, target, count), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_logits_are_those_of_the_formula_written_out():
    """MiMo's, of Qwen2's layers: norms, projection, attention with turned queries and keys, gated MLP, in float64."""
    target = target_of("mimo", dtype=torch.float64)
    tensors = {name: tensor.double() for name, tensor in load_file(brought("mimo")[0] / "model.safetensors").items()}
    layer = {name.removeprefix("model.mtp_layers.0."): tensor for name, tensor in tensors.items() if "mtp_layers" in name}
    heads, kv_heads, size = 4, 2, 8

    def norm(x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * layer[f"{name}.weight"]

    def turned(x, positions):
        angles = positions[:, None] / 10_000 ** (torch.arange(0, size, 2).double() / size)
        cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    def behind(tokens, states):
        embedded = tensors["model.embed_tokens.weight"][tokens]
        x = torch.cat([norm(states, "hidden_layernorm"), norm(embedded, "token_layernorm")], -1) @ layer["input_proj.weight"].T
        inner, count = norm(x, "input_layernorm"), len(tokens)
        q, k, v = (
            torch.nn.functional.linear(inner, layer[f"self_attn.{name}_proj.weight"], layer[f"self_attn.{name}_proj.bias"])
            .view(count, -1, size)
            .transpose(0, 1)
            for name in "qkv"
        )
        positions = torch.arange(count).double()
        q, k = turned(q, positions), turned(k, positions)
        k, v = (tensor.repeat_interleave(heads // kv_heads, 0) for tensor in (k, v))
        scores = (q @ k.transpose(1, 2) / size**0.5).masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        x = x + (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1) @ layer["self_attn.o_proj.weight"].T
        inner = norm(x, "post_attention_layernorm")
        gate, up = (inner @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return norm(x + (torch.nn.functional.silu(gate) * up) @ layer["mlp.down_proj.weight"].T, "final_layernorm")

    drafter = hf_paradraft.MtpDrafter.from_target(target)
    states, tokens, rows = features_behind(drafter, target, IDS)["normed"][0], IDS[0, 1:], []
    for _ in range(3):
        made = behind(tokens, states)
        rows.append(made[-1] @ tensors["lm_head.weight"].T)
        states, tokens = torch.cat([states, made[-1:]]), torch.cat([tokens, rows[-1].argmax()[None]])
    torch.testing.assert_close(
        drafted_logits(target, drafter)[0], torch.stack(rows), rtol=1e-4, atol=1e-5
    )  # its norms compute in float32


WRONG = {
    "fed back before the norm": "states",
    "halves swapped": "halves",
    "no norm before the embedding": "enorm",
    "no norm behind the layer": "norm",
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("family", ["deepseek", "qwen3_5"])
def test_wrong_variants_have_other_logits(family, what, monkeypatch):
    """The comparison above would notice each of the usual mistakes."""
    target = target_of(family)
    drafter = hf_paradraft.MtpDrafter.from_target(target)
    layer = drafter.layers[0]
    match WRONG[what]:
        case "states":
            norm, raw = layer.stack.norm, []
            norm.register_forward_pre_hook(lambda _, inputs: raw.append(inputs[0]))
            forward = MtpStep.forward_rows
            monkeypatch.setattr(MtpStep, "forward_rows", lambda *inputs: (forward(*inputs)[0], raw[-1]))
        case "halves":
            layer.hidden_first = not layer.hidden_first
        case "enorm":
            layer.enorm = torch.nn.Identity()
        case "norm":
            layer.stack.norm = torch.nn.Identity()
    logits, expected = drafted_logits(target, drafter), expected_logits(family, target)
    assert (logits - expected).abs().max() > 1e-2


def test_own_states_are_replaced_by_the_targets_once_they_are_verified():
    """What is guessed in a later round is what a fresh reading guesses: no entry of a guess stays in the cache."""
    target = target_of("deepseek", dtype=torch.float64)
    drafter = hf_paradraft.MtpDrafter.from_target(target)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(3, None, never_slower=False)
    from published import check_guesses, guesses_of_a_call

    answers = target.generate(IDS, do_sample=False, max_new_tokens=24, eos_token_id=None, pad_token_id=0)
    seen = guesses_of_a_call(drafter, target, IDS, answers, max_new_tokens=24)
    assert check_guesses(drafter, target, seen, 1e-6) > 5


@pytest.mark.parametrize("family", ["deepseek", "glm"])
def test_transformers_own_loop_drafts_the_same_tokens(family, monkeypatch):
    target = target_of(family, dtype=torch.float64)
    target._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*"]  # its own name is that of the published size
    drafts, candidates = {}, MTPCandidateGenerator.get_candidates

    def watched(self, input_ids, *args, **kwargs):
        proposed = candidates(self, input_ids, *args, **kwargs)
        if proposed[1] is not None:
            drafts[input_ids.shape[1]] = proposed[0][0, -1].item()
        return proposed

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", watched)
    options = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
    theirs = target.generate(IDS, use_mtp=True, **options)
    drafter = hf_paradraft.MtpDrafter.from_target(target)
    compared = 0
    for length, token in drafts.items():
        ids = theirs[:, :length]
        compared += 1
        assert drafter.draft_logits(ids, features_behind(drafter, target, ids), 1).argmax() == token
    assert compared > 5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [None, 9, "auto"])
def test_outputs_are_the_targets_own(family, size):
    target = target_of(family, dtype=exact(family))
    drafter = hf_paradraft.MtpDrafter.from_target(target)
    chain = size is None or family.startswith("qwen")  # a recurrent state takes no trees
    drafter.speculation_config = hf_paradraft.SpeculationConfig(3, None if chain else size, never_slower=False)
    assert_lossless(target, drafter, IDS, max_new_tokens=24, pad_token_id=0)
    torch.manual_seed(1)
    sampled = target.generate(IDS, do_sample=True, max_new_tokens=16, pad_token_id=0)
    torch.manual_seed(1)
    assert torch.equal(sampled, target.generate(IDS, do_sample=True, max_new_tokens=16, pad_token_id=0, assistant_model=drafter))


@pytest.mark.parametrize("size", [None, 9])
@pytest.mark.parametrize(
    ("family", "count"),
    [("deepseek", 1), ("deepseek", 3), ("mimo", 1), ("ernie", 1), ("qwen3_5", 1), ("qwen3_next", 1), ("qwen3_5_moe", 1)],
)
def test_outputs_of_ragged_batches_are_the_targets_own(family, size, count):
    """Of recurrent targets too, where each sequence has a state of its own; these take chains."""
    target = target_of(family, count, exact(family))
    drafter = hf_paradraft.MtpDrafter.from_target(target)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(3, size, never_slower=False)
    ids = torch.tensor([[3, 5, 7, 11, 13, 17], [0, 0, 0, 9, 2, 4], [0, 0, 0, 0, 0, 1]])
    assert_lossless(target, drafter, ids, attention_mask=(ids != 0).long(), max_new_tokens=20, pad_token_id=0)
    assert drafter.last_stats.num_drafted > 0


@pytest.mark.parametrize("family", ["deepseek", "glm"])
def test_float8_layers_are_multiplied_by_the_scales_of_their_blocks(family, tmp_path):
    """As DeepSeek publishes them; blocks at the edge are cut off."""
    folder = tmp_path / "target"
    shutil.copytree(brought(family)[0], folder)
    tensors = load_file(folder / "model.safetensors")
    expected = dict(tensors)
    for name, weight in list(tensors.items()):
        if "layers.2." in name and name.endswith("proj.weight") and weight.ndim == 2:
            rows, columns = (-(-size // 16) for size in weight.shape)
            scales = torch.rand(rows, columns) + 0.5
            whole = scales.repeat_interleave(16, 0)[: weight.shape[0]].repeat_interleave(16, 1)[:, : weight.shape[1]]
            tensors[name] = (weight / whole).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
            expected[name] = tensors[name].float() * whole
    target = target_of(family)
    drafters = []
    for content in (tensors, expected):
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
        target.config._name_or_path = target.name_or_path = str(folder)
        drafters.append(hf_paradraft.MtpDrafter.from_target(target))
    packed, plain = (drafted_logits(target, drafter) for drafter in drafters)
    torch.testing.assert_close(packed, plain)
    assert (packed - expected_logits(family, target_of(family))).abs().max() > 1e-4  # they are rounded


@pytest.mark.parametrize("count", [2, 3])
def test_texts_shorter_than_the_layers_are_many(count):
    """A layer for each step has nothing to read of a text that is shorter."""
    target = target_of("deepseek", count, torch.float64)
    for length in (1, 2, 3):
        assert_lossless(target, hf_paradraft.MtpDrafter.from_target(target), IDS[:, :length], max_new_tokens=8, pad_token_id=0)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "ernie"])
def test_a_layer_saved_in_speculators_layout_is_the_same(family, tmp_path):
    target = target_of(family)
    drafter = hf_paradraft.MtpDrafter.from_target(target)
    drafter.save_pretrained(tmp_path)
    again = hf_paradraft.AutoDrafter.from_pretrained(tmp_path)
    again.attach(target)
    assert isinstance(again, hf_paradraft.MtpDrafter)
    torch.testing.assert_close(drafted_logits(target, again), drafted_logits(target, drafter))
    assert dict(describe(str(tmp_path)))["kind"] == "MTP drafter"
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {"mtp_layers.0.input_proj.weight", "mtp_layers.0.token_layernorm.weight"} <= names


def test_a_repository_brings_its_layers_without_its_other_files(hub, tmp_path):
    """By kind, from the Hub: of a target in several files only those that hold the layers are fetched."""
    folder, _ = brought("deepseek")
    tensors = load_file(folder / "model.safetensors")
    shutil.copytree(folder, tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").unlink()
    parts = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for name, tensor in tensors.items():
        parts[list(parts)[".2." in name]][name] = tensor
    for name, part in parts.items():
        save_file(part, tmp_path / "target" / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: name for name, part in parts.items() for key in part}}
    (tmp_path / "target" / "model.safetensors.index.json").write_text(json.dumps(index))
    HfApi().create_repo("user/target")
    HfApi().upload_folder(repo_id="user/target", folder_path=tmp_path / "target")
    drafter = hf_paradraft.AutoDrafter.from_pretrained("user/target", kind="mtp")
    assert not any("00001-of" in call for call in hub.calls if "resolve" in call)
    target = target_of("deepseek")
    drafter.attach(target)
    torch.testing.assert_close(drafted_logits(target, drafter), expected_logits("deepseek", target), rtol=1e-4, atol=1e-4)
    said = dict(describe("user/target"))
    assert said["kind"] == "a target that brings MTP layers"
    assert said["MTP layers"].startswith("1, of 0.0 million")
    fetched = AutoModelForCausalLM.from_pretrained("user/target")
    assert hf_paradraft.MtpDrafter.from_target(fetched).mtp.layout == "DeepSeek"


def test_info_says_what_a_target_brings():
    said = dict(describe(str(brought("qwen3_5")[0])))
    assert said["MTP layers"].endswith("named as Qwen's")
    with pytest.raises(ValueError, match="names no mask token"):
        describe(str(brought("glm")[0].parent / "host"))


def test_the_command_line_takes_the_layers_that_a_target_brings(tmp_path):
    shutil.copytree(brought("glm")[0], tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    words = ["generate", "3 5 7", "--target", str(tmp_path / "target"), "--drafter", "mtp", "--max-new-tokens", "8"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output


def test_what_brings_nothing_that_can_be_served_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not loaded from files"):
        hf_paradraft.MtpDrafter.from_target(tiny_model())
    tiny_model().save_pretrained(tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="brings no MTP layers"):
        hf_paradraft.MtpDrafter.from_target(plain)
    with pytest.raises(ValueError, match="brings no MTP layers"):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "plain", kind="mtp")
    with pytest.raises(ValueError, match="no kind 'mpt'"):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "plain", kind="mpt")
    for change, error, message in (
        (lambda t: {**t, "model.mtp_block.0.mlp.up_proj.weight": torch.zeros(2, 2)}, ValueError, "a layout that is not served"),
        (
            lambda t: {**t, published_names("mimo", 0, 2)[0] + "self_attn.q_proj.weight_scale": torch.zeros(1)},
            ValueError,
            "packed",
        ),
        (
            lambda t: {name: tensor for name, tensor in t.items() if not name.endswith("0.mlp.up_proj.weight")},
            OSError,
            "are missing",
        ),
    ):
        folder = tmp_path / message
        shutil.copytree(brought("mimo")[0], folder)
        tensors = load_file(folder / "model.safetensors")
        if "layout" in message:
            tensors = {name: tensor for name, tensor in tensors.items() if "mtp" not in name}
        save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        target = target_of("mimo")
        target.config._name_or_path = target.name_or_path = str(folder)
        with pytest.raises(error, match=message):
            hf_paradraft.MtpDrafter.from_target(target)


def test_a_new_layer_is_of_the_targets_own_class():
    target = target_of("qwen3_next")
    drafter = hf_paradraft.MtpDrafter.from_target(target, new=True)
    assert type(drafter.layers[0].stack.layers[0]) is type(target.model.layers[-1])
    assert isinstance(drafter.layers[0], MtpLayer)
    assert_lossless(target, drafter, IDS, max_new_tokens=12, pad_token_id=0)
