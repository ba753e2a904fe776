"""What a run did not write stays, whatever it is told to write and where; what cannot be meant is
said before work starts.
"""

import json
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from tiny import make_tokenizer, tiny_model
from trained import regenerate
from typer.testing import CliRunner

from hf_paradraft import AutoDrafter, Eagle3Drafter, PardDrafter
from hf_paradraft.cli import app
from hf_paradraft.decoding.shortlist import Shortlist
from hf_paradraft.files import write_whole
from hf_paradraft.training.output import (
    FORMER,
    Checkpoints,
    check_output,
    newest_checkpoint,
    replace_model,
)
from hf_paradraft.training.target import config_of, open_model, open_tokenizer
from hf_paradraft.training.target_states import TargetStates


@pytest.fixture
def target():
    return tiny_model(num_hidden_layers=8)


@pytest.mark.parametrize("end", ["", ".run", ".former"])
def test_prompts_that_lie_where_answers_go(end, tmp_path):
    prompts = tmp_path / f"out.jsonl{end}"
    prompts.write_text('{"text": "a b c"}\n')
    with pytest.raises(ValueError, match="name another one"):
        regenerate(tiny_model(), make_tokenizer(), prompts, tmp_path / "out.jsonl", overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == [prompts.name]


def test_rows_to_avoid_and_folders_are_no_outputs(tmp_path):
    prompts, avoided = tmp_path / "prompts.jsonl", tmp_path / "avoid.jsonl"
    for file in (prompts, avoided):
        file.write_text('{"text": "a b c"}\n')
    (tmp_path / "folder").mkdir()
    for output, message in ((avoided, "name another one"), (tmp_path / "folder", "is a folder")):
        with pytest.raises(ValueError, match=message):
            regenerate(
                tiny_model(), make_tokenizer(), prompts, output, avoid=avoided, overwrite=True
            )
    assert avoided.read_text() == '{"text": "a b c"}\n'
    assert (tmp_path / "folder").is_dir()


def test_answers_that_were_finished_outlive_an_overwriting_that_was_not(tmp_path, monkeypatch):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"text": "a b c"}\n{"text": "c b a"}\n')
    regenerate(tiny_model(), make_tokenizer(), prompts, output, max_new_tokens=3)
    finished = output.read_bytes()

    def stopped(*_, **__):
        raise KeyboardInterrupt

    for seed in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr("hf_paradraft.training.answers.Target.answers", stopped)
            with pytest.raises(KeyboardInterrupt):
                regenerate(
                    tiny_model(seed=seed),
                    make_tokenizer(),
                    prompts,
                    output,
                    max_new_tokens=3,
                    overwrite=True,
                )
        assert (tmp_path / "out.jsonl.former").read_bytes() == finished


def test_invented_prompts_have_one_writer(tmp_path):
    tiny_model(initializer_range=0.1).save_pretrained(tmp_path / "target")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'a ' + m['content'] + ' <eos>' }}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "target")
    words = [
        "regenerate",
        "--target",
        str(tmp_path / "target"),
        "--invent",
        "5",
        "--output",
        str(tmp_path / "out.jsonl"),
    ]
    with FileLock(tmp_path / ".out.jsonl.prompts.jsonl.lock"):
        assert "Another process is writing" in str(CliRunner().invoke(app, words).exception)


def test_a_model_without_checkpoints_is_not_resumed(target, tmp_path):
    target.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match="no checkpoint to go on from"):
        check_output(tmp_path / "theirs", True, False)
    check_output(tmp_path / "new", True, False)


def test_folders_of_others_in_an_output(tmp_path):
    for name in ("new", ".new", FORMER):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("mine")
    (tmp_path / "model.safetensors").write_text("old")
    replace_model(tmp_path, lambda folder: (folder / "model.safetensors").write_text("new"))
    for name in ("new", ".new", FORMER):
        assert (tmp_path / name / "model.safetensors").read_text() == "mine"
    assert (tmp_path / "model.safetensors").read_text() == "new"
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        ".new",
        FORMER,
        "model.safetensors",
        "new",
    ]


def test_checkpoints_that_are_damaged_or_links(tmp_path, caplog):
    from types import SimpleNamespace

    settings = {"seed": 0}
    for step, text in ((1, json.dumps(settings)), (2, "")):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / ".paradraft").touch()
        (tmp_path / f"checkpoint-{step}" / "run.json").write_text(text)
    assert newest_checkpoint(tmp_path, settings) == str(tmp_path / "checkpoint-1")
    assert "checkpoint-2/run.json is damaged" in caplog.text
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "run.json").write_text("{}")
    (tmp_path / "checkpoint-5").symlink_to(other)
    (tmp_path / "checkpoint-7").mkdir()
    arguments = SimpleNamespace(save_total_limit=1, output_dir=str(tmp_path))
    state = SimpleNamespace(is_world_process_zero=True, global_step=7, best_model_checkpoint=None)
    Checkpoints(settings, arguments).on_save(arguments, state, None)
    assert (other / "run.json").read_text() == "{}"
    assert (tmp_path / "checkpoint-5").is_symlink()


def test_weights_in_several_pieces_are_replaced(target, tmp_path):
    """The index that was left there named the pieces before, and their weights came back."""
    folder = tmp_path / "pard"
    drafter = PardDrafter.from_causal_lm(tiny_model(), mask_token_id=31)
    drafter.save_pretrained(folder, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").exists()
    with torch.no_grad():
        drafter.model.norm.weight.fill_(7)
    drafter.save_pretrained(folder)
    again = PardDrafter.from_pretrained(folder)
    assert bool((again.model.norm.weight == 7).all())
    assert [file.name for file in folder.glob("*.safetensors*")] == ["model.safetensors"]


def test_a_shortlist_goes_with_its_weights(target, tmp_path):
    first, second = Eagle3Drafter.from_target(target), Eagle3Drafter.from_target(target)
    states = torch.randn(200, first.hidden_size, dtype=first.dtype)
    first.shortlist = Shortlist.fit(states, torch.randn(4100, first.hidden_size, dtype=first.dtype))
    first.save_pretrained(tmp_path)
    second.save_pretrained(tmp_path)
    assert AutoDrafter.from_pretrained(tmp_path).shortlist is None


def test_a_drafter_does_not_hide_behind_an_adapter(target, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "PPD"}')
    with pytest.raises(ValueError, match="holds an adapter"):
        Eagle3Drafter.from_target(target).save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["adapter_config.json"]


def test_results_do_not_replace_what_no_benchmark_wrote(tmp_path):
    readme, data = tmp_path / "README.md", tmp_path / "data.json"
    readme.write_text("# Mine")
    data.write_text('{"mine": 1}')
    for option, file in (("--markdown", readme), ("--json", data)):
        result = CliRunner().invoke(app, ["bench", option, str(file)])
        assert result.exit_code == 2
        assert "no benchmark has written" in " ".join(result.output.split()).replace(
            "│ ", ""
        ).replace(" │", "")
    assert (readme.read_text(), data.read_text()) == ("# Mine", '{"mine": 1}')


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("lr_scheduler_type", "warmup_stable_decay", "has to be one of linear"),
        ("report_to", "trackio", "needs a package of that name"),
        ("save_strategy", "best", "has to be steps, epoch or no"),
        ("cache_gb", 5.0, "the size of the folder cache_dir: pass both"),
    ],
)
def test_what_a_trainer_would_refuse_late(option, value, message, tmp_path):
    from hf_paradraft.drafters.eagle3.training import Eagle3Training
    from hf_paradraft.training.run import train

    with pytest.raises(ValueError, match=message):
        train(
            Eagle3Training,
            target="x",
            train_file="y",
            output_dir=tmp_path / "out",
            **{option: value},
        )
    assert not (tmp_path / "out").exists()


def test_tokens_beyond_the_embedding_are_said(target, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<new>"] + [f"<{number}>" for number in range(40)])
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a b <39> c a b c"}\n')
    with pytest.raises(ValueError, match=r"has the token \d+, and the target's embedding"):
        regenerate(tiny_model(), tokenizer, rows, tmp_path / "out.jsonl")
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    words = ["train", "eagle3", "--target", str(tmp_path / "target"), "--train-file", str(rows)]
    result = CliRunner().invoke(
        app, [*words, "--output-dir", str(tmp_path / "out"), "--max-length", "64"]
    )
    assert "and the model's embedding" in str(result.exception)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", '{"tokenizer_class": 5}'),
        ("config.json", "[]"),
        ("config.json", '{"model_type": ["llama"]}'),
        ("generation_config.json", "[]"),
    ],
)
def test_a_targets_damaged_files_are_one_sentence(name, content, target, tmp_path):
    target.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises((ValueError, OSError), match=str(tmp_path)):
        open_tokenizer(tmp_path), open_model(tmp_path)


def test_a_path_where_nothing_is(tmp_path):
    for load in (open_model, open_tokenizer, config_of):
        with pytest.raises(OSError, match="There is no folder"):
            load(tmp_path / "nothing")


def test_states_are_kept_among_states_alone_and_do_without_a_disk(
    target, tmp_path, monkeypatch, caplog
):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="no states of a target"):
        TargetStates(target, (0,), None, tmp_path / "mine")
    with pytest.raises(ValueError, match="give the output a folder of its own"):
        check_output(tmp_path / "out", False, False, tmp_path / "out" / "cache")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_paradraft.training.target_states.save_file", full)
    states = TargetStates(target, (0,), None, tmp_path / "cache")
    assert states(torch.ones((2, 4), dtype=torch.long), torch.tensor([4, 4]))["normed"].shape == (
        2,
        4,
        target.config.hidden_size,
    )
    assert "takes no more states" in caplog.text
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["target.json"]


def test_a_file_that_cannot_be_written_leaves_nothing_beside(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "file", "text")
    assert [*tmp_path.iterdir()] == []


def test_a_config_of_layers_that_no_file_holds(target, tmp_path):
    """Its module alone took more memory than there is."""
    Eagle3Drafter.from_target(target).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["transformer_layer_config"] |= {
        "num_hidden_layers": 1024,
        "intermediate_size": 2_000_000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="The config speaks of layers of"):
        AutoDrafter.from_pretrained(tmp_path)
