"""Publish a drafter's folder: one commit with everything in it, or nothing."""

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    hf_hub_download,
)
from huggingface_hub.errors import HTTPError, RevisionNotFoundError
from transformers.utils import logging
from yaml import YAMLError  # type: ignore[import-untyped]

from ..files import EXTRAS, PUBLISHED, check_whole, hub_name, read_json, shipped, write_json
from .card import CardFields, plot_bench, render_card

logger = logging.get_logger(__name__)
MODEL = "model.safetensors", "model-*.safetensors", "model.safetensors.index.json"
BASE = (*MODEL, "config.json", "generation_config.json")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
MEASURED = ("bench.json", "tau.png")  # of former weights
SPACE = ("README.md", "requirements.txt", "*.py")
NO_CACHES = shutil.ignore_patterns("__pycache__", ".*")
MARK = "<!-- rendered: {} -->"  # after a card of ours, with its hash: who changes it keeps it
# how often it stands in the card that PEFT writes next to every adapter, at least
PEFT_BLANK, MANY_BLANKS = "[More Information Needed]", 20


def push_drafter(
    folder: str | Path, repo_id: str, fields: CardFields, license: str | None = None, **options: Any
) -> CommitInfo:
    """Publish a drafter's weights, tokenizer, configs, calibration and card in one commit.

    Large files go first and are not sent again by a second try; the commit comes last, so a
    repository has the old state or the new one. A `README.md` in the folder is published as it is,
    but for a license given here; without one a card is rendered.

    Args:
        folder: the folder of a whole drafter; a base model's path on this machine is not
            published.
        repo_id: `user/name`; made if it does not exist.
        fields: the card's fields, from its kind.
        license: as the Hub names it, for the card.
        options: `private`, `revision`, `create_pr`, `token`, `commit_message`, as for `upload`.

    Raises:
        OSError: a damaged file, or the Hub refused; nothing has been published.
        ValueError: a damaged `bench.json`, a card that the Hub does not take, or a proposal for
            another branch than main.
    """
    folder = Path(folder)
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name)
        # An adapter may lie next to its base, whose weights are not ours to publish.
        left_out = BASE if fields.relation == "adapter" else ADAPTER
        for pattern in {*PUBLISHED} - {*left_out}:
            for file in folder.glob(pattern):
                check_whole(file)
                shutil.copyfile(file, whole / file.name)
        if (adapter := whole / "adapter_config.json").exists():
            config = read_json(adapter)
            config["base_model_name_or_path"] = hub_name(config.get("base_model_name_or_path"))
            write_json(adapter, config)
        plot_bench(whole)
        card = whole / "README.md"
        if not card.exists() or card.read_text(encoding="utf-8").count(PEFT_BLANK) >= MANY_BLANKS:
            text = str(render_card(whole, repo_id, fields, license))
            if _is_edited(repo_id, options.get("revision"), options.get("token")):
                what = "it is kept" if license is None else "it is kept, and the license in it"
                logger.warning(
                    "%s has a README that people wrote or changed: %s. Put one into %s.",
                    repo_id,
                    what,
                    folder,
                )
                card.unlink(missing_ok=True)
            else:
                card.write_text(f"{text}\n{MARK.format(_hash(text))}\n", encoding="utf-8")
        elif license is not None:
            try:
                model_card = ModelCard.load(card)
            except (TypeError, ValueError, YAMLError) as error:
                raise ValueError(
                    f"{folder / 'README.md'} does not begin with YAML that can be read: {error}"
                ) from None
            model_card.data.license = license
            model_card.save(card)
        stale = [*EXTRAS, *MEASURED]
        if any(whole.glob("model*.safetensors")):  # a base may lie next to an adapter
            stale += [*MODEL, *ADAPTER]
        return upload(
            whole,
            repo_id,
            "model",
            **{"commit_message": "Upload drafter", **options},
            without=stale,
        )


def _hash(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()[:12]


def _is_edited(repo_id: str, revision: str | None, token: str | bool | None) -> bool:
    """Tell whether a repository has a README that is not as this library rendered it.

    Raises:
        OSError: the Hub does not say.
    """
    api = HfApi(token=token)
    try:
        if revision is not None and not api.revision_exists(repo_id, revision):
            revision = None  # a new branch has main's
        if not api.file_exists(repo_id, "README.md", revision=revision):
            return False
        copy = hf_hub_download(
            repo_id,
            "README.md",
            revision=revision,
            token=token,
            force_download=True,  # an older copy says nothing
        )
        text = Path(copy).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return True
    except (HTTPError, OSError, RuntimeError) as error:
        raise _unpublished(repo_id, error) from error
    body, mark, rest = text.rpartition(MARK.partition("{")[0])
    if not mark:  # of a version that left no mark, or of others
        return "\n- paradraft\n" not in text
    return rest.strip() != MARK.format(_hash(body)).removeprefix(mark)


def upload(
    folder: Path,
    repo_id: str,
    repo_type: str,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    token: str | bool | None = None,
    commit_message: str = "Upload",
    space_sdk: str | None = None,
    without: Sequence[str] = (),
) -> CommitInfo:
    """Make the repository if need be, and commit a folder to it.

    One commit, where `HfApi.upload_folder` makes several of a long upload: half of it is never
    found. Files that fit patterns of `without` and were left by an earlier commit are taken away.

    Args:
        folder: the folder to commit.
        repo_id: `user/name`; made if it does not exist.
        repo_type, space_sdk: those of `HfApi.create_repo`.
        private: whether a new repository is private.
        revision: branch, made from main if it does not exist.
        create_pr: whether the commit is only proposed.
        token: default: the stored one.
        commit_message: title of the commit.
        without: patterns of the files to take away.

    Raises:
        OSError: the Hub refused.
        ValueError: a card that the Hub does not take, or a proposal for another branch than main.
    """
    if create_pr and revision not in (None, "main"):
        raise ValueError(
            f"A proposal is made for main, and not for {revision}: leave out create_pr or revision."
        )
    api, new = HfApi(token=token), False
    try:
        new = not api.repo_exists(repo_id, repo_type=repo_type)
        repo_id = api.create_repo(
            repo_id, private=private, repo_type=repo_type, space_sdk=space_sdk, exist_ok=True
        ).repo_id
        if revision is not None and not create_pr:
            try:
                api.repo_info(repo_id, revision=revision, repo_type=repo_type)
            except RevisionNotFoundError:
                api.create_branch(repo_id, branch=revision, repo_type=repo_type, exist_ok=True)
        files = {
            file.relative_to(folder).as_posix(): file
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        had = api.list_repo_files(
            repo_id, repo_type=repo_type, revision=None if create_pr else revision
        )
        # other people's files lie in folders
        here = [name for name in had if "/" not in name and name not in files]
        stale = [name for name in here if any(fnmatch(name, pattern) for pattern in without)]
        return api.create_commit(
            repo_id=repo_id,
            operations=[
                *(CommitOperationDelete(name) for name in stale),
                *(CommitOperationAdd(name, file) for name, file in files.items()),
            ],
            commit_message=commit_message,
            repo_type=repo_type,
            revision=revision,
            create_pr=create_pr,
        )
    # also what stops it; the client's own RuntimeError hides what an upload died of
    except BaseException as error:
        if new:
            with suppress(HTTPError, RuntimeError):  # the Hub may be gone for this, too
                # a commit's reply may be lost after the Hub did its work
                if set(api.list_repo_files(repo_id, repo_type=repo_type)) <= {".gitattributes"}:
                    api.delete_repo(repo_id, repo_type=repo_type, missing_ok=True)
        if not isinstance(error, HTTPError | OSError | RuntimeError):
            raise  # a card says by itself what is wrong with it
        raise _unpublished(repo_id, error) from error


def _unpublished(repo_id: str, error: BaseException) -> OSError:
    return OSError(
        f"{repo_id} was not published, and what the Hub had is as it was; push again to go on from "
        f"here. {error}"
    )


def push_recipe(repo_id: str, private: bool | None = None) -> CommitInfo:
    """Publish the decoding loop as a `custom_generate` recipe.

    It is used as `generate(custom_generate=repo_id, trust_remote_code=True)`.
    """
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name)
        shutil.copytree(
            shipped("hub_cards") / "recipe",
            whole,
            ignore=NO_CACHES,
            copy_function=shutil.copyfile,  # a mode may forbid to write a card
            dirs_exist_ok=True,
        )
        _name_in_card(whole, "REPO_ID", repo_id)
        return upload(whole, repo_id, "model", private, commit_message="Upload recipe")


def push_space(repo_id: str, private: bool | None = None) -> CommitInfo:
    """Publish the demo Space, with this very library next to it.

    Only files that belong to the Space are taken from its folder.
    """
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name)
        for pattern in SPACE:
            for file in shipped("spaces").glob(pattern):
                shutil.copyfile(file, whole / file.name)
        shutil.copytree(Path(__file__).parents[1], whole / "hf_paradraft", ignore=NO_CACHES)
        _name_in_card(whole, 'Client("user/name")', f'Client("{repo_id}")')
        return upload(
            whole,
            repo_id,
            "space",
            private,
            commit_message="Upload Space",
            space_sdk="gradio",
        )


def _name_in_card(folder: Path, placeholder: str, name: str) -> None:
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8").replace(placeholder, name)
    card.write_text(text, encoding="utf-8")
