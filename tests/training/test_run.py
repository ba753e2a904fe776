"""A training run of any kind: what it checks first, what it goes on from, and what it leaves behind
when it fails.
"""

import json
import shutil
import tracemalloc

import pytest
import torch
from datasets import Dataset
from filelock import FileLock
from safetensors.torch import load_file
from tiny import MASK, tiny_model
from trained import (
    train_dflash,
    train_dspark,
    train_eagle3,
    train_parallelspec,
    train_pard,
    train_ppd,
)
from transformers import SchedulerType, Trainer, TrainingArguments
from typer.testing import CliRunner

from hf_paradraft.cli import app
from hf_paradraft.cli.train import TRAINED
from hf_paradraft.drafters.pard.training import PardTraining
from hf_paradraft.training import run as run_module
from hf_paradraft.training.trainer import LengthGroups, ResumableTrainer

OPTIONS = {
    "per_device_train_batch_size": 4,
    "use_cpu": True,
    "max_length": 64,
    "save_steps": 2,
    "lr_scheduler_type": "constant",
}
RUNS = {
    "pard": (train_pard, {"mask_token_id": MASK, "num_depths": 3}),
    "ppd": (train_ppd, {"num_prompt_tokens": 2}),
    "parallelspec": (train_parallelspec, {"style": "eagle", "num_masks": 2}),
    "dspark": (train_dspark, {"block_size": 3, "num_features": 2}),
    "dflash": (train_dflash, {"block_size": 3, "num_features": 2}),
    "eagle3": (train_eagle3, {"num_draft_tokens": 2}),
}


# a causal LM, an adapter, and a network that reads states; the others at night
SOME = [
    pytest.param(kind, marks=() if kind in ("pard", "ppd", "eagle3") else pytest.mark.nightly)
    for kind in RUNS
]


@pytest.fixture(params=SOME)
def run(request, folder):
    """A kind's training of the tiny target, as a function of the output's name and options."""
    if request.param == "eagle3":
        tiny_model("llama", num_hidden_layers=7, dtype=torch.float32).save_pretrained(
            folder / "target"
        )
    train, kind_options = RUNS[request.param]

    def called(name, rows="rows.jsonl", model="target", **options):
        return train(
            folder / model, folder / rows, folder / name, **{**OPTIONS, **kind_options, **options}
        )

    return called


def weights(folder):
    return {
        name: tensor
        for file in sorted(folder.glob("*model.safetensors"))
        for name, tensor in load_file(file).items()
    }


def checkpoints(folder):
    return sorted(file.name for file in folder.glob("checkpoint-*"))


def test_a_run_that_was_killed_in_a_checkpoint_goes_on_from_the_one_before(run, folder):
    """`--resume` took the newest, which was half there, and failed for ever; the resumed run is the
    one that would have been.
    """
    run("whole", max_steps=4)
    shutil.copytree(folder / "whole" / "checkpoint-2", folder / "part" / "checkpoint-2")
    shutil.copytree(folder / "whole" / "checkpoint-4", folder / "part" / "checkpoint-4")
    (folder / "part" / "checkpoint-4" / "run.json").unlink()
    next((folder / "part" / "checkpoint-4").glob("*.safetensors")).write_bytes(b"half")
    (folder / "target").rename(folder / "moved")
    run("part", model="moved", max_steps=4, resume=True)
    whole, part = weights(folder / "whole"), weights(folder / "part")
    assert whole.keys() == part.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, part[name]), name
    assert checkpoints(folder / "part") == ["checkpoint-2", "checkpoint-4"]


def test_a_run_that_has_made_all_its_steps_makes_none_when_resumed(run, folder):
    run("out", max_steps=2)
    before = weights(folder / "out")
    run("out", max_steps=2, resume=True)
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in weights(folder / "out").items()
    )
    assert checkpoints(folder / "out") == ["checkpoint-2"]


def test_a_run_with_other_data_or_options_is_not_resumed(run, folder):
    run("out", max_steps=2)
    before = weights(folder / "out")
    for changes, name in (
        ({"rows": "some.jsonl"}, "data"),
        ({"seed": 5}, "seed"),
        ({"learning_rate": 0.1}, "learning_rate"),
    ):
        with pytest.raises(ValueError, match=f"other settings.*{name}: .* there, .* now"):
            run("out", max_steps=2, resume=True, **changes)
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in weights(folder / "out").items()
    )


def test_nothing_is_removed_before_its_successor_is_there(run, folder, monkeypatch):
    """`--overwrite` removed all checkpoints before a first step that ran out of memory, and a
    user's own files with them.
    """
    run("out", max_steps=4)
    for name in ("checkpoint-best", "checkpoint-12"):
        (folder / "out" / name).mkdir()
        (folder / "out" / name / "mine").write_text("mine")
    (folder / "out" / "checkpoint-notes.txt").write_text("mine")
    before = {file: file.read_bytes() for file in (folder / "out").rglob("*") if file.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(
            ResumableTrainer,
            "training_step",
            lambda *_: (_ for _ in ()).throw(MemoryError("no room")),
        )
        with pytest.raises(MemoryError):
            run("out", max_steps=2, seed=1, overwrite=True)
    assert {
        file: file.read_bytes() for file in (folder / "out").rglob("*") if file.is_file()
    } == before
    run("out", max_steps=2, seed=1, overwrite=True)
    assert checkpoints(folder / "out") == [
        "checkpoint-12",
        "checkpoint-2",
        "checkpoint-best",
        "checkpoint-notes.txt",
    ]
    assert all(
        (folder / "out" / name / "mine").exists() for name in ("checkpoint-best", "checkpoint-12")
    )


@pytest.mark.parametrize(
    ("step", "stopped", "resumed"),
    [
        (2, ["checkpoint-2", "checkpoint-2.former", "checkpoint-4"], "checkpoint-4"),
        (4, ["checkpoint-2", "checkpoint-4", "checkpoint-4.former"], "checkpoint-4.former"),
    ],
)
def test_a_run_that_is_stopped_in_its_first_checkpoint_leaves_the_former_ones(
    step, stopped, resumed, folder, monkeypatch
):
    """The one of its step has another name then, by which `--resume` did not look for it, and which
    no later run removed.
    """
    options = {**OPTIONS, "mask_token_id": MASK, "num_depths": 3}
    paths = folder / "target", folder / "rows.jsonl", folder / "out"
    train_pard(*paths, max_steps=4, **options)
    before = weights(folder / "out")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save_checkpoint", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train_pard(
                *paths, max_steps=4, seed=1, overwrite=True, **{**options, "save_steps": step}
            )
    assert checkpoints(folder / "out") == stopped
    steps, first = [], ResumableTrainer.training_step
    with monkeypatch.context() as patch:
        patch.setattr(
            ResumableTrainer,
            "training_step",
            lambda self, *args: [steps.append(self.state.global_step), first(self, *args)][1],
        )
        train_pard(*paths, max_steps=6, resume=True, **options)
    assert steps == [4, 5]
    assert checkpoints(folder / "out") == sorted([resumed, "checkpoint-6"])
    train_pard(folder / "target", folder / "rows.jsonl", folder / "new", max_steps=6, **options)
    after = weights(folder / "out")
    for name, tensor in weights(folder / "new").items():
        assert torch.equal(tensor, after[name]), name
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())
    train_pard(*paths, max_steps=4, seed=2, overwrite=True, **options)
    assert checkpoints(folder / "out") == ["checkpoint-2", "checkpoint-4"]


def test_two_runs_do_not_write_one_folder(folder):
    """Their checkpoints and weights were mixed."""
    options = {**OPTIONS, "mask_token_id": MASK, "num_depths": 3}
    paths = folder / "target", folder / "rows.jsonl", folder / "out"
    train_pard(*paths, max_steps=2, **options)
    lock = folder / "out" / ".paradraft.lock"

    def files():
        return {
            file: file.read_bytes()
            for file in (folder / "out").rglob("*")
            if file.is_file() and file != lock
        }

    before = files()
    with FileLock(lock):
        for how in ({"resume": True, "max_steps": 4}, {"overwrite": True, "max_steps": 2}):
            with pytest.raises(OSError, match=r"Another process is writing .*out"):
                train_pard(*paths, **how, **options)
    assert files() == before
    (folder / "new").mkdir()
    (folder / "new" / ".paradraft.lock").touch()  # of a run that was killed before its first step
    train_pard(*paths[:2], folder / "new", max_steps=2, **options)


def test_a_run_that_ended_meanwhile_is_not_replaced(folder, monkeypatch):
    """The folder was looked at before the data were read, and locked after that."""
    options = {**OPTIONS, "mask_token_id": MASK, "num_depths": 3, "max_steps": 1}
    paths = folder / "target", folder / "rows.jsonl", folder / "out"
    read, before = run_module.encode_rows, []

    def another(*arguments):
        monkeypatch.setattr(run_module, "encode_rows", read)
        train_pard(*paths, **options)
        before.append((folder / "out" / "model.safetensors").read_bytes())
        return read(*arguments)

    monkeypatch.setattr(run_module, "encode_rows", another)
    with pytest.raises(ValueError, match="already has files"):
        train_pard(*paths, seed=2, **options)
    assert before == [(folder / "out" / "model.safetensors").read_bytes()]


def test_a_full_disk_is_one_sentence(run, folder, monkeypatch):
    """It was a traceback of torch's, or a position in a file that was not the one expected."""
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda value, file: save(value, "/dev/full"))
    with pytest.raises(OSError, match=r"out could not be written: is the disk full\?"):
        run("out", max_steps=2)


def test_checkpoints_of_others_are_neither_written_to_nor_removed(folder, caplog):
    """The trainer wrote into one of its number, which was removed as an old one of ours then."""
    options = {
        **OPTIONS,
        "mask_token_id": MASK,
        "num_depths": 3,
        "save_total_limit": 1,
        "max_steps": 6,
    }
    for name, text in (("checkpoint-2", '{"wandb": 1}'), ("checkpoint-9", '{"wandb": 1}')):
        (folder / "out" / name).mkdir(parents=True)
        (folder / "out" / name / "run.json").write_text(text)
        (folder / "out" / name / "notes.txt").write_text("mine")
    (folder / "out" / "model.safetensors").write_text("mine")
    with pytest.raises(ValueError, match="no checkpoint to go on from"):
        train_pard(folder / "target", folder / "rows.jsonl", folder / "out", resume=True, **options)
    train_pard(folder / "target", folder / "rows.jsonl", folder / "out", overwrite=True, **options)
    assert "it is called checkpoint-2.former now" in caplog.text
    for name in ("checkpoint-2.former", "checkpoint-9"):
        assert (folder / "out" / name / "notes.txt").read_text() == "mine"
    assert checkpoints(folder / "out") == ["checkpoint-2.former", "checkpoint-6", "checkpoint-9"]


@pytest.mark.parametrize(("limit", "kept"), [(0, [2, 4, 6]), (-1, [2, 4, 6]), (1, [6])])
def test_a_limit_of_none_keeps_all_checkpoints(limit, kept, folder):
    """As transformers has it: 0 and -1 removed all, the one that was just written too."""
    train_pard(
        *(folder / name for name in ("target", "rows.jsonl", "out")),
        **OPTIONS, mask_token_id=MASK, num_depths=3, max_steps=6, save_total_limit=limit,
    )  # fmt: skip
    assert checkpoints(folder / "out") == [f"checkpoint-{step}" for step in kept]


def test_a_checkpoint_of_others_stays_where_epochs_are_saved(folder):
    """The trainer wrote into it, and it counted as the run's own then."""
    rows = folder / "rows.jsonl"
    epoch = -(-len(rows.read_text().splitlines()) // OPTIONS["per_device_train_batch_size"])
    (folder / "out" / f"checkpoint-{epoch}").mkdir(parents=True)
    (folder / "out" / f"checkpoint-{epoch}" / "notes.txt").write_text("mine")
    train_pard(
        folder / "target", rows, folder / "out", overwrite=True, save_strategy="epoch",
        **OPTIONS, mask_token_id=MASK, num_depths=3, num_train_epochs=3,
    )  # fmt: skip
    assert checkpoints(folder / "out") == sorted(
        [f"checkpoint-{epoch}.former", f"checkpoint-{2 * epoch}", f"checkpoint-{3 * epoch}"]
    )
    assert (folder / "out" / f"checkpoint-{epoch}.former" / "notes.txt").read_text() == "mine"


def test_a_link_to_nothing_that_has_a_checkpoints_name(folder):
    (folder / "out").mkdir()
    for name in ("checkpoint-2", "checkpoint-2.former"):
        (folder / "out" / name).symlink_to(folder / "nothing")
    train_pard(
        *(folder / name for name in ("target", "rows.jsonl", "out")),
        **OPTIONS, mask_token_id=MASK, num_depths=3, max_steps=2, overwrite=True,
    )  # fmt: skip
    assert checkpoints(folder / "out") == [
        "checkpoint-2", "checkpoint-2.former", "checkpoint-2.former-1",
    ]  # fmt: skip


def test_a_cache_without_a_size_has_the_usual_one(folder):
    train_dflash(
        *(folder / name for name in ("target", "rows.jsonl", "out")),
        **OPTIONS, **RUNS["dflash"][1], max_steps=1, cache_dir=folder / "cache", cache_gb=None,
    )  # fmt: skip
    assert any((folder / "cache").glob("*.safetensors"))


def test_a_resumed_run_has_the_shortlist_and_the_seconds_of_a_whole_one(folder, monkeypatch):
    """It was fitted to the last steps before the break, or to none; and the seconds before it were
    forgotten.
    """
    monkeypatch.setattr("hf_paradraft.training.unrolled.LEAST", 8)
    monkeypatch.setattr("hf_paradraft.training.unrolled.RANK", 8)
    monkeypatch.setattr("hf_paradraft.decoding.shortlist.RANK", 8)
    tiny_model("llama", num_hidden_layers=7, dtype=torch.float32).save_pretrained(folder / "target")

    def run(name, **options):
        how = {**OPTIONS, "num_draft_tokens": 2, "vocab": 16, **options}
        train_eagle3(folder / "target", folder / "rows.jsonl", folder / name, **how)
        return (folder / name / "shortlist.safetensors").read_bytes()

    whole = run("whole", max_steps=4)
    for kept in (2, 4):
        shutil.copytree(
            folder / "whole" / f"checkpoint-{kept}", folder / f"part-{kept}" / f"checkpoint-{kept}"
        )
        mark = folder / f"part-{kept}" / f"checkpoint-{kept}" / ".paradraft"
        assert float(mark.read_text()) > 0
        mark.write_text("1000")
        assert run(f"part-{kept}", max_steps=4, resume=True) == whole
        config = json.loads((folder / f"part-{kept}" / "config.json").read_text())
        assert config["paradraft"]["training"]["seconds"] >= 1000
    (folder / "whole" / "bench.json").write_text("[]")
    assert run("whole", max_steps=4, resume=True) == whole
    assert not (folder / "whole" / "former").exists()


def test_a_loss_that_is_no_number_replaces_nothing(run, folder, monkeypatch):
    """The run went on, ended with 0, and its weights were nothing."""
    run("out", max_steps=2)
    before = weights(folder / "out")
    monkeypatch.setattr(Trainer, "training_step", lambda *_: torch.tensor(float("nan")))
    with pytest.raises(ValueError, match="loss is nan in step 1: lower the learning rate"):
        run("out", max_steps=4, seed=1, overwrite=True)
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in weights(folder / "out").items()
    )


def test_measurements_of_former_weights_are_laid_aside(run, folder):
    """`--resume` left the old table beside new weights, and `push` put it on their card."""
    run("out", max_steps=2)
    (folder / "out" / "bench.json").write_text("[]")
    run("out", max_steps=4, resume=True)
    assert not (folder / "out" / "bench.json").exists()
    assert (folder / "out" / "former" / "bench.json").read_text() == "[]"


@pytest.mark.parametrize("kind", TRAINED)
def test_every_option_can_be_read_at_80_columns(kind):
    result = CliRunner().invoke(app, ["train", kind, "--help"], terminal_width=80)
    assert result.exit_code == 0
    assert "Example: paradraft train" in " ".join(result.output.split())
    assert max(map(len, result.output.splitlines())) <= 80
    options = result.output.split("Options:")[1].split("Example")[0].split("\n  --")[1:]
    assert len(options) > 15
    for words in options:
        name, _, said = " ".join(words.split()).partition("> " if "<" in words else " ")
        assert "…" not in name
        assert len(said.split()) >= 3, f"--{name} has no help"


def test_a_run_of_another_kind_is_replaced(folder):
    """`checkpoint-1` held an adapter, and the weights could not be written after the last step."""
    options = {**OPTIONS, "max_steps": 1, "save_steps": 1, "per_device_train_batch_size": 2}
    train_ppd(folder / "target", folder / "rows.jsonl", folder / "out", **options)
    assert (folder / "out" / "checkpoint-1" / "adapter_config.json").exists()
    train_pard(
        folder / "target",
        folder / "rows.jsonl",
        folder / "out",
        overwrite=True,
        mask_token_id=MASK,
        **options,
    )
    assert (folder / "out" / "model.safetensors").exists()
    assert not (folder / "out" / "checkpoint-1" / "adapter_config.json").exists()
    assert checkpoints(folder / "out") == ["checkpoint-1"]


def test_a_schedule_is_a_name_or_one_of_transformers_types(folder):
    """Both are the same run, so that one can go on with the other."""
    options = {**OPTIONS, "mask_token_id": MASK, "num_depths": 2}
    paths = folder / "target", folder / "rows.jsonl"
    cosine = {**options, "lr_scheduler_type": SchedulerType.COSINE}
    train_pard(*paths, folder / "typed", max_steps=4, **cosine)
    train_pard(*paths, folder / "named", max_steps=4, **{**options, "lr_scheduler_type": "cosine"})
    named, typed = weights(folder / "named"), weights(folder / "typed")
    assert all(torch.equal(tensor, typed[name]) for name, tensor in named.items())
    train_pard(*paths, folder / "named", max_steps=4, resume=True, **cosine)
    other = {**options, "lr_scheduler_type": SchedulerType.WARMUP_STABLE_DECAY}
    with pytest.raises(ValueError, match="has to be one of linear"):
        train_pard(*paths, folder / "other", max_steps=4, **other)


class Padding:
    """A collator that takes no attributes."""

    __slots__ = ()

    def __call__(self, samples):
        ids = torch.tensor([sample["input_ids"] for sample in samples])
        return {"input_ids": ids, "labels": ids}


def test_a_collator_may_be_one_that_takes_no_attributes(folder, tmp_path):
    """It makes no random choices, so that nothing has to know the epoch."""
    arguments = TrainingArguments(
        str(tmp_path / "out"),
        report_to="none",
        num_train_epochs=2,
        use_cpu=True,
        save_strategy="no",
    )
    rows = Dataset.from_list([{"input_ids": [1, 2, 3, 4], "length": 4}] * 8)
    model = tiny_model(dtype=torch.float32)
    trainer = ResumableTrainer(model, arguments, data_collator=Padding(), train_dataset=rows)
    assert trainer.train().global_step == 2


def test_a_run_that_goes_on_within_an_epoch_sets_it(folder, tmp_path, monkeypatch):
    """With several processes nothing else tells the sampler, and other samples were read."""
    arguments = TrainingArguments(str(tmp_path / "out"), report_to="none", use_cpu=True)
    lengths = list(range(1, 65))
    rows = Dataset.from_list([{"input_ids": [1], "length": length} for length in lengths])
    trainer = ResumableTrainer(tiny_model(), arguments, data_collator=Padding(), train_dataset=rows)
    trainer.get_train_dataloader()
    trainer.state.epoch, trainer.state.max_steps = 1.5, 20
    monkeypatch.setattr(Trainer, "_run_epoch", lambda self: None)
    trainer._run_epoch()
    expected = LengthGroups(lengths, 8, arguments.seed)
    expected.set_epoch(1)
    assert [*trainer.train_sampler] == [*expected]


def test_the_data_of_a_run_are_hashed_row_by_row(tmp_path):
    """All rows in one text took 500 MB for 20,000 of them."""
    row = {"input_ids": list(range(2000)), "labels": list(range(2000))}
    run = PardTraining(train_file="rows", output_dir=tmp_path, model="model")
    model, arguments = tiny_model(), TrainingArguments(str(tmp_path), use_cpu=True)
    tracemalloc.start()
    run_module._settings(run, model, [row] * 200, arguments)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e6  # their text has 4 MB
