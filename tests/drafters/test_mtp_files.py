"""MTP layers in files: a target's own, one in speculators' layout, float8, and those that are
refused.
"""

import json
import shutil

import pytest
import torch
from checkpoints import published_names
from huggingface_hub import HfApi
from lossless import assert_lossless
from safetensors.torch import load_file, save_file
from test_mtp import FAMILIES, IDS, brought, drafted_logits, expected_logits, target_of
from tiny import make_tokenizer, tiny_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import hf_paradraft
from hf_paradraft.cli import app
from hf_paradraft.drafters.mtp.config import MtpConfig
from hf_paradraft.drafters.mtp.model import MtpLayer
from hf_paradraft.integration.publish import describe


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
            whole = scales.repeat_interleave(16, 0)[: weight.shape[0]].repeat_interleave(16, 1)[
                :, : weight.shape[1]
            ]
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
    assert (
        packed - expected_logits(family, target_of(family))
    ).abs().max() > 1e-4  # they are rounded


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
    """By kind, from the Hub: of a target in several files only those that hold the layers are
    fetched.
    """
    folder, _ = brought("deepseek")
    tensors = load_file(folder / "model.safetensors")
    shutil.copytree(folder, tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").unlink()
    parts = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for name, tensor in tensors.items():
        parts[list(parts)[".2." in name]][name] = tensor
    for name, part in parts.items():
        save_file(part, tmp_path / "target" / name, metadata={"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {key: name for name, part in parts.items() for key in part},
    }
    (tmp_path / "target" / "model.safetensors.index.json").write_text(json.dumps(index))
    HfApi().create_repo("user/target")
    HfApi().upload_folder(repo_id="user/target", folder_path=tmp_path / "target")
    drafter = hf_paradraft.AutoDrafter.from_pretrained("user/target", kind="mtp")
    assert not any("00001-of" in call for call in hub.calls if "resolve" in call)
    target = target_of("deepseek")
    drafter.attach(target)
    torch.testing.assert_close(
        drafted_logits(target, drafter), expected_logits("deepseek", target), rtol=1e-4, atol=1e-4
    )
    said = dict(describe("user/target"))
    assert said["kind"] == "a target that brings MTP layers"
    assert said["MTP layers"].startswith("1, of 0.0 million")
    fetched = AutoModelForCausalLM.from_pretrained("user/target")
    assert hf_paradraft.MtpDrafter.from_target(fetched).config.layout == "DeepSeek"


def test_info_says_what_a_target_brings():
    said = dict(describe(str(brought("qwen3_5")[0])))
    assert said["MTP layers"].endswith("named as Qwen's")
    with pytest.raises(ValueError, match="names no mask token"):
        describe(str(brought("glm")[0].parent / "host"))


def test_the_command_line_takes_the_layers_that_a_target_brings(tmp_path):
    shutil.copytree(brought("glm")[0], tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    words = [
        "generate",
        "3 5 7",
        "--target",
        str(tmp_path / "target"),
        "--drafter",
        "mtp",
        "--max-new-tokens",
        "8",
    ]
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
        (
            lambda t: {**t, "model.mtp_block.0.mlp.up_proj.weight": torch.zeros(2, 2)},
            ValueError,
            "a layout that is not served",
        ),
        (
            lambda t: {
                **t,
                published_names("mimo", 0, 2)[0] + "self_attn.q_proj.weight_scale": torch.zeros(1),
            },
            ValueError,
            "packed",
        ),
        (
            lambda t: {
                name: tensor
                for name, tensor in t.items()
                if not name.endswith("0.mlp.up_proj.weight")
            },
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


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"num_layers": 2}, TypeError, "MtpConfig has no field num_layers"),
        ({"layout": "foo"}, ValueError, "layout is 'foo'; one of speculators, MiMo"),
    ],
)
def test_fields_and_layouts_that_mean_nothing_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        MtpConfig(target=tiny_model().config, **fields)
