"""Targets that are one packed file."""

import json

import pytest
import torch
from tiny import ppd_folder, tiny_model, write_gguf
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import hf_paradraft
from hf_paradraft.cli import app


@pytest.fixture
def model():
    return tiny_model(tie_word_embeddings=False, dtype=torch.float32)


@pytest.fixture
def packed(model, tmp_path):
    write_gguf(tmp_path / "target.gguf", model)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": "CDEFGH" * (3 + row)}) + "\n" for row in range(8))
    )
    return tmp_path / "target.gguf"


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_unpacking_gguf_keeps_its_logits(packed, model, tmp_path):
    result = run("export", packed, tmp_path / "whole")
    assert result.exit_code == 0, (result.output, result.exception)
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(
        AutoModelForCausalLM.from_pretrained(tmp_path / "whole")(ids).logits, model(ids).logits
    )
    assert "quantization_config" not in json.loads((tmp_path / "whole" / "config.json").read_text())


def test_parallelspec_is_trained_for_a_gguf_target(packed, tmp_path):
    """ParallelSpec; and it is measured on it."""
    rows = [
        "--train-file",
        tmp_path / "rows.jsonl",
        "--max-steps",
        1,
        "--max-length",
        16,
        "--target",
        packed,
    ]
    rows += ["--eval-file", tmp_path / "rows.jsonl"]
    result = run(
        "train",
        "parallelspec",
        *rows,
        "--output-dir",
        tmp_path / "drafter",
        "--num-masks",
        2,
        "--vocab",
        16,
    )
    assert result.exit_code == 0, (result.output, result.exception)
    assert (
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "drafter").paradraft["training"][
            "acceptance"
        ]["mean_emitted"]
        >= 1
    )


def test_gguf_is_refused_where_ordinary_weights_are_needed(packed, tmp_path):
    rows = tmp_path / "rows.jsonl"
    for command in (
        (
            "train",
            "pard",
            "--model",
            packed,
            "--train-file",
            rows,
            "--output-dir",
            tmp_path / "out",
        ),
        (
            "train",
            "ppd",
            "--target",
            packed,
            "--train-file",
            rows,
            "--output-dir",
            tmp_path / "out",
        ),
        ("calibrate", ppd_folder(tmp_path), "--eval-file", rows, "--target", packed),
    ):
        result = run(*command)
        assert isinstance(result.exception, ValueError)
        assert "makes a folder of ordinary weights of it" in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_a_missing_gguf_file_is_refused(packed, tmp_path):
    result = run("export", tmp_path / "none.gguf", tmp_path / "out")
    assert "There is no file" in str(result.exception)
    assert not (tmp_path / "out").exists()
