"""A frozen target's states of texts, for drafters that learn from it; run if needed, or once and
then read from disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import LongTensor, Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..chat import learned_context
from ..decoding.features import Features, decoder_of
from ..decoding.target_head import TargetHead
from ..files import other_settings, read_json, whole, write_json
from ..protocol.drafter import FeatureKey
from .data import encode_rows
from .rows import SHAPES
from .source import load_rows
from .target import fingerprint, short_hash

logger = logging.get_logger(__name__)
RECORD = "target.json"  # in a folder of states: the target that they are of
ROWS = 256  # rows whose logits over all tokens are held at once


@torch.no_grad()
def states_of(
    target: PreTrainedModel, keys: Sequence[FeatureKey], ids: LongTensor, lengths: LongTensor
) -> dict[Any, Tensor]:
    """Compute the target's hidden states of texts, by key, `(B, N, hidden)`, without its head.

    The target reads rows of a width that is a multiple of `SHAPES`, or its context.

    Args:
        target: the frozen target.
        keys: the wanted states.
        ids: int64 `(B, N)`, padded on the right.
        lengths: int64 `(B,)`.
    """
    width, context = ids.shape[1], learned_context(target)
    padded = width + -width % SHAPES
    ids = F.pad(ids, (0, (padded if context is None else min(padded, context)) - width))
    seen = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    with Features(target, keys) as features:
        decoder_of(target)(input_ids=ids, attention_mask=seen.long(), use_cache=False)
        return {key: states[:, :width] for key, states in features.rows.items()}


class TargetStates:
    """The states of texts that drafters read, and the distributions that they should have guessed.

    Kept on disk, a text costs the target one forward in a whole training, and a row of its head
    over V' tokens instead of V whenever it is learned from: the normaliser of the distribution is
    kept too. A file for each text, named by its tokens, so that a run that stopped, another epoch,
    and another drafter that reads some of the same layers find the states that are there.

    Args:
        target: the frozen target.
        keys: the wanted states of every text.
        vocabulary: int64 `(V',)`, the tokens whose chances are wanted; None: all.
        folder: the folder of the cache; None: the target runs every time.
        max_bytes: the size of the folder, of which several processes have a share each; states
            beyond it are computed every time.

    Raises:
        ValueError: the folder has the states of another target, or lacks some of the layers.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        keys: Sequence[FeatureKey],
        vocabulary: LongTensor | None = None,
        folder: Path | None = None,
        max_bytes: float = 50e9,
    ):
        self.target, self.keys = target, tuple(dict.fromkeys((*keys, "normed")))
        self.vocabulary, self.folder = vocabulary, folder
        self.head = TargetHead(target)
        if folder is None:
            return
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file: name a folder for the cache.")
        self.rows = TargetHead(target, vocabulary)
        config = {
            **target.config.get_text_config().to_dict(),
            "_name_or_path": None,
            "transformers_version": None,
        }
        self.identity = {
            "weights": fingerprint(target),
            "config": short_hash(json.dumps(config, sort_keys=True, default=str)),
            "dtype": str(target.dtype),
        }
        recorded: dict[str, Any] = {**self.identity, "keys": self.keys}
        if (record := folder / RECORD).exists():
            recorded = read_json(record)
        elif folder.exists() and any(folder.iterdir()):
            raise ValueError(
                f"{folder} has files that are no states of a target: name another folder for the "
                "cache."
            )
        # more than the wanted states, if another drafter was first
        self.stored_keys = tuple(recorded.pop("keys", ()))
        if other := other_settings(recorded, self.identity):
            raise ValueError(
                f"{folder} keeps the states of another target ({other}): name another folder."
            )
        if missing := [str(key) for key in self.keys if key not in self.stored_keys]:
            raise ValueError(
                f"{folder} keeps the states of other layers, not of {', '.join(missing)}: name "
                "another folder."
            )
        present = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        self.room = (max_bytes - present) / processes

    def __call__(self, ids: LongTensor, lengths: LongTensor) -> dict[Any, Tensor]:
        """Read or compute the target's states of texts, by key, `(B, N, hidden)`.

        States of padding are meaningless.

        Args:
            ids: int64 `(B, N)`, padded on the right.
            lengths: int64 `(B,)`.
        """
        if self.folder is None:
            return states_of(self.target, self.keys, ids, lengths)
        files = [
            _file_of(self.folder, row[:length])
            for row, length in zip(ids, lengths.tolist(), strict=True)
        ]
        names = [*map(str, self.keys), "normaliser"]
        texts = [_read(file, names) if file.exists() else None for file in files]
        if missing := [row for row, text in enumerate(texts) if text is None]:
            some, longest = lengths[missing], int(lengths[missing].max())
            states = states_of(self.target, self.stored_keys, ids[missing, :longest], some)
            for row, text in zip(missing, self._by_text(states, some.tolist()), strict=True):
                self._keep(files[row], text)
                texts[row] = text
        padding = ids.shape[1] - int(lengths.max())
        return {
            key: F.pad(
                pad_sequence([text[str(key)] for text in texts], batch_first=True),
                (0, 0, 0, padding),
            ).to(ids.device)
            for key in (*self.keys, "normaliser")
        }

    def probabilities(
        self, states: dict[Any, Tensor], rows: LongTensor, places: LongTensor
    ) -> Tensor:
        """Compute the target's distributions over the tokens that are wanted, float32 `(n, V')`.

        Args:
            states: the states, from this object.
            rows, places: the rows and places of the wanted states, int64 `(n,)`.
        """
        wanted = states["normed"][rows, places]
        if "normaliser" in states:
            return (self.rows.logits(wanted).float() - states["normaliser"][rows, places]).exp()
        guessed = slice(None) if self.vocabulary is None else self.vocabulary.to(wanted.device)
        chunks = wanted.split(ROWS)
        return torch.cat(
            [self.head.logits(chunk).float().softmax(-1)[:, guessed] for chunk in chunks]
        )

    @torch.no_grad()
    def keep(
        self,
        source: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        batch_size: int = 8,
    ) -> None:
        """Keep the states of a training's samples, texts of similar length together.

        Texts already kept are left out; it ends once a text does not fit.

        Args:
            source: a JSON-lines file or a Hub dataset, as for the training.
            tokenizer: the target's tokenizer.
            max_length: the tokens of a sample, at most.
            batch_size: the samples that the target reads together.
        """
        rows = encode_rows(load_rows(source), tokenizer, max_length)
        texts = sorted(map(torch.tensor, rows["input_ids"]), key=len)
        texts = [text for text in texts if not _file_of(self.folder, text).exists()]
        for begin in tqdm(range(0, len(texts), batch_size), desc="states", unit="batches"):
            batch = texts[begin : begin + batch_size]
            ids, lengths = pad_sequence(batch, batch_first=True), torch.tensor([*map(len, batch)])
            self(ids.to(self.target.device), lengths.to(self.target.device))
            if not _file_of(self.folder, batch[-1]).exists():
                break

    def _by_text(self, states: dict[Any, Tensor], lengths: list[int]) -> list[dict[str, Tensor]]:
        """Split states `(B, N, hidden)` by text, with a normaliser for each token.

        The normaliser is that of the distribution after the token.
        """
        shape = states["normed"].shape[:2]
        rows = F.pad(states["normed"].flatten(0, 1), (0, 0, 0, -shape.numel() % ROWS))
        sums = [
            self.head.logits(chunk).float().logsumexp(-1, keepdim=True)
            for chunk in rows.split(ROWS)
        ]
        states["normaliser"] = torch.cat(sums)[: shape.numel()].unflatten(0, shape)
        return [
            {str(key): value[row, :length].cpu().contiguous() for key, value in states.items()}
            for row, length in enumerate(lengths)
        ]

    def _keep(self, file: Path, tensors: dict[str, Tensor]) -> None:
        """Write a text's states, whole or not at all, where there is room for them."""
        size = sum(value.nbytes for value in tensors.values())
        if file.exists():  # another process was first, or the text is twice in a batch
            return
        if size > self.room:
            logger.warning_once(
                f"{file.parent} is full: the states of further texts are computed whenever they "
                "are needed."
            )
            return
        try:
            if not (record := file.parent / RECORD).exists():
                record.parent.mkdir(parents=True, exist_ok=True)
                write_json(record, {**self.identity, "keys": self.stored_keys})
            with whole(file) as temporary:
                save_file(tensors, temporary)
            self.room -= size
        except (OSError, SafetensorError) as error:  # training goes on without
            self.room = 0
            logger.warning("%s takes no more states: %s", file.parent, error)


def _file_of(folder: Path, text: LongTensor) -> Path:
    """Name the file of a text's states, by its tokens, int64 `(N,)`."""
    return folder / f"{hashlib.sha256(text.cpu().numpy().tobytes()).hexdigest()[:40]}.safetensors"


def _read(file: Path, names: list[str]) -> dict[str, Tensor] | None:
    """Read a text's states; None for a damaged file, which is removed so that it is made again."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in names}
    except SafetensorError as error:
        logger.warning("%s is damaged (%s), and is made again.", file, error)
        file.unlink()
        return None
