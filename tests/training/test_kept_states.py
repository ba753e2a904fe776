"""`regenerate --states` keeps the states of the finished answers, as a training reads them."""

import json

import pytest
import torch
from tiny import make_tokenizer, tiny_model
from typer.testing import CliRunner

from hf_paradraft.cli import app
from hf_paradraft.cli.train import layers_read
from hf_paradraft.training.data import encode_rows
from hf_paradraft.training.source import load_rows
from hf_paradraft.training.target import open_model
from hf_paradraft.training.target_states import TargetStates

LENGTH = 20


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_states_are_those_of_the_finished_texts(temperature, tmp_path, monkeypatch):
    """Some answers end early, long texts are cut, and some were there before; a training runs
    nothing again.
    """
    target, folder = tiny_model(num_hidden_layers=8, dtype=torch.float32), tmp_path / "states"
    target.generation_config.eos_token_id = 5
    target.save_pretrained(tmp_path / "target")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "target")
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"text": "a b c d e f g h"[: 1 + 2 * (n % 8)]}) + "\n" for n in range(11)
        )
    )
    words = ["regenerate", "--target", str(tmp_path / "target"), "--prompts", str(prompts)]
    words += ["--output", str(answers), "--max-new-tokens", "16", "--batch-size", "4"]
    words += ["--temperature", temperature]
    for more in ([], ["--states", str(folder), "--max-length", str(LENGTH)]):
        result = CliRunner().invoke(app, [*words, *more])
        assert result.exit_code == 0, (result.output, result.exception)
    assert answers.read_text().count("\n") == 11
    rows = encode_rows(load_rows(answers), tokenizer, LENGTH)
    texts = {tuple(ids) for ids in rows["input_ids"]}
    assert len({len(text) for text in texts}) > 3
    assert max(map(len, texts)) == LENGTH
    target = open_model(tmp_path / "target", dtype=torch.float32)
    keys = layers_read(None, target)
    fresh, cached = TargetStates(target, keys), TargetStates(target, keys, folder=folder)
    expected = {text: fresh(torch.tensor([text]), torch.tensor([len(text)])) for text in texts}
    assert len(list(folder.glob("*.safetensors"))) == len(texts)
    monkeypatch.setattr("hf_paradraft.training.target_states.states_of", None)
    for text in texts:
        kept = cached(torch.tensor([text]), torch.tensor([len(text)]))
        read = torch.arange(len(text))
        for key in (*keys, "normed"):
            torch.testing.assert_close(kept[key], expected[text][key])
        chances = [
            source.probabilities(of, read * 0, read)
            for source, of in ((fresh, expected[text]), (cached, kept))
        ]
        torch.testing.assert_close(*chances)


def test_states_of_few_layers():
    """A target may have too few for an EAGLE-3 layer."""
    assert layers_read(None, tiny_model()) == ("normed",)


def test_states_that_no_training_could_take_are_refused(tmp_path):
    target = tiny_model(dtype=torch.float32)
    target.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"text": "a b c"}\n')
    words = [
        "regenerate",
        "--target",
        str(tmp_path / "target"),
        "--output",
        str(tmp_path / "answers.jsonl"),
    ]
    for more, message in (
        (["--prompts", str(tmp_path / "none.jsonl")], "There is no file"),
        (["--prompts", str(tmp_path / "prompts.jsonl"), "--max-length", "9"], "pass both"),
        (
            [
                "--prompts",
                str(tmp_path / "prompts.jsonl"),
                "--states",
                str(tmp_path / "states"),
                "--dtype",
                "float16",
            ],
            "--dtype",
        ),
        (
            [
                "--prompts",
                str(tmp_path / "prompts.jsonl"),
                "--states",
                str(tmp_path / "prompts.jsonl"),
            ],
            "is a file",
        ),
        (
            [
                "--prompts",
                str(tmp_path / "prompts.jsonl"),
                "--seed",
                str(2**64),
                "--temperature",
                "1",
            ],
            "less than or equal",
        ),
        (
            ["--prompts", str(tmp_path / "prompts.jsonl"), "--temperature", "inf"],
            "a number from 0.001 on",
        ),
    ):
        result = CliRunner().invoke(app, [*words, *more])
        assert result.exit_code != 0
        assert message in " ".join(
            f"{result.output} {result.exception}".replace("│", "").split()
        ), more
    assert sorted(file.name for file in tmp_path.iterdir()) == ["prompts.jsonl", "target"]


def test_states_that_are_there_or_find_no_room_are_not_computed(tmp_path, monkeypatch):
    """Nor is anything kept for gradients."""
    target, tokenizer = tiny_model(dtype=torch.float32), make_tokenizer()
    texts = [tokenizer.decode([*range(1, 5 + number)]) for number in range(20)]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    forwards, by_text = [], TargetStates._by_text

    def counted(*arguments):
        forwards.append(by_text(*arguments))
        assert not forwards[-1][0]["normaliser"].requires_grad
        return forwards[-1]

    monkeypatch.setattr(TargetStates, "_by_text", counted)
    monkeypatch.setattr("hf_paradraft.training.target_states._read", None)  # nor read
    for folder, room, expected in (("kept", 1e9, 5), ("kept", 1e9, 5), ("full", 1.0, 6)):
        states = TargetStates(target, (0,), folder=tmp_path / folder, max_bytes=room)
        states.keep(rows, tokenizer, 64, batch_size=4)
        assert len(forwards) == expected
