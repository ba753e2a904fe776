"""Publish a drafter's folder: one commit with everything in it, or nothing."""

import json
import shutil
import tempfile
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi, ModelCard
from huggingface_hub.errors import HTTPError, RevisionNotFoundError
from transformers import AutoConfig

from ..drafters.pard.config import read_mask_token_id, refuse_other_drafters
from .card import hub_name, plot_bench, render_card
from .files import check_weights, read_json, shipped

# What a user of the drafter needs; whatever else lies in the folder stays here.
PUBLISHED = (
    "config.json", "generation_config.json", "adapter_config.json", "paradraft.json", "bench.json", "README.md", "LICENSE",
    "model.safetensors", "model-*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt",
)  # fmt: skip
PEFT_CARD = "# Model Card for Model ID"  # what PEFT writes beside every adapter


def push_folder(
    folder: str | Path,
    repo_id: str,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    token: str | bool | None = None,
    commit_message: str = "Upload drafter",
    license: str | None = None,
) -> CommitInfo:
    """Publish the drafter in `folder`: weights, tokenizer, configs, calibration and card in one commit.

    Large files go first and are not sent again by a second try; the commit comes last, so a repository has the old state or the
    new one. A `README.md` in the folder is published as it is, but for a license given here; without one a card is rendered.

    Args:
        folder: of a PARD drafter or a PPD adapter; a base model's path on this machine is left out of what is published.
        repo_id: `user/name`; made if it does not exist.
        private: for a new repository.
        revision: branch, made from main if it does not exist.
        create_pr: propose the commit instead.
        token: default: the stored one.
        commit_message: title of the commit.
        license: as the Hub names it, for the card.

    Raises:
        OSError: the folder lacks something, or the Hub refused; nothing has been published.
        ValueError: the folder holds no drafter.
    """
    folder = Path(folder)
    _check(folder)
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name)
        for pattern in PUBLISHED:
            for file in folder.glob(pattern):
                shutil.copy2(file, whole / file.name)
        if (adapter := whole / "adapter_config.json").exists():
            config = read_json(adapter)
            config["base_model_name_or_path"] = hub_name(config.get("base_model_name_or_path"))
            adapter.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        plot_bench(whole)
        card = whole / "README.md"
        if not card.exists() or PEFT_CARD in card.read_text():
            render_card(whole, repo_id, license).save(card)
        elif license is not None:
            own = ModelCard.load(card)
            own.data.license = license
            own.save(card)
        return upload(whole, repo_id, "model", private, revision, create_pr, token, commit_message)


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
) -> CommitInfo:
    """Make the repository if need be, and commit a folder to it; arguments as for `push_folder` and `HfApi.upload_folder`."""
    api = HfApi(token=token)
    try:
        repo_id = api.create_repo(repo_id, private=private, repo_type=repo_type, space_sdk=space_sdk, exist_ok=True).repo_id
        if revision is not None and not create_pr:
            try:
                api.repo_info(repo_id, revision=revision, repo_type=repo_type)
            except RevisionNotFoundError:
                api.create_branch(repo_id, branch=revision, repo_type=repo_type, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            repo_type=repo_type,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
        )
    except (HTTPError, RuntimeError) as error:  # the client's own RuntimeError hides what an upload died of
        raise OSError(
            f"{repo_id} was not published, and what the Hub had is as it was; push again to go on from here. {error}"
        ) from error


def push_recipe(repo_id: str, private: bool | None = None, token: str | bool | None = None) -> CommitInfo:
    """Publish the decoding loop as a `custom_generate` recipe: `generate(custom_generate=repo_id, trust_remote_code=True)`."""
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name)
        shutil.copytree(shipped("hub_cards") / "recipe", whole, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        card = (whole / "README.md").read_text().replace("REPO_ID", repo_id)
        (whole / "README.md").write_text(card)
        return upload(whole, repo_id, "model", private, token=token, commit_message="Upload recipe")


def push_space(repo_id: str, private: bool | None = None, token: str | bool | None = None) -> CommitInfo:
    """Publish the demo Space, with this very library beside it."""
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name)
        leftovers = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(shipped("spaces"), whole, dirs_exist_ok=True, ignore=leftovers)
        shutil.copytree(Path(__file__).parents[1], whole / "hf_paradraft", ignore=leftovers)
        card = (whole / "README.md").read_text().replace('Client("user/name")', f'Client("{repo_id}")')
        (whole / "README.md").write_text(card)
        return upload(whole, repo_id, "space", private, token=token, commit_message="Upload Space", space_sdk="gradio")


def _check(folder: Path) -> None:
    if (folder / "adapter_config.json").exists():
        if read_json(folder / "adapter_config.json").get("peft_type") != "PPD":
            raise ValueError(f"{folder} holds a PEFT adapter of another kind: publish it with PEFT's own push_to_hub.")
        wanted = {"adapter_model.safetensors"}
    elif (folder / "config.json").exists():
        refuse_other_drafters(read_json(folder / "config.json"))
        read_mask_token_id(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        index = folder / "model.safetensors.index.json"
        wanted = set(read_json(index)["weight_map"].values()) if index.exists() else {"model.safetensors"}
        wanted.add("tokenizer_config.json")
    else:
        raise OSError(f"{folder} holds no drafter: give the folder that save_pretrained or paradraft train wrote.")
    if missing := sorted(name for name in wanted if not (folder / name).exists()):
        raise OSError(f"{folder} has no {', '.join(missing)}: save model and tokenizer there again.")
    check_weights(folder)
