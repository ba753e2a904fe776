"""Where a run may write, and what it goes on from: no source is an output, and only whole
checkpoints count.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_tokenizer, pard_folder, tiny_model
from transformers import TrainingArguments
from typer.testing import CliRunner

import hf_paradraft
from hf_paradraft.cli import app
from hf_paradraft.training.output import (
    Checkpoints,
    check_output,
    newest_checkpoint,
    replace_model,
)
from hf_paradraft.training.target import open_model

SETTINGS = {"kind": "pard", "seed": 0}


def checkpoint(folder, step, settings=SETTINGS):
    folder = folder / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / ".paradraft").touch()
    save_file({"weight": torch.zeros(3)}, folder / "model.safetensors")
    if settings is not None:
        (folder / "run.json").write_text(json.dumps(settings))
    return folder


def test_the_newest_whole_checkpoint_is_resumed(tmp_path, caplog):
    """One without the record that is written last was being written when its run was killed."""
    assert newest_checkpoint(tmp_path / "none", SETTINGS) is None
    half = checkpoint(tmp_path, 6, settings=None)
    assert newest_checkpoint(tmp_path, SETTINGS) is None
    assert f"{half} is not whole" in caplog.text
    first = checkpoint(tmp_path, 2)
    (tmp_path / "checkpoint-best").mkdir()
    checkpoint(tmp_path, 3).rename(tmp_path / "checkpoint-3.formerly")
    theirs = checkpoint(tmp_path, "4.former", {"wandb": 1})
    (theirs / ".paradraft").unlink()
    assert newest_checkpoint(tmp_path, SETTINGS) == str(first)
    aside = checkpoint(tmp_path, "4.former-1")
    assert newest_checkpoint(tmp_path, SETTINGS) == str(aside)
    last = checkpoint(tmp_path, 10)
    assert newest_checkpoint(tmp_path, SETTINGS) == str(last)


def test_a_run_with_other_settings_is_not_resumed(tmp_path):
    """Other data changed the vocabulary under a trained head, silently."""
    checkpoint(tmp_path, 2, {**SETTINGS, "seed": 1})
    with pytest.raises(ValueError, match=r"other settings.*seed: 1 there, 0 now"):
        newest_checkpoint(tmp_path, SETTINGS)
    # earlier versions named the optimiser
    ours = checkpoint(tmp_path, 1, {**SETTINGS, "optimiser": "muon"})
    assert newest_checkpoint(tmp_path, SETTINGS) == str(ours)
    # its mark is empty where the disk was full
    Checkpoints(SETTINGS, TrainingArguments(str(tmp_path)), str(ours))


def test_a_model_is_replaced_whole_or_not_at_all(tmp_path):
    """A full disk, in the middle of the weights."""
    (tmp_path / "model.safetensors").write_text("old")
    (tmp_path / "bench.json").write_text("old")

    def save(folder):
        (folder / "config.json").write_text("new")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        replace_model(tmp_path, save)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "model.safetensors": "old",
        "bench.json": "old",
    }
    replace_model(tmp_path, lambda folder: (folder / "model.safetensors").write_text("new"))
    assert (tmp_path / "model.safetensors").read_text() == "new"
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask()
    assert (tmp_path / "former" / "bench.json").read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["former", "model.safetensors"]
    assert sorted(file.name for file in (tmp_path / "former").iterdir()) == ["bench.json"]
    replace_model(
        tmp_path / "other", lambda folder: (folder / "model.safetensors").write_text("old")
    )
    replace_model(
        tmp_path / "other", lambda folder: (folder / "model.safetensors").write_text("new")
    )
    assert [file.name for file in (tmp_path / "other").iterdir()] == ["model.safetensors"]


def test_what_was_said_of_the_same_weights_holds(tmp_path):
    """A run that had made all its steps was resumed, and its measurements left."""
    for text in ("one", "two"):
        replace_model(tmp_path, lambda folder, text=text: [
            (folder / "model.safetensors").write_text("same"),
            (folder / "config.json").write_text(text)
        ])  # fmt: skip
        (tmp_path / "bench.json").write_text("measured")
    assert (tmp_path / "config.json").read_text() == "two"
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "bench.json",
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("moves", range(1, 6))
def test_no_config_lies_beside_weights_of_another_model(moves, tmp_path, monkeypatch):
    """A run that was killed between two moves left the new config with the old weights."""
    names = "config.json", "model.safetensors", "warp_model.safetensors"
    for name in names:
        (tmp_path / name).write_text("old")

    def save(folder):
        for name in names:
            (folder / name).write_text("new")

    left, replace = [moves], Path.replace

    def killed(self, target):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with suppress(KeyboardInterrupt):
            replace_model(tmp_path, save)
    assert len({(tmp_path / name).read_text() for name in names if (tmp_path / name).exists()}) <= 1
    replace_model(tmp_path, save)
    assert {(tmp_path / name).read_text() for name in names} == {"new"}
    assert {file.name for file in tmp_path.iterdir()} - {"former"} == {*names}


def umask():
    os.umask(mask := os.umask(0))
    return mask


def test_outputs_that_are_or_hold_a_source_are_refused(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for source, output in (
        (model, model),
        (model, tmp_path),
        (tmp_path / "x" / ".." / "model", model),
    ):
        (tmp_path / "x").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match="folder of its own"):
            check_output(output, False, True, "user/name", None, source)
    check_output(model / "drafter", False, True, model, "user/name", None)


KINDS = {
    "pard": ["--model", "{model}", "--mask-token-id", "31"],
    "ppd": ["--target", "{model}"],
    "eagle3": ["--target", "{model}"],
    "parallelspec": ["--target", "{model}"],
    "dspark": ["--target", "{model}"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_training_never_overwrites_the_model_that_it_reads(kind, tmp_path):
    """With --overwrite into the model's own folder, its weights were gone, and the command ended
    with 0.
    """
    model = tmp_path / "model"
    tiny_model(dtype=torch.float32).save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "a b c d e f g h"}) + "\n")
    options = [part.format(model=model) for part in KINDS[kind]]
    command = [
        "train",
        kind,
        *options,
        "--train-file",
        str(rows),
        "--output-dir",
        str(model),
        "--overwrite",
        "--max-steps",
        "1",
    ]
    result = CliRunner().invoke(app, command)
    assert "folder of its own" in str(result.exception)
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before


def test_the_version_option_prints_the_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert hf_paradraft.__version__ in result.output


def test_a_parallelspec_drafter_needs_a_mask_and_a_layer(tmp_path):
    for name, value in (("num_masks", "-1"), ("num_layers", "0")):
        command = [
            "train",
            "parallelspec",
            "--target",
            "x",
            "--train-file",
            "y",
            "--output-dir",
            str(tmp_path / "out"),
        ]
        raised = CliRunner().invoke(app, [*command, f"--{name.replace('_', '-')}", value]).exception
        assert f"{name} must be at least 1, but is {value}" in str(raised)


def test_info_shows_no_control_sequences(tmp_path):
    drafter = hf_paradraft.ParallelSpecDrafter.from_target(tiny_model(dtype=torch.float32))
    drafter.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["paradraft"]["training"] = {"target": "user/\x1b[31mred\x07"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["info", str(tmp_path)])
    assert result.exit_code == 0
    assert "red" in result.output
    assert "\x1b" not in result.output
    assert "\x07" not in result.output


@pytest.mark.parametrize(
    ("damage", "message"),
    [("cut", "truncated or damaged"), ("headless", "lacks 1 of the model's weights")],
)
def test_targets_that_are_not_whole_are_refused(damage, message, tmp_path):
    """A target without a head ran on random numbers, and the command ended with 0."""
    model = tiny_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-8])
    else:
        save_file(
            {name: weight for name, weight in load_file(file).items() if name != "lm_head.weight"},
            file,
            {"format": "pt"},
        )
    with pytest.raises(OSError, match=message) as raised:
        open_model(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_a_padding_token_without_an_embedding_is_one_sentence(tmp_path):
    pard = pard_folder(tmp_path)
    config = json.loads((pard / "config.json").read_text())
    (pard / "config.json").write_text(json.dumps({**config, "pad_token_id": 10**7}))
    for load in (open_model, hf_paradraft.AutoDrafter.from_pretrained):
        with pytest.raises(ValueError, match=f"{pard}"):
            load(pard)


def test_a_report_replaces_no_measurements(tmp_path):
    """`report r.json --markdown r.json` wrote its tables over what it had read, and ended with
    0.
    """
    file = tmp_path / "r.json"
    file.write_text("[]")
    result = CliRunner().invoke(
        app, ["report", str(file), "--markdown", str(tmp_path / "." / "r.json")]
    )
    assert result.exit_code == 2
    assert "named twice" in result.output
    assert file.read_text() == "[]"


def test_a_negative_max_length_is_refused(tmp_path):
    command = [
        "train",
        "pard",
        "--model",
        "x",
        "--train-file",
        "y",
        "--output-dir",
        str(tmp_path / "out"),
        "--max-length",
        "-5",
    ]
    assert "max_length must be at least 2, but is -5" in str(
        CliRunner().invoke(app, command).exception
    )


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_a_damaged_checkpoint_is_left_aside_by_name(name, tmp_path, caplog):
    """It was an error without a file's name, behind a record that said that all is whole."""
    for step in (1, 2):
        checkpoint = tmp_path / f"checkpoint-{step}"
        checkpoint.mkdir()
        (checkpoint / ".paradraft").touch()
        save_file({"w": torch.ones(3)}, checkpoint / "model.safetensors")
        torch.save({"w": torch.ones(3)}, checkpoint / "optimizer.pt")
        (checkpoint / "run.json").write_text("{}")
    assert newest_checkpoint(tmp_path, {}) == str(tmp_path / "checkpoint-2")
    damaged = tmp_path / "checkpoint-2" / name
    damaged.write_bytes(damaged.read_bytes()[:9])
    assert newest_checkpoint(tmp_path, {}) == str(tmp_path / "checkpoint-1")
    assert f"{damaged} is damaged" in caplog.text
