"""Train a ParallelSpec drafter: group-wise rows, as PARD's, on the target's own embedding and head (section 3.2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import LongTensor, Tensor
from transformers import TrainingArguments

from ...training.data import IGNORED
from ...training.losses import cross_entropy, rejection
from ...training.row_trainer import CodConfig, RowCollator, RowTrainer
from ..feature_training import Setting, train_on_target
from ..target_states import TargetStates
from .config import Style
from .model import ParallelSpecDrafter

Loss = Literal["ce", "tv"]


def text_states(states: TargetStates, inputs: dict[str, Tensor]) -> dict[Any, Tensor]:
    """The target's states of a batch's texts: their rows, of depth 0, come first."""
    text = inputs["depths"] == 0
    return states(inputs["input_ids"][:, text.any(0)], text.sum(1))


def before_each(states: Tensor, rows: LongTensor, dtype: torch.dtype) -> Tensor:
    """`(B, R, hidden)`: beside each token of a text the state at the token before; nothing beside the first, and masks."""
    features = torch.zeros((*rows.shape, states.shape[-1]), device=states.device, dtype=dtype)
    features[:, 1 : states.shape[1]] = states[:, :-1].to(dtype)
    return features


class ParallelSpecTrainer(RowTrainer):
    """The paper's losses: cross-entropy through the target's head, EAGLE-style with SmoothL1 on its states; or total variation.

    Args:
        model: attached to its target.
        args: any `TrainingArguments`.
        states: of the target.
        cod: which rows to keep in training; its `num_depths` is M + 1.
        decay: λ, of the weight `λ^d` of the guess at depth `d`.
        loss: `ce`, or `tv`: 0.1 cross-entropy and 0.9 of the chance of being rejected.
        kwargs: as for `Trainer`, with datasets from `encode_rows`.
    """

    def __init__(
        self,
        model: ParallelSpecDrafter,
        args: TrainingArguments,
        states: TargetStates,
        cod: CodConfig,
        decay: float = 1.0,
        loss: Loss = "ce",
        **kwargs: Any,
    ):
        super().__init__(model, args, RowCollator(0, cod, args.seed, True, model.vocabulary), **kwargs)
        self.states, self.decay, self.loss = states, decay, loss

    def row_losses(
        self, model: Any, inputs: dict[str, Any], labels: Tensor, depths: Tensor, columns: Tensor
    ) -> tuple[Tensor, Any]:
        """As `RowTrainer.row_losses`."""
        own: ParallelSpecDrafter = self.model
        states = features = None
        if own.reads_features or self.loss == "tv":
            states = text_states(self.states, inputs)
        if own.reads_features:
            features = before_each(states["normed"], inputs["input_ids"], own.dtype)
        logits, guessed = model(**inputs, columns=columns, features=features)
        losses = cross_entropy(logits, labels)
        if states is not None:
            learned = (labels != IGNORED).nonzero(as_tuple=True)
            rows, places = learned[0], inputs["position_ids"][:, columns][learned]
            if self.loss == "tv":
                rejected = rejection(logits[learned], self.states.probabilities(states, rows, places))
                losses = (0.1 * losses).index_put(learned, 0.9 * rejected, accumulate=True)
            if own.reads_features:
                wanted = states["normed"][rows, places].float()
                near = F.smooth_l1_loss(guessed[learned].float(), wanted, reduction="none").mean(-1)
                losses = losses.index_put(learned, near, accumulate=True)
        return losses * self.decay ** depths.clamp(min=0), logits


def train_parallelspec(
    target: str | Path,
    train_file: str | Path,
    output_dir: Path,
    style: Style = "medusa",
    num_masks: int = 4,
    num_layers: int = 1,
    cod_ratio: float = 1.0,
    cod_min_ratio: float = 0.2,
    decay: float = 1.0,
    loss: Loss = "ce",
    **options: Any,
) -> ParallelSpecDrafter:
    """Train a drafter for `target`; it and its record are saved in `output_dir`.

    Args:
        target: folder or Hub id of the causal LM, with its tokenizer; it is not changed.
        train_file: JSON lines or a Hub dataset, as for `load_rows`; best answered by the target itself.
        output_dir: new or empty, unless told otherwise.
        style: `medusa` reads tokens alone, `eagle` the target's states too.
        num_masks: M.
        num_layers: of the drafter.
        cod_ratio, cod_min_ratio: of conditional output dropping; 1 keeps every row.
        decay: λ.
        loss: `ce` or `tv`.
        options: as for `train_on_target`.

    Raises:
        ValueError, OSError: something about the inputs is wrong; nothing has been written then.
    """
    if num_masks < 1 or num_layers < 1:
        raise ValueError(f"A ParallelSpec drafter has a mask and a layer at least, but they are {num_masks} and {num_layers}.")
    cod = CodConfig(num_masks + 1, cod_ratio, cod_min_ratio)
    if loss not in ("ce", "tv") or not 0 < decay <= 1:
        raise ValueError(f"loss has to be ce or tv, and decay in (0, 1], but they are {loss!r} and {decay}.")

    def make(setting: Setting) -> tuple[ParallelSpecDrafter, ParallelSpecTrainer]:
        drafter = ParallelSpecDrafter.from_target(setting.target, style, num_masks, num_layers, setting.vocabulary)
        trainer = ParallelSpecTrainer(
            drafter.float(),
            setting.arguments,
            setting.states(("normed",)),
            cod,
            decay,
            loss,
            train_dataset=setting.train_set,
            eval_dataset=setting.eval_set,
        )
        return drafter, trainer

    usual = {"adam_beta2": 0.95 if style == "eagle" else 0.999}
    record = {"style": style, "num_masks": num_masks, "cod_ratio": cod_ratio, "decay": decay, "loss": loss}
    return train_on_target("parallelspec", make, target, train_file, output_dir, usual=usual, record=record, **options)
