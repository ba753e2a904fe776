"""Train DFlash's and DSpark's blocks on a frozen target: anchors in every text, all blocks in one forward (DSpark, section 4)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedModel, Qwen3Config

from ...decoding.features import layers_of
from ...protocol.drafter import FeatureKey
from ..anchors import AnchorTrainer
from ..borrowed import final_scale
from ..dflash.config import BlockConfig, spread
from ..dflash.model import DFlashDrafter
from ..feature_training import Setting, train_on_target, unused_token
from ..stack import sizes_of
from .blocks import slots
from .calibration import calibrate
from .model import DSparkDrafter

FADING = 4.0  # slots: the weight of slot k is exp(-k / 4)


class Blocks(torch.nn.Module):
    """A drafter whose forward is `slots`, as wrappers of several processes want it; its parameters are the drafter's.

    Args:
        drafter: as for `slots`.
    """

    def __init__(self, drafter: DFlashDrafter):
        super().__init__()
        self.drafter = drafter

    def forward(self, batch: dict[str, Tensor], states: dict[FeatureKey, Tensor]) -> dict[str, Tensor]:
        """As `slots`."""
        return slots(self.drafter, batch, states)


def block_drafter(
    target: PreTrainedModel,
    mask_token_id: int,
    num_layers: int = 2,
    block_size: int = 7,
    num_features: int = 5,
    markov_rank: int = 64,
    markov_type: str = "vanilla",
    confidence: bool = True,
    vocabulary: LongTensor | None = None,
) -> DFlashDrafter:
    """An untrained drafter of blocks for `target`, attached to it: DSpark's, or DFlash's without rank and confidence.

    Args:
        target: a decoder-only causal LM.
        mask_token_id: of the rows to be guessed.
        num_layers: of its own, Qwen3's in the target's sizes.
        block_size: guesses of a block.
        num_features: layers of the target that it reads, spread evenly.
        markov_rank, markov_type: of the head that looks at the token before; rank 0 for none.
        confidence: whether it says how sure it is.
        vocabulary: int64 `(V',)`, the ids that it guesses; default: all.

    Raises:
        ValueError: options that do not fit the target.
    """
    config, total = target.config.get_text_config(), len(layers_of(target))
    if not 1 <= num_features <= total:
        raise ValueError(f"The target has {total} layers: {num_features} of them cannot be read.")
    layers = Qwen3Config(**sizes_of(target), num_hidden_layers=num_layers)
    chosen = spread(num_features, total) if total > 4 or num_features == 1 else tuple(range(num_features))
    block = BlockConfig(
        layers=layers,
        features=tuple(dict.fromkeys(min(max(0, key), total - 1) for key in chosen)),
        block_size=block_size,
        mask_token_id=mask_token_id,
        fill_in=False,
        target_hidden_size=config.hidden_size,
        target_layers=total,
        vocab_size=config.vocab_size,
        draft_vocab_size=None if vocabulary is None else len(vocabulary),
        markov_rank=markov_rank,
        markov_type=markov_type,
        confidence=confidence,
        confidence_with_markov=confidence and markov_rank > 0,
        window_from_anchor=True,
    )
    kind = DSparkDrafter if markov_rank or confidence else DFlashDrafter
    drafter = kind(block, vocabulary)
    head = drafter.markov if isinstance(drafter, DSparkDrafter) else None
    with torch.no_grad():
        drafter.stack.norm.weight.copy_(final_scale(target))
        if head is not None:  # says nothing at first, and learns as fast as its blocks
            head.before.weight.normal_()
            head.after.weight.zero_()
    drafter.to(target.get_input_embeddings().weight.device).attach(target)
    return drafter


def train_dspark(
    target: str | Path,
    train_file: str | Path,
    output_dir: Path,
    num_layers: int = 2,
    block_size: int = 7,
    num_features: int = 5,
    num_anchors: int = 32,
    markov_rank: int = 64,
    markov_type: str = "vanilla",
    confidence: bool = True,
    **options: Any,
) -> DFlashDrafter:
    """Train a drafter of blocks for `target`; it and its record are saved in `output_dir`.

    Args:
        target: folder or Hub id of the causal LM, with its tokenizer; it is not changed.
        train_file: JSON lines or a Hub dataset, as for `load_rows`; best answered by the target itself.
        output_dir: new or empty, unless told otherwise.
        num_layers, block_size, num_features, markov_rank, markov_type, confidence: as for `block_drafter`.
        num_anchors: blocks in each text, at most.
        options: as for `train_on_target`.

    Raises:
        ValueError, OSError: something about the inputs is wrong; nothing has been written then.
    """
    if block_size < 2 or num_layers < 1 or num_anchors < 1 or markov_rank < 0 or markov_type not in ("vanilla", "gated", "rnn"):
        raise ValueError(
            f"A block has 2 rows at least, and a drafter a layer, an anchor and a head that is vanilla, gated or rnn; these are "
            f"{block_size}, {num_layers}, {num_anchors} and {markov_type!r} of rank {markov_rank}."
        )

    def make(setting: Setting) -> tuple[DFlashDrafter, AnchorTrainer]:
        mask = unused_token(setting.tokenizer, setting.target.config.get_text_config().vocab_size)
        drafter = block_drafter(
            setting.target, mask, num_layers, block_size, num_features, markov_rank, markov_type, confidence, setting.vocabulary
        )
        sets = {"train_dataset": setting.train_set, "eval_dataset": setting.eval_set}
        states, fading = setting.states(drafter.features), math.exp(-1 / FADING)
        return drafter, AnchorTrainer(Blocks(drafter), setting.arguments, states, block_size, fading, num_anchors, **sets)

    def finish(drafter: DFlashDrafter, setting: Setting) -> None:
        if isinstance(drafter, DSparkDrafter) and drafter.confidence is not None:
            heat = calibrate(drafter, setting.target, setting.eval_set, num_anchors)
            drafter.remember({**drafter.paradraft.get("training", {}), "temperatures": heat})

    usual = {"learning_rate": 6e-4, "lr_scheduler_type": "cosine"}
    record = {"num_layers": num_layers, "block_size": block_size, "num_anchors": num_anchors, "markov_rank": markov_rank}
    name = "dspark" if markov_rank or confidence else "dflash"
    return train_on_target(name, make, target, train_file, output_dir, usual=usual, record=record, finish=finish, **options)
