"""Folders, JSON lines and whole writes."""

import os
import shutil
from threading import Thread

import pytest
import torch
from huggingface_hub import HfApi
from tiny import make_tokenizer, near_copy, tiny_model

import hf_paradraft
from hf_paradraft import files
from hf_paradraft.files import local_folder, rows_of, write_whole


def test_checkpoints_below_are_not_downloaded(hub, tmp_path):
    near_copy(tiny_model()).save_pretrained(tmp_path)
    for below in ("checkpoint-100", "other"):
        (tmp_path / below).mkdir()
        (tmp_path / below / "model.safetensors").write_bytes(b"large")
    (tmp_path / "other" / "deep").mkdir()
    (tmp_path / "other" / "deep" / "config.json").write_text("{}")
    HfApi().create_repo("user/nested")
    HfApi().upload_folder(repo_id="user/nested", folder_path=tmp_path)
    folder = local_folder("user/nested", {})
    assert not any(path.is_dir() for path in folder.iterdir())
    folder = local_folder("user/nested", {"subfolder": "other"})
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


def test_revision_and_subfolder_are_remembered(hub, tmp_path):
    """The tokenizer that is published again, and compared, is the one that lies beside the
    weights.
    """
    drafter = near_copy(tiny_model())
    drafter.save_pretrained(tmp_path / "inner")
    make_tokenizer("a b c d").save_pretrained(tmp_path / "inner")
    make_tokenizer("d c b a").save_pretrained(tmp_path)
    api = HfApi()
    api.create_repo("user/two")
    api.create_branch("user/two", branch="next")
    api.upload_folder(repo_id="user/two", folder_path=tmp_path, revision="next")
    loaded = hf_paradraft.AutoDrafter.from_pretrained(
        "user/two", revision="next", subfolder="inner"
    )
    assert loaded.name_or_path == "user/two"
    assert loaded.found_under == {"revision": "next", "subfolder": "inner"}
    loaded.push_to_hub("user/again")
    again = hf_paradraft.AutoDrafter.from_pretrained("user/again")
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained("user/again").get_vocab()["a"] == 0
    tiny_model().save_pretrained(tmp_path / "target")
    make_tokenizer("a b c d").save_pretrained(tmp_path / "target")
    target = type(tiny_model()).from_pretrained(tmp_path / "target").eval()
    prompt = torch.tensor([[1, 2, 3]])
    # the same tokens, under that subfolder
    target.generate(prompt, assistant_model=loaded, max_new_tokens=3, do_sample=False)
    assert again.found_under == {}


def test_a_pickle_beside_safetensors_is_not_read(tmp_path):
    near_copy(tiny_model()).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert isinstance(hf_paradraft.AutoDrafter.from_pretrained(tmp_path), hf_paradraft.PardDrafter)


def test_an_index_whose_pieces_are_gone_says_nothing(tmp_path):
    """transformers leaves it behind where it saves in one piece again."""
    drafter = near_copy(tiny_model())
    drafter.model.save_pretrained(tmp_path / "plain", max_shard_size="2KB")
    drafter.save_pretrained(tmp_path / "drafter")
    shutil.copy(tmp_path / "plain" / files.INDEX, tmp_path / "drafter")
    held = files.tensor_files(tmp_path / "drafter")
    assert set(held.values()) == {tmp_path / "drafter" / files.WHOLE}
    assert isinstance(
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "drafter"), hf_paradraft.PardDrafter
    )


def test_the_newest_weights_stay_in_one_piece_or_in_several(tmp_path):
    """A folder with both was left with the older ones, where the new ones were in several."""
    for seed, size in enumerate((None, "2KB", "2KB", None)):
        drafter = near_copy(tiny_model(seed=seed))
        drafter.save_pretrained(tmp_path, **({"max_shard_size": size} if size else {}))
        assert (tmp_path / files.INDEX).exists() == (size is not None)
        assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (size is not None)
        loaded = hf_paradraft.AutoDrafter.from_pretrained(tmp_path).state_dict()
        assert all(
            torch.equal(tensor, loaded[name]) for name, tensor in drafter.state_dict().items()
        )
    drafter.save_pretrained(tmp_path, max_shard_size="2KB")
    other = hf_paradraft.DFlashDrafter.from_target(tiny_model(), 31, num_features=1)
    other.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.glob("*.safetensors*")] == [files.WHOLE]


@pytest.mark.parametrize("before", ["2KB", None])
@pytest.mark.parametrize("size", ["2KB", None])
def test_the_weights_just_written_stay_whatever_the_clock_says(tmp_path, before, size):
    """Files from a machine whose clock is ahead seem newer than those of this save."""
    for seed, limit in enumerate((before, size)):
        drafter = near_copy(tiny_model(seed=seed))
        drafter.save_pretrained(tmp_path, **({"max_shard_size": limit} if limit else {}))
        if seed == 0:
            for file in tmp_path.glob("*.safetensors*"):
                os.utime(file, (2**32, 2**32))
    loaded = hf_paradraft.AutoDrafter.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in drafter.state_dict().items())
    assert (tmp_path / files.INDEX).exists() == (size is not None)
    assert (tmp_path / files.WHOLE).exists() == (size is None)


@pytest.mark.parametrize("size", ["2KB", None])
def test_weights_that_lay_in_both_forms_are_replaced(tmp_path, size):
    """An earlier save can have been broken off between the two."""
    near_copy(tiny_model()).save_pretrained(tmp_path, max_shard_size="2KB")
    near_copy(tiny_model()).save_pretrained(tmp_path / "whole")
    (tmp_path / "whole" / files.WHOLE).rename(tmp_path / files.WHOLE)
    drafter = near_copy(tiny_model(seed=1))
    drafter.save_pretrained(tmp_path, **({"max_shard_size": size} if size else {}))
    loaded = hf_paradraft.AutoDrafter.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in drafter.state_dict().items())
    assert (tmp_path / files.INDEX).exists() == (size is not None)
    assert (tmp_path / files.WHOLE).exists() == (size is None)


@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_a_damaged_index_is_saved_over(tmp_path, kind):
    drafter = near_copy(tiny_model())
    drafter.save_pretrained(tmp_path, max_shard_size="2KB")
    (tmp_path / files.INDEX).write_text('{"weight_map": ')
    if kind == "dflash":
        drafter = hf_paradraft.DFlashDrafter.from_target(tiny_model(), 31, num_features=1)
    drafter.save_pretrained(tmp_path)
    assert not (tmp_path / files.INDEX).exists()
    loaded = hf_paradraft.AutoDrafter.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == drafter.state_dict().keys()


def test_pieces_that_no_index_names_stay(tmp_path):
    near_copy(tiny_model()).save_pretrained(tmp_path, max_shard_size="2KB")
    others = {"model-00001-of-00099.safetensors", "model-final-of-mine1.safetensors"}
    for name in others:
        (tmp_path / name).write_bytes(b"somebody else's")
    hf_paradraft.DFlashDrafter.from_target(tiny_model(), 31, num_features=1).save_pretrained(
        tmp_path
    )
    assert {file.name for file in tmp_path.glob("*.safetensors*")} == {files.WHOLE, *others}


def test_rows_come_through_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = Thread(target=lambda: (tmp_path / "pipe").write_text('{"text": "a"}\n'), daemon=True)
    writer.start()
    assert list(rows_of(tmp_path / "pipe", "train")) == [{"text": "a"}]
    writer.join()


def test_a_write_is_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "rows.json"
    write_whole(file, "old")
    monkeypatch.setattr(files.Path, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_whole(file, "new")
    assert file.read_text() == "old"


@pytest.mark.parametrize(
    ("text", "message"), [("{broken\n", "line 1"), ("[1]\n", "wanted an object")]
)
def test_rows_that_are_none(tmp_path, text, message):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        list(rows_of(tmp_path / "rows.jsonl", "train"))
    with pytest.raises(OSError, match="There is no file"):
        rows_of(tmp_path / "none.jsonl", "train")
    with pytest.raises(OSError, match="neither a file"):
        rows_of("nobody/nothing:config:split", "train")
