"""Drafters go to a Hub and come back as they were: the real client and real HTTP, on this
machine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import hf_hub_download
from loopback import REPO, USER
from lossless import assert_lossless
from peft import PeftModel
from tiny import make_tokenizer, near_copy, pard_folder, ppd_folder, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import hf_paradraft
from hf_paradraft.cli import app
from hf_paradraft.integration.publish import push_folder


def test_a_pard_drafter_comes_back_bit_for_bit(hub, tmp_path):
    drafter = near_copy(tiny_model())
    with pytest.raises(ValueError, match="pass tokenizer="):
        drafter.push_to_hub(REPO)
    drafter.push_to_hub(REPO, tokenizer=make_tokenizer())
    assert len(hub.repos["models", REPO].commits) == 2  # the empty repository's, and ours
    back = hf_paradraft.AutoDrafter.from_pretrained(REPO)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[name])
    assert back.mask_token_id == drafter.mask_token_id
    assert {"generation_config.json", "tokenizer.json", "README.md"} <= set(hub.files(REPO))
    stock = AutoModelForCausalLM.from_pretrained(REPO)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(stock(ids).logits, back(ids).logits)
    assert AutoTokenizer.from_pretrained(REPO).get_vocab() == make_tokenizer().get_vocab()
    back.push_to_hub(f"{USER}/again")  # its tokenizer is where it came from
    assert hub.files(f"{USER}/again")["model.safetensors"] == hub.files(REPO)["model.safetensors"]
    hub.reset()
    offline = hf_paradraft.AutoDrafter.from_pretrained(REPO, local_files_only=True)
    assert torch.equal(offline(ids).logits, back(ids).logits)
    assert hub.calls == []


def test_a_ppd_adapter_comes_back_bit_for_bit(hub, tmp_path, prompt):
    push_folder(ppd_folder(tmp_path), REPO)
    drafter = hf_paradraft.AutoDrafter.from_pretrained(REPO)
    assert drafter.config.accuracy == [[0.5, 0.2], [0.3, 0.1]]
    model = PeftModel.from_pretrained(tiny_model(), REPO)
    of_model = hf_paradraft.PpdDrafter.from_model(model)
    assert torch.equal(of_model.prompts, drafter.prompts)
    of_model.push_to_hub(f"{USER}/again")
    drafter.push_to_hub(f"{USER}/third")
    files = [
        hub.files(name)["adapter_model.safetensors"]
        for name in (REPO, f"{USER}/again", f"{USER}/third")
    ]
    assert files[0] == files[1] == files[2]
    target, options = tiny_model(), {"do_sample": False, "max_new_tokens": 12}
    plain = target.generate(prompt, **options)
    assert_lossless(target, drafter, prompt, **options)
    assert torch.equal(model.generate(input_ids=prompt, **options), plain)


def test_an_adapter_beside_its_base_is_published_alone(hub, tmp_path):
    folder = ppd_folder(tmp_path)
    tiny_model().save_pretrained(folder)
    push_folder(folder, REPO)
    assert "adapter_model.safetensors" in hub.files(REPO)
    assert not {"model.safetensors", "config.json", "generation_config.json"} & set(hub.files(REPO))


def test_large_files_are_not_sent_twice(hub, tmp_path):
    folder = pard_folder(tmp_path)
    push_folder(folder, REPO)
    push_folder(folder, f"{USER}/other")
    assert sum(call.startswith("PUT") for call in hub.calls) == 1


def test_private_branches_and_proposals(hub, tmp_path):
    folder = pard_folder(tmp_path)
    assert "discussions/1" in push_folder(folder, REPO, private=True, create_pr=True).pr_url
    assert hub.repos["models", REPO].private
    assert set(hub.files(REPO)) == {".gitattributes"}
    push_folder(folder, REPO, revision="next")
    assert set(hub.files(REPO)) == {".gitattributes"}
    assert "model.safetensors" in hub.files(REPO, "next")
    assert hf_paradraft.AutoDrafter.from_pretrained(REPO, revision="next").mask_token_id == 31
    with pytest.raises(OSError, match="neither a folder here nor a model"):
        hf_paradraft.AutoDrafter.from_pretrained(
            REPO, revision="next", token=False, cache_dir=tmp_path / "cache"
        )


def test_folders_that_cannot_be_published(hub, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match="no drafter"):
        push_folder(tmp_path / "empty", REPO)
    folder = pard_folder(tmp_path)
    for name in ("secrets.json", ".env.json", "notes.txt", "optimizer.safetensors"):
        (folder / name).write_bytes(
            (folder / "model.safetensors").read_bytes() if name.endswith("s") else b"{}"
        )
    push_folder(folder, f"{USER}/clean")
    assert not {"secrets.json", ".env.json", "notes.txt", "optimizer.safetensors"} & set(
        hub.files(f"{USER}/clean")
    )
    hub.reset()
    (folder / "optimizer.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    plain = {
        key: value
        for key, value in config.items()
        if key not in ("pard_token", "mask_token_id", "ptd_token_id")
    }
    for other, message in (
        (plain, "no mask token"),
        ({**config, "pard2": True}, "PARD-2"),
        ({**config, "dflash_config": {}}, "block_size"),
    ):
        (folder / "config.json").write_text(json.dumps(other))
        with pytest.raises(ValueError, match=message):
            push_folder(folder, REPO)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "bench.json").write_text("[{}]")
    with pytest.raises(ValueError, match="measure again"):
        push_folder(folder, REPO)
    (folder / "bench.json").unlink()
    (folder / "tokenizer_config.json").rename(folder / "elsewhere")
    with pytest.raises(OSError, match=r"no tokenizer_config\.json"):
        push_folder(folder, REPO)
    (folder / "elsewhere").rename(folder / "tokenizer_config.json")
    (folder / "model.safetensors").write_bytes(b"half")
    with pytest.raises(OSError, match="truncated or damaged"):
        push_folder(folder, REPO)
    assert hub.calls == []


def test_a_repositorys_code_is_never_run(hub, tmp_path, monkeypatch):
    folder = pard_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    odd = {
        **config,
        "model_type": "evil",
        "auto_map": {"AutoConfig": "configuration_evil.EvilConfig"},
    }
    (folder / "config.json").write_text(json.dumps(odd))
    (folder / "configuration_evil.py").write_text("raise SystemExit('ran')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for load in (
        lambda: hf_paradraft.AutoDrafter.from_pretrained(folder),
        lambda: push_folder(folder, REPO),
    ):
        with pytest.raises((ValueError, OSError)):
            load()
    assert isinstance(
        CliRunner().invoke(app, ["info", str(folder)]).exception, (ValueError, OSError)
    )


def test_push_and_info_commands_work_on_the_hub(hub, tmp_path):
    run = CliRunner().invoke
    result = run(app, ["push", str(pard_folder(tmp_path)), REPO, "--private", "--license", "mit"])
    assert result.exit_code == 0, result.output
    assert REPO in result.output
    result = run(app, ["info", REPO])
    assert "PARD drafter" in result.output
    assert not any("model.safetensors" in call for call in hub.calls if "resolve" in call)
    run(app, ["push", str(ppd_folder(tmp_path)), f"{USER}/adapter"])
    assert "50 %, 30 %" in run(app, ["info", f"{USER}/adapter"]).output
    assert run(app, ["push", "--recipe", f"{USER}/recipe"]).exit_code == 0
    assert "custom_generate/generate.py" in hub.files(f"{USER}/recipe")
    assert run(app, ["push", str(tmp_path)]).exit_code == 2


def test_weights_in_pieces_and_whole_replace_each_other(hub, tmp_path):
    """One commit each; whoever pulls never finds the weights of two drafters."""
    for number, size in enumerate(("5GB", "20KB", "5GB")):
        torch.manual_seed(number)
        drafter = near_copy(tiny_model(seed=number))
        drafter.save_pretrained(tmp_path / str(number), max_shard_size=size)
        make_tokenizer().save_pretrained(tmp_path / str(number))
        before = len(hub.repos["models", REPO].commits) if number else 0
        push_folder(tmp_path / str(number), REPO)
        # an empty one where it was made
        assert len(hub.repos["models", REPO].commits) - before <= 2
        names = set(hub.files(REPO))
        assert ("model.safetensors" in names) == (size == "5GB")
        assert (
            any(name.startswith("model-0") for name in names)
            == ("model.safetensors.index.json" in names)
            == (size != "5GB")
        )
        pulled = hf_paradraft.AutoDrafter.from_pretrained(REPO).state_dict()
        assert all(
            torch.equal(pulled[name], tensor) for name, tensor in drafter.state_dict().items()
        )


def test_a_whole_drafter_replaces_an_adapter(hub, tmp_path):
    push_folder(ppd_folder(tmp_path), REPO)
    push_folder(pard_folder(tmp_path), REPO)
    assert not {"adapter_config.json", "adapter_model.safetensors"} & set(hub.files(REPO))
    assert isinstance(hf_paradraft.AutoDrafter.from_pretrained(REPO), hf_paradraft.PardDrafter)
    with pytest.raises(ValueError, match="made for main"):
        push_folder(tmp_path / "drafter", REPO, create_pr=True, revision="next")


def test_a_card_in_unicode_is_read_in_any_locale(hub, tmp_path):
    folder = pard_folder(tmp_path)
    (folder / "README.md").write_text(
        "---\nlicense: mit\n---\nEin Entwürfler für τ ≥ 2\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "hf_paradraft.cli", "push", folder, REPO]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "τ ≥ 2" in Path(hf_hub_download(REPO, "README.md")).read_text(encoding="utf-8")
