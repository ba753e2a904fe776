"""Pushes that fail leave what was there, and repositories that are no drafters are refused."""

import contextlib
import json

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from loopback import REPO, USER
from tiny import pard_folder, ppd_folder, tiny_model
from trained import train_ppd

import hf_paradraft
from hf_paradraft.integration.publish import push_folder


@pytest.mark.slow
@pytest.mark.parametrize("folder_of", [pard_folder, ppd_folder])
def test_a_cut_connection_leaves_what_was_there(hub, tmp_path, folder_of, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's own attempts
    folder = folder_of(tmp_path)
    push_folder(folder, REPO)
    calls, before = len(hub.calls), dict(hub.files(REPO))
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")  # other weights
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# New\n")
    push_folder(folder, REPO)
    after = dict(hub.files(REPO))
    assert after != before
    for cut in range(calls):
        hub.blobs.clear()
        hub.repos["models", REPO].add("main", dict(before), set(before), "back")
        hub.drop_at = len(hub.calls) + cut
        with contextlib.suppress(OSError):  # the client tries some calls twice by itself
            push_folder(folder, REPO)
        assert hub.files(REPO) in (before, after)
        hub.drop_at = None
        push_folder(folder, REPO)
        assert hub.files(REPO) == after


def test_a_readme_of_people_survives_a_cut_connection_and_a_new_branch(
    hub, tmp_path, caplog, monkeypatch
):
    """Not to have seen it was taken for leave to replace it; and a new branch has main's."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's own attempts
    folder, mine = pard_folder(tmp_path), b"---\nlicense: mit\n---\n# Mine\n"
    push_folder(folder, REPO)
    files = {**hub.files(REPO), "README.md": mine}
    hub.repos["models", REPO].add("main", files, set(), "by hand")
    begin = len(hub.calls)
    push_folder(folder, REPO, license="apache-2.0")
    assert "it is kept, and the license in it" in caplog.text
    for cut in range(len(hub.calls) - begin):
        hub.drop_at = len(hub.calls) + cut
        with contextlib.suppress(OSError):
            push_folder(folder, REPO)
        hub.drop_at = None
        assert hub.files(REPO)["README.md"] == mine
    push_folder(folder, REPO, revision="next")
    assert hub.files(REPO, "next")["README.md"] == mine


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "shortlist.safetensors"],
)
def test_damaged_files_are_not_published(name, hub, tmp_path):
    folder = pard_folder(tmp_path)
    (folder / name).write_bytes(
        (folder / name).read_bytes()[:20] if (folder / name).exists() else b"cut"
    )
    with pytest.raises(OSError, match=name):
        push_folder(folder, REPO)
    assert not hub.repos


def test_a_damaged_file_beside_the_weights_is_named(tmp_path):
    target = tiny_model("llama", num_hidden_layers=7, dtype=torch.float32)
    hf_paradraft.Eagle3Drafter.from_target(target).save_pretrained(tmp_path / "layer")
    (tmp_path / "layer" / "shortlist.safetensors").write_bytes(b"cut")
    small = pard_folder(tmp_path / "small")
    (small / "generation_config.json").write_text("[]")
    for folder, name in (
        (tmp_path / "layer", "shortlist.safetensors"),
        (small, "generation_config.json"),
    ):
        with pytest.raises(OSError, match=name):
            hf_paradraft.AutoDrafter.from_pretrained(folder)


def test_a_readme_that_is_no_text_is_named(tmp_path):
    folder = pard_folder(tmp_path)
    (folder / "README.md").write_bytes("déjà".encode("latin-1"))
    with pytest.raises(ValueError, match=f"{folder} has a file that is no text in UTF-8"):
        push_folder(folder, REPO)


@pytest.mark.parametrize("error", [RuntimeError, PermissionError, KeyboardInterrupt])
def test_a_failed_push_leaves_no_empty_repository(error, hub, tmp_path, monkeypatch):
    """Whoever stops it: the line, the disk or a person."""
    folder = pard_folder(tmp_path)

    def fails(*_, **__):
        raise error("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(HfApi, "create_commit", fails)
        with pytest.raises((OSError, KeyboardInterrupt), match=r"was not published|stopped"):
            push_folder(folder, REPO)
    assert not HfApi().repo_exists(REPO)
    if error is KeyboardInterrupt:
        return
    push_folder(folder, REPO)
    with monkeypatch.context() as patch:
        patch.setattr(HfApi, "create_commit", fails)
        with pytest.raises(OSError, match="as it was"):
            push_folder(folder, REPO)
    assert HfApi().repo_exists(REPO)  # what was there before stays


def test_measurements_of_former_weights_do_not_stay_on_the_hub(hub, tmp_path):
    folder = pard_folder(tmp_path)
    push_folder(folder, REPO)
    for name in ("bench.json", "tau.png", "notes.txt"):
        HfApi().upload_file(path_or_fileobj=b"old", path_in_repo=name, repo_id=REPO)
    push_folder(folder, REPO)
    assert not {"bench.json", "tau.png"} & set(hub.files(REPO))
    assert "notes.txt" in hub.files(REPO)


def test_a_card_that_cannot_be_read_is_named(hub, tmp_path):
    folder = pard_folder(tmp_path)
    (folder / "README.md").write_text("---\nlicense: [mit\n---\n")
    with pytest.raises(ValueError, match=r"README.md does not begin with YAML that can be read"):
        push_folder(folder, REPO, license="mit")
    assert not HfApi().repo_exists(REPO)


def test_the_base_of_an_adapter_is_no_path_elsewhere(hub, folder, monkeypatch):
    """Trained as `base/small` beside, and pushed from another place, the card said that it was a
    repository.
    """
    monkeypatch.chdir(folder)
    (folder / "base").mkdir()
    (folder / "target").rename(folder / "base" / "small")
    options = {"max_steps": 1, "use_cpu": True, "max_length": 64}
    train_ppd("base/small", "rows.jsonl", "out", **options)
    monkeypatch.chdir(folder / "base")
    push_folder(folder / "out", REPO)
    assert json.loads(hub.files(REPO)["adapter_config.json"])["base_model_name_or_path"] is None
    assert b"base/small" not in hub.files(REPO)["README.md"]


def test_a_commit_whose_reply_is_lost_stays_on_the_hub(hub, tmp_path, monkeypatch):
    """The commit is there, and its repository is not taken for an empty one."""
    folder, upload = pard_folder(tmp_path), HfApi.create_commit

    def loses_the_reply(self, **kwargs):
        upload(self, **kwargs)
        raise RuntimeError("the line broke")

    monkeypatch.setattr(HfApi, "create_commit", loses_the_reply)
    with pytest.raises(OSError, match="push again"):
        push_folder(folder, REPO)
    assert "model.safetensors" in hub.files(REPO)


def test_a_card_that_is_refused_leaves_no_empty_repository(hub, tmp_path, monkeypatch):
    def refuses(*_, **__):
        raise ValueError("Invalid metadata in README.md.")

    monkeypatch.setattr(HfApi, "create_commit", refuses)
    with pytest.raises(ValueError, match="Invalid metadata"):
        push_folder(pard_folder(tmp_path), REPO)
    assert not HfApi().repo_exists(REPO)


def test_repositories_that_are_no_drafters_are_refused(hub, tmp_path):
    with pytest.raises(OSError, match="neither a folder here nor a model"):
        hf_paradraft.AutoDrafter.from_pretrained(f"{USER}/missing")
    with pytest.raises(OSError, match="neither a folder here nor a model"):
        hf_paradraft.AutoDrafter.from_pretrained(f"{USER}/missing", local_files_only=True)
    push_folder(pard_folder(tmp_path), REPO)
    hub.repos["models", REPO].gated = True
    with pytest.raises(OSError, match=r"403|[gG]ated"):
        hf_paradraft.AutoDrafter.from_pretrained(REPO, cache_dir=tmp_path / "cache")
    plain = tmp_path / "plain"
    tiny_model().save_pretrained(plain)
    HfApi().create_repo(f"{USER}/plain")
    HfApi().upload_folder(repo_id=f"{USER}/plain", folder_path=plain)
    with pytest.raises(ValueError, match="not a PARD drafter yet"):
        hf_paradraft.AutoDrafter.from_pretrained(f"{USER}/plain")


def test_files_in_folders_of_a_repository_stay(hub, tmp_path):
    """Patterns of file names fitted paths too: other people's weights in sub-folders were taken
    away.
    """
    push_folder(pard_folder(tmp_path), REPO)
    for name in ("model-fp16/model.safetensors", "sub/tau.png"):
        HfApi().upload_file(path_or_fileobj=b"mine", path_in_repo=name, repo_id=REPO)
    push_folder(
        tmp_path / "drafter"
        if (tmp_path / "drafter").is_dir()
        else pard_folder(tmp_path / "again"),
        REPO,
    )
    assert {"model-fp16/model.safetensors", "sub/tau.png"} <= {*HfApi().list_repo_files(REPO)}


def test_a_readme_that_people_changed_stays(hub, tmp_path, caplog):
    folder = pard_folder(tmp_path)
    push_folder(folder, REPO)
    card = ModelCard.load(REPO).content
    push_folder(folder, REPO)
    assert ModelCard.load(REPO).content == card
    for text in (card + "\nAnd this is what we saw.\n", "---\nlicense: mit\n---\n# Ours\n"):
        HfApi().upload_file(path_or_fileobj=text.encode(), path_in_repo="README.md", repo_id=REPO)
        push_folder(folder, REPO)
        assert ModelCard.load(REPO).content == text
        assert "people wrote or changed" in caplog.text
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# New\n")
    push_folder(folder, REPO)
    assert "# New" in ModelCard.load(REPO).content


def test_a_readme_that_began_as_pefts_is_published(hub, tmp_path):
    folder = ppd_folder(tmp_path)
    (folder / "README.md").write_text(
        "---\nlicense: mit\n---\n# Model Card for Model ID\n\nOur own words.\n"
    )
    push_folder(folder, REPO)
    assert "Our own words." in ModelCard.load(REPO).content
