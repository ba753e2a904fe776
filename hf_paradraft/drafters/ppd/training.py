"""Train prompt tokens: the frozen model teaches them its own guesses at their place (PPD, section
4.4); and calibrate the adapter in a folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import PeftModel, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.utils import logging

from ...files import hub_name, read_json, write_json
from ...training.data import encode_rows
from ...training.losses import divergence
from ...training.run import RunInputs, TrainingOptions, option
from ...training.source import load_rows
from ...training.target import (
    check_context,
    config_of,
    open_fast,
    open_model,
    open_tokenizer,
    refuse_packed,
)
from ...training.trainer import ResumableTrainer
from ..formats.folder import DrafterFolder
from .adapter import PpdConfig, check_takes_masks, prompt_embedding
from .model import PpdDrafter
from .rows import PromptCollator, calibrate, forward_with_prompts

logger = logging.get_logger(__name__)


class PpdTrainer(ResumableTrainer):
    """A trainer of KL from the model's own distributions to the prompts' guesses.

    Teacher and student share one forward.

    Args:
        model: a model with an active PPD adapter; all else is frozen.
        args: any `TrainingArguments`.
        points: the most points of each text where prompts are inserted.
        decay: α, the weight of distance `i` (from 0) is `αⁱ`.
        kwargs: as for `Trainer`, with datasets from `encode_rows`.
    """

    def __init__(
        self,
        model: PeftModel,
        args: TrainingArguments,
        points: int = 32,
        decay: float = 0.8,
        **kwargs: Any,
    ):
        self.decay, base = decay, model.get_base_model()
        check_takes_masks(base)
        config = prompt_embedding(base).config()
        collator = PromptCollator(config.num_prompt_tokens, points, args.seed)
        super().__init__(model, args, data_collator=collator, **kwargs)

    def compute_loss(
        self, model, inputs, return_outputs: bool = False, num_items_in_batch: Any = None
    ):
        """Compute `Σ αⁱ KL(Pᵢ ‖ Qᵢ)`, a mean over points."""
        base = self.accelerator.unwrap_model(model).get_base_model()
        model.eval()  # a teacher without dropout; prompts have none
        guesses, teachers, _, _ = forward_with_prompts(
            model, base, inputs["input_ids"], inputs["points"]
        )
        losses = divergence(guesses, teachers)
        weights = self.decay ** torch.arange(losses.shape[1], device=losses.device)
        loss = (losses * weights).sum() / max(1, len(losses))
        return (loss, (guesses, teachers)) if return_outputs else loss

    @torch.no_grad()
    def evaluate(
        self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Measure the loss, and how often the target's choice is among the guesses.

        At distance `i` (from 1), it is the first guess (`@i_top1`) or among five (`@i_top5`).
        """
        losses, found = [], []
        for inputs in self.get_eval_dataloader(eval_dataset):
            inputs = self._prepare_inputs(inputs)
            loss, (guesses, teachers) = self.compute_loss(self.model, inputs, return_outputs=True)
            losses.append(loss)
            best = guesses.topk(min(5, guesses.shape[-1]), dim=-1).indices
            found.append((best == teachers.argmax(-1, keepdim=True)).float())
        metrics = {f"{metric_key_prefix}_loss": torch.stack(losses).mean().item()}
        points = torch.cat(found)  # (T, m, 5)
        for distance, hits in enumerate(points.unbind(1) if len(points) else (), 1):
            metrics[f"{metric_key_prefix}_@{distance}_top1"] = hits[:, 0].mean().item()
            metrics[f"{metric_key_prefix}_@{distance}_top5"] = hits.sum(-1).mean().item()
        self.log(dict(metrics))
        return metrics


@dataclass(kw_only=True)
class PpdTraining(TrainingOptions):
    """Train prompt tokens that let a model draft for itself: a PEFT adapter of a few kilobytes."""

    kind: ClassVar[str] = "ppd"
    example: ClassVar[str] = "--target DIR --train-file answers.jsonl --output-dir OUT"
    recorded: ClassVar[tuple[str, ...]] = ("points", "decay")

    target: str = option(
        "The causal LM to speed up: folder or Hub id. It is not changed.", read=True
    )
    num_prompt_tokens: int = option("m: how far ahead is guessed.", 3, least=1)
    num_ensembles: int = option("E: embeddings per prompt token.", 1, least=1)
    points: int = option("Insertion points in each text, at most.", 32, least=1)
    decay: float = option("α, of the weight of each further distance.", 0.8, above=0, most=1)
    num_train_epochs: float = option("Times that every sample is read.", 1.0, above=0)
    per_device_train_batch_size: int = option("Samples of a forward.", 4, least=1)
    learning_rate: float = option("Peak learning rate.", 1e-2, above=0)

    def check(self) -> None:
        """Implement `TrainingOptions.check`."""
        super().check()
        refuse_packed(self.target, "prompt tokens are trained for ordinary ones")

    def open_model(
        self, tokenizer: PreTrainedTokenizerBase, device: torch.device
    ) -> PreTrainedModel:
        """Load the target, in the number format that this hardware is fast at."""
        return open_fast(self.target)

    @classmethod
    def check_drafter(cls, drafter: PpdDrafter) -> None:
        """Implement `TrainingOptions.check_drafter`: prompts learn in their base model alone."""
        raise ValueError(
            f"A {drafter.title} does not learn from texts that are answered meanwhile."
        )

    def untrained(self, inputs: RunInputs) -> PeftModel:
        """Implement `TrainingOptions.untrained`: the target with an adapter of new prompts."""
        config = PpdConfig(
            num_prompt_tokens=self.num_prompt_tokens, num_ensembles=self.num_ensembles
        )
        adapted = get_peft_model(inputs.model, config)
        if Path(self.target).exists():  # wherever the adapter is loaded or published from
            adapted.active_peft_config.base_model_name_or_path = str(Path(self.target).resolve())
        return adapted

    def trainer(self, drafter: PeftModel, inputs: RunInputs) -> PpdTrainer:
        """Implement `TrainingOptions.trainer`."""
        return PpdTrainer(drafter, inputs.arguments, self.points, self.decay, **inputs.sets)

    @property
    def models(self) -> dict[str, str | None]:
        """Implement `TrainingOptions.models`."""
        return {"base_model": hub_name(str(self.target))}

    def save(
        self,
        drafter: PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        record: dict[str, Any],
        folder: Path,
    ) -> None:
        """Save the adapter as PEFT does, without PEFT's card, and the record of its training."""
        drafter.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        write_json(folder / "paradraft.json", {"training": record})

    def measure(self, drafter: PeftModel, inputs: RunInputs) -> dict[str, Any]:
        """Calibrate the adapter on evaluation rows, in its own config."""
        try:
            calibrate(drafter, inputs.eval_set)
        except ValueError as error:
            logger.warning("The adapter is saved without calibration. %s", error)
        return {}

    def result(self, drafter: PeftModel) -> PpdDrafter:
        """Make a drafter of the trained adapter."""
        return PpdDrafter.from_model(drafter)


def calibrate_folder(
    adapter: str | Path,
    data: str | Path,
    model: str | Path | None = None,
    max_length: int = 512,
    **loading: Any,
) -> PeftModel:
    """Calibrate the adapter in a folder, as `paradraft calibrate` does.

    Args:
        adapter: the adapter's folder; `adapter_config.json` is written anew.
        data: JSON lines or a Hub dataset, as for `load_rows`.
        model: the base model, folder or Hub id; default: the one the adapter names.
        max_length: the most tokens of a sample.
        loading: the base model's `dtype` and `device_map`, as for `open_model`.

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
    adapted = PeftModel.from_pretrained(open_model(name, **loading), str(folder))
    file = folder / "adapter_config.json"
    write_json(file, {**read_json(file), "accuracy": calibrate(adapted, samples)})
    return adapted
