"""What is in this folder or repository? Read from its configs; weights are not touched."""

from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import AutoConfig

from ..drafters.pard.config import read_mask_token_id, refuse_other_drafters
from ..drafters.ppd import PpdConfig
from .files import read_config, read_json


def describe(repo_or_dir: str) -> list[tuple[str, Any]]:
    """What there is to say of a drafter, as (name, value) pairs.

    Args:
        repo_or_dir: a folder, or a Hub id.

    Raises:
        OSError: nothing readable there.
        ValueError: it is no drafter, or of a kind that is not supported.
    """
    folder = Path(repo_or_dir)
    if not folder.is_dir():
        try:
            files = HfApi().list_repo_files(repo_or_dir)
            name = next(name for name in ("adapter_config.json", "config.json") if name in files)
            folder = Path(hf_hub_download(repo_or_dir, name)).parent
        except (HfHubHTTPError, HFValidationError, StopIteration) as error:
            raise OSError(
                f"{repo_or_dir} is neither a folder here nor a drafter that could be fetched from the Hub. {error}"
            ) from None
    if (folder / "adapter_config.json").exists():
        kind = read_json(folder / "adapter_config.json").get("peft_type")
        if kind != "PPD":
            raise ValueError(f"{repo_or_dir} is a PEFT adapter of type {kind}, not a drafter.")
        adapter = PpdConfig.from_pretrained(str(folder))
        first = adapter.accuracy and ", ".join(f"{100 * row[0]:.0f} %" for row in adapter.accuracy)
        return [
            ("kind", "PPD adapter (prompt tokens)"),
            ("base model", adapter.base_model_name_or_path or "not recorded"),
            ("prompt tokens", f"{adapter.num_prompt_tokens} × {adapter.num_ensembles}"),
            ("base's embedding", f"{adapter.vocab_size} × {adapter.hidden_size}"),
            ("right, by distance", first or "not calibrated"),
            ("fits", "transformers with hf_paradraft and PEFT"),
        ]
    raw = read_config(folder)
    refuse_other_drafters(raw)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    ours = raw["paradraft"] if isinstance(raw.get("paradraft"), dict) else {}
    training = ours.get("training") or {}
    tau = (training.get("acceptance") or {}).get("mean_emitted")
    return [
        ("kind", "PARD drafter"),
        ("architecture", ", ".join(raw.get("architectures") or ["?"])),
        ("mask token", read_mask_token_id(config)),
        ("vocabulary", config.get_text_config().vocab_size),
        ("adapted from", training.get("base_model") or "not recorded"),
        ("trained with K", training.get("num_depths") or "not recorded"),
        ("τ on held-out rows", f"{tau:.2f}" if tau else "not recorded"),
        ("drafts K", (ours.get("speculation_config") or {}).get("num_draft_tokens", 12)),
        ("fits", "transformers with hf_paradraft; vLLM and TensorRT-LLM with a target of the same vocabulary size"),
    ]
