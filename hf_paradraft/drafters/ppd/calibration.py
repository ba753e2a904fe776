"""Counts of right guesses, by distance and rank: sparse trees are built from them (PPD, section
4.3).
"""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from ...files import read_json, write_json
from ...training.data import encode_rows
from ...training.source import load_rows
from ...training.target import check_context, config_of, open_model, open_tokenizer, refuse_packed
from ..formats.folder import DrafterFolder
from .adapter import PpdConfig, check_takes_masks
from .drafting import MAX_RANKS
from .model import PpdDrafter
from .rows import PromptCollator, forward_with_prompts

LEAST_POINTS = 50
POINTS, BATCH_SIZE = 32, 4  # the most places in each text, and texts in a forward


def rank_counts(
    guesses: Tensor, teachers: Tensor, tokens: Tensor, begins: Tensor, ranks: int
) -> tuple[Tensor, Tensor]:
    """Count right guesses where they would be judged.

    A guess at distance `d` counts only if the text up to there is the model's own, and if all
    guesses before it held the right token among their first ones, for no tree gets there otherwise.

    Args:
        guesses, teachers: logits `(T, m, V)`, from `forward_with_prompts`.
        tokens: int64 `(T, m)`, of the text.
        begins: bool `(T,)`, whether the token directly after the point is the model's own.
        ranks: R.

    Returns:
        Hits `(m, R)` and tries `(m,)`, float64.
    """
    chosen = teachers.argmax(-1)
    hits = guesses.topk(ranks, dim=-1).indices == chosen[..., None]
    follows = torch.nn.functional.pad(
        ((chosen == tokens) & hits.any(-1))[:, :-1].cumprod(1), (1, 0), value=1
    ).bool()
    follows &= begins[:, None]
    return (hits & follows[..., None]).double().sum(0).cpu(), follows.double().sum(0).cpu()


@torch.no_grad()
def calibrate(model: PeftModel, samples: Dataset) -> list[list[float]]:
    """Measure how often the active adapter's guesses are right, and set that in its config.

    The shares are `a[d][r]`, by distance and rank.

    Args:
        model: a model with an active PPD adapter.
        samples: encoded rows that the adapter was not trained on, best answered by the model
            itself.

    Raises:
        ValueError: a model that takes no masks, or too few places to count at.
    """
    base, config = model.get_base_model(), model.active_peft_config
    check_takes_masks(base)
    model.eval()
    ranks = min(MAX_RANKS, config.vocab_size)
    collator = PromptCollator(config.num_prompt_tokens, POINTS)
    hits = torch.zeros(config.num_prompt_tokens, ranks)
    tries = torch.zeros(config.num_prompt_tokens)
    lengths = list(samples["length"])
    order = sorted(range(len(samples)), key=lengths.__getitem__)
    own = torch.Generator()  # the caller's seed stays as it is
    batches = DataLoader(samples, BATCH_SIZE, sampler=order, collate_fn=collator, generator=own)
    for batch in tqdm(batches, desc="calibrate", leave=False):
        guessed = forward_with_prompts(
            base, base, config, batch["input_ids"].to(base.device), batch["points"].to(base.device)
        )
        more = rank_counts(*guessed, ranks)
        hits, tries = hits + more[0], tries + more[1]
    if tries[0] < LEAST_POINTS:
        raise ValueError(
            f"Only {int(tries[0])} places to count at: give more or longer rows ({LEAST_POINTS} "
            "places at least)."
        )
    rates = (hits / tries[:, None].clamp(min=1)).tolist()
    config.accuracy = [[round(rate, 5) for rate in falling(row)] for row in rates]
    return config.accuracy


def falling(rates: list[float]) -> list[float]:
    """Fit the falling row that is nearest to `rates`, by isotonic regression.

    A tree needs chances that fall with the rank.
    """
    blocks: list[tuple[float, int]] = []
    for rate in rates:
        blocks.append((rate, 1))
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            (high, many), (low, few) = blocks.pop(), blocks.pop()
            blocks.append(((high * many + low * few) / (many + few), many + few))
    return [rate for rate, count in blocks for _ in range(count)]


def calibrate_folder(
    adapter: str | Path,
    data: str | Path,
    model: str | Path | None = None,
    max_length: int = 512,
    dtype: torch.dtype = torch.float32,
) -> PeftModel:
    """Calibrate the adapter in a folder, as `paradraft calibrate` does.

    Args:
        adapter: the adapter's folder; `adapter_config.json` is written anew.
        data: JSON lines or a Hub dataset, as for `load_rows`.
        model: the base model, folder or Hub id; default: the one the adapter names.
        max_length: the most tokens of a sample.
        dtype: the base model's dtype.

    Returns:
        The base model with the calibrated adapter.

    Raises:
        ValueError, OSError: something about the inputs is wrong; nothing has been written then.
    """
    folder = Path(adapter)
    PpdDrafter.check_folder(DrafterFolder(folder))
    name = model or PpdConfig.from_pretrained(str(folder)).base_model_name_or_path
    if name is None:
        raise ValueError("The adapter does not name its base model: pass --target.")
    refuse_packed(name, "prompt tokens are calibrated with ordinary ones")
    check_context(config_of(name), max_length)
    tokenizer = open_tokenizer(name)
    samples = encode_rows(load_rows(data), tokenizer, max_length)
    placement: dict[str, Any] = {"device_map": "auto"} if torch.cuda.is_available() else {}
    adapted = PeftModel.from_pretrained(open_model(name, dtype=dtype, **placement), str(folder))
    file = folder / "adapter_config.json"
    write_json(file, {**read_json(file), "accuracy": calibrate(adapted, samples)})
    return adapted
