"""States that are caught while answers are written are those that the target has of the finished
texts.
"""

import copy
import json

import pytest
import torch
from tiny import make_tokenizer, near_copy, tiny_model, with_prompts
from typer.testing import CliRunner

from hf_paradraft import AutoregressiveDrafter, PpdDrafter, SpeculationConfig
from hf_paradraft.cli import app
from hf_paradraft.cli.make import layers_read
from hf_paradraft.drafters.eagle3 import Eagle3Drafter
from hf_paradraft.protocol import Drafter
from hf_paradraft.training.answers import Target
from hf_paradraft.training.caught_states import Catching
from hf_paradraft.training.data import encode_rows
from hf_paradraft.training.regenerate import regenerate
from hf_paradraft.training.source import load_rows
from hf_paradraft.training.target_states import TargetStates

LENGTH = 20


def eager(drafter):
    """A drafter that drafts in every round."""
    drafter.speculation_config = SpeculationConfig(3, tree_size=6, never_slower=False)
    return drafter


def nothing(target):
    return None


def small_model(target):
    return eager(AutoregressiveDrafter(near_copy(target)))


def layer(target):
    return eager(Eagle3Drafter.from_target(target))


def prompt_tokens(target):
    return eager(PpdDrafter.from_model(with_prompts(copy.deepcopy(target))))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", [nothing, small_model, layer, prompt_tokens])
def test_states_are_those_of_the_finished_texts(drafter, temperature, tmp_path, monkeypatch):
    """Some answers end early, others join the batch, and long texts are cut; nothing is run
    again.
    """
    target, tokenizer = tiny_model(num_hidden_layers=8), make_tokenizer()
    target.generation_config.eos_token_id = 5
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    folder = tmp_path / "states"
    prompts.write_text(
        "".join(
            json.dumps({"text": "a b c d e f g h"[: 1 + 2 * (n % 8)]}) + "\n" for n in range(11)
        )
    )
    states = TargetStates(target, (1, 4), folder=folder)
    writer = Target(
        target, tokenizer, 16, 4, temperature, 0, drafter(target), states=states, max_length=LENGTH
    )
    plain = Target(target, tokenizer, 16, 4, temperature)
    assert (
        regenerate(writer, prompts, answers)
        == regenerate(plain, prompts, tmp_path / "plain.jsonl")
        == 11
    )
    assert answers.read_text() == (tmp_path / "plain.jsonl").read_text()
    rows = encode_rows(load_rows(answers), tokenizer, LENGTH)
    texts = {tuple(ids) for ids in rows["input_ids"]}
    assert len({len(text) for text in texts}) > 3
    assert max(map(len, texts)) == LENGTH
    fresh, cached = TargetStates(target, (1, 4)), TargetStates(target, (1, 4), folder=folder)
    expected = {text: fresh(torch.tensor([text]), torch.tensor([len(text)])) for text in texts}
    assert len(list(folder.glob("*.safetensors"))) == len(texts)
    monkeypatch.setattr("hf_paradraft.training.target_states.states_of", None)
    for text in texts:
        caught = cached(torch.tensor([text]), torch.tensor([len(text)]))
        read = torch.arange(len(text) - 1)
        for key in (1, 4, "normed"):
            torch.testing.assert_close(caught[key][:, read], expected[text][key][:, read])
        chances = [
            source.probabilities(of, read * 0, read)
            for source, of in ((fresh, expected[text]), (cached, caught))
        ]
        torch.testing.assert_close(*chances)


def test_states_of_few_layers_and_of_answers_that_are_there(tmp_path, caplog):
    target, tokenizer = tiny_model(), make_tokenizer()
    assert layers_read(None, target) == ("normed",)  # too few for an EAGLE-3 layer
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"text": "a b c"}\n')
    regenerate(Target(target, tokenizer, 4, 4), prompts, answers)
    states = TargetStates(target, layers_read(None, target), folder=tmp_path / "states")
    assert regenerate(Target(target, tokenizer, 4, 4, states=states), prompts, answers) == 0
    assert "1 answers are there already" in caplog.text
    assert not (tmp_path / "states").exists()


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


def test_a_catching_drafter_is_its_drafter():
    """Whatever the engine reads of a drafter."""
    drafter = prompt_tokens(tiny_model())
    catching = Catching(drafter, (0,))
    for name in (*Drafter.__annotations__, "max_rows"):
        assert getattr(catching, name) == getattr(drafter, name)
