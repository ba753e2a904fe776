"""Drafters that read the target's hidden states and come in other libraries' formats: loading,
saving, attaching.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import LongTensor, Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..decoding.features import layers_of
from ..decoding.shortlist import FILE, Shortlist
from ..decoding.target_head import TargetHead, finished
from ..hardware import input_device
from ..notes import pair
from ..protocol import Drafting, SpeculationConfig
from ..protocol.drafter import FeatureKey
from .drafter import SavedDrafter
from .formats.files import (
    check_size,
    check_width,
    load_strictly,
    neighbours_to_halves,
    offset_tables,
    published,
    renamed,
    vocabulary_in,
    weights_in,
)
from .formats.folder import DrafterFolder
from .formats.layout import Layout
from .layers import decoder_stack, embedding_of, final_norm, final_scale
from .reading.reader import Reader

logger = logging.get_logger(__name__)
# tables that may have more rows than the target has ids
PADDED = {"head.weight", "markov.after.weight"}
PADDING = 512  # rows by which tables of one vocabulary differ, padded to this or that multiple


class FeatureDrafter(SavedDrafter, PreTrainedModel):
    """A network that reads a target's features, and may share its embedding and head.

    It shares those that it has not got itself.

    Attributes:
        also_known_as: other titles that `identify` has for its folders.
        drafts_by: begins a call; a `Reader` runs a drafter that is a `RowModel`.
        layouts: the layouts in which it is published; of those that fit, the first counts.
        saved_names: beginnings of its tensors' names in speculators' layout, and ours.
        stack: its layers, from `decoder_stack`.
        features: the features that it reads, in the order in which its first matrix wants them.
        hidden_size: d, of its own layers.
        target_hidden_size: d_t; its config says V.
        target_layers: L, if the files say.
        mask_token: the id of its masks; None: it has none.
        embedding, head: its own, or None.
        vocabulary: int64 `(V',)`, or None.
        softcap, logit_scale: cap and scale of its logits, instead of the target's.
        raw_target: the target's table and head are used as they are, without the target's own
            scales and cap.
        shortlist: the tokens whose logits are computed, of the target's head for its vocabulary;
            None: all of them.
    """

    about = (
        "reads the target's hidden states, shares its embedding and head, and guesses several "
        "tokens"
    )
    also_known_as: ClassVar[tuple[str, ...]] = ()
    drafts_by: ClassVar[Callable[..., Any]] = Reader
    layouts: ClassVar[tuple[Layout, ...]] = ()
    saved_names: ClassVar[Mapping[str, str]]
    stack: PreTrainedModel
    target_layers: int | None = None
    mask_token: int | None = None
    softcap: float | None = None
    logit_scale: float | None = None
    raw_target: bool = False
    shortlist: Shortlist | None = None
    target_head: TargetHead | None = None
    _supports_sdpa = True

    def __init__(
        self,
        config: PreTrainedConfig,
        features: tuple[FeatureKey, ...],
        hidden_size: int,
        vocabulary: LongTensor | None,
    ):
        super().__init__(config)
        self.features, self.vocabulary = features, vocabulary
        self.hidden_size = self.target_hidden_size = hidden_size
        self.embedding: nn.Embedding | None = None
        self.head: nn.Linear | None = None

    def begin_as(
        self, config: Any, vocabulary: LongTensor | None, own_embedding: bool, own_head: bool
    ) -> None:
        """Begin as a published drafter does, with a first matrix, layers and a norm.

        The embedding and head that it has of its own are made too.

        Args:
            config, vocabulary, own_embedding, own_head: the arguments of the kind.
        """
        layers = config.layers
        FeatureDrafter.__init__(self, config, config.features or (), layers.hidden_size, vocabulary)
        self.target_hidden_size = config.target_hidden_size
        self.target_layers, self.mask_token = config.target_layers, config.mask_token_id
        self.softcap, self.logit_scale = config.softcap, config.logit_scale
        self.raw_target = config.raw_target
        self.fc = nn.Linear(
            config.num_features * config.target_hidden_size, layers.hidden_size, bias=False
        )
        self.stack = decoder_stack(layers)
        self.hidden_norm = type(self.stack.norm)(layers.hidden_size, layers.rms_norm_eps)
        if own_embedding:
            self.embedding = embedding_of(layers, config.vocab_size)
        if own_head:
            self.head = nn.Linear(layers.hidden_size, self.num_guesses, bias=False)

    @classmethod
    def read_folder(cls, folder: DrafterFolder) -> Self:
        """Implement `SavedDrafter.read_folder`, for every published layout of the kind."""
        tensors = weights_in(folder.path)
        weights = cls.by_our_names(tensors)
        config = cls.read_config(folder.config, tensors)
        check_size(weights, config.layers)
        vocabulary = None
        if (size := config.draft_vocab_size) is not None:
            if (vocabulary := vocabulary_in(tensors, config.vocab_size)) is None:
                raise OSError(
                    f"{folder} guesses {size} ids and has no table of them (d2t): download it "
                    "again."
                )
        else:
            for name in PADDED & weights.keys():  # with ids that mean nothing
                weights[name] = weights[name][: config.vocab_size]
        cls.mend(weights)
        check_width(weights, config.num_features, config.target_hidden_size, cls.title)
        make: Any = cls
        drafter = make(config, vocabulary, "embedding.weight" in weights, "head.weight" in weights)
        load_strictly(drafter, weights, f"The {cls.title} in {folder}")
        if config.in_pairs:
            turned = neighbours_to_halves(drafter.state_dict(), config.layers.head_dim)
            drafter.load_state_dict(turned)
        return drafter

    @classmethod
    def read_config(cls, config: Mapping[str, Any], tensors: Iterable[str]) -> Any:
        """Read a published config into the kind's own.

        Args:
            config: the config as it was read.
            tensors: names of the folder's tensors.

        Raises:
            ValueError: something is missing that may not be assumed, or a variant that is not
                served.
        """
        make: Any = cls.config_class
        names = cls.by_our_names(dict.fromkeys(tensors))
        layout = next(layout for layout in cls.layouts if layout.when(config))
        return make(**layout.read(config, names))

    @classmethod
    def by_our_names(cls, tensors: dict[str, Any]) -> dict[str, Any]:
        """Rename tensors of any layout to this library's names."""
        names = {theirs: ours for layout in cls.layouts for theirs, ours in layout.tensors.items()}
        return renamed(tensors, names)

    @classmethod
    def mend(cls, weights: dict[str, Tensor]) -> None:
        """Bring published weights into this library's form, where more than names differ.

        Most kinds do nothing.
        """

    @classmethod
    def details(cls, config: dict[str, Any], names: list[str]) -> list[tuple[str, Any]]:
        """List the facts that its files tell, as (name, value) pairs."""
        read = cls.read_config(config, names)
        return [
            ("layout", read.layout),
            ("reads", "default layers" if read.features is None else feature_names(read.features)),
            ("own layers", f"{read.layers.num_hidden_layers} × {read.layers.hidden_size}"),
            ("guesses ids", f"{read.draft_vocab_size or read.vocab_size} of {read.vocab_size}"),
            *read.particulars(),
            *read.notes,
        ]

    @classmethod
    def recognises(cls, folder: DrafterFolder) -> bool:
        """Tell whether a folder holds this kind, by its config and tensors or its `model_type`."""
        known = folder.identified in (cls.title, *cls.also_known_as)
        return known or super().recognises(folder)

    def contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Implement `SavedDrafter.contents`, in the speculators layout, which vLLM reads.

        Its config's `saved(drafter)` is completed with vocabulary and proposal.
        """
        config, tensors = self.config.saved(self), published(self.state_dict(), self.saved_names)
        if self.vocabulary is not None:
            tensors |= offset_tables(self.vocabulary, self.config.vocab_size)
        trained = self.paradraft.get("training") or {}
        plain = self.target_head is not None and self.target_head.is_plain
        # drafters that are trained here scale and cap as targets do
        if self.layouts and not plain and self.raw_target == bool(trained):
            self.paradraft = {**self.paradraft, "raw_target": self.raw_target}
        count = self.speculation_config.num_draft_tokens
        # engines ask for it; vLLM wants a target's name
        config["speculators_config"] = {
            "algorithm": config["speculators_model_type"],
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": count}],
            "verifier": {"name_or_path": trained.get("target"), "architectures": []},
        }
        return config, tensors

    @classmethod
    def check_folder(cls, folder: DrafterFolder) -> None:
        """Refuse a folder that cannot be loaded as it is."""
        super().check_folder(folder)
        cls.read_folder(folder)

    @classmethod
    def load_folder(cls, folder: DrafterFolder, **kwargs: Any) -> Self:
        """Implement `SavedDrafter.load_folder`, with the shortlist in its folder."""
        drafter = super().load_folder(folder, **kwargs)
        drafter.shortlist = Shortlist.read(folder.path, drafter.hidden_size)
        return drafter

    def write(self, folder: Path, **kwargs: Any) -> None:
        """Implement `SavedDrafter.write`, with its shortlist."""
        super().write(folder, **kwargs)
        if self.shortlist is None:
            (folder / FILE).unlink(missing_ok=True)  # of the weights before
        else:
            self.shortlist.save(folder)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast as a module does, but keep the dtype of rotary tables.

        In bf16, they are off by radians after some hundred tokens.
        """
        exact = [
            (part, name, buffer)
            for path, part in self.named_modules()
            if path.endswith(("rotary_emb", "embedding"))  # Gemma scales the latter
            for name, buffer in part.named_buffers()
            if not buffer.is_meta
        ]
        super()._apply(*args, **kwargs)
        for part, name, buffer in exact:
            setattr(part, name, buffer.to(self.device))
        return self

    @property
    def num_guesses(self) -> int:
        """V', ids that it guesses."""
        return self.config.vocab_size if self.vocabulary is None else len(self.vocabulary)

    def needs(self, target: PreTrainedModel) -> tuple[FeatureKey, ...]:
        """List the features that it reads, each once."""
        return tuple(dict.fromkeys(self.features_of(target)))

    def features_of(self, target: PreTrainedModel) -> tuple[FeatureKey, ...]:
        """List the features of `target` that it reads, in the order of its first matrix."""
        return self.features

    def attach(self, target: PreTrainedModel) -> None:
        """Check the target's sizes, and share its embedding and head.

        Raises:
            ValueError: it was made for another target, or for other options; the message says why.
        """
        config, layers = target.config.get_text_config(), len(layers_of(target))
        who = f"This {self.title}"
        if config.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"{who} reads hidden states of {self.target_hidden_size} numbers, and the target's "
                f"have {config.hidden_size}: it was made for another target."
            )
        deepest = max((key for key in self.needs(target) if isinstance(key, int)), default=-1)
        if deepest >= layers or self.target_layers not in (None, layers):
            raise ValueError(
                f"{who} was made for a target of {self.target_layers or f'more than {deepest}'} "
                f"layers, and this one has {layers}."
            )
        self._check_ids(who, target)
        self._check_count(self.speculation_config.num_draft_tokens)
        target_head = pair(self, target).target_head
        if target_head is None or target_head.head is not target.get_output_embeddings():
            target_head = TargetHead(
                target, None if self.head is not None else self.vocabulary, self.shortlist
            )
        shares = self.embedding is None or self.head is None
        if shares and target_head.embedding.weight.shape[-1] != self.hidden_size:
            raise ValueError(
                f"{who} shares the target's embedding or head, which are not of its own width."
            )
        pair(self, target, features=self.features_of(target), target_head=target_head)
        self.target_head = target_head

    def _check_count(self, count: int) -> None:
        if self.most_drafts is not None and count > self.most_drafts:
            raise ValueError(
                f"This {self.title} guesses {self.most_drafts} tokens at most, but "
                f"num_draft_tokens is {count}: lower it."
            )

    def _check_ids(self, who: str, target: PreTrainedModel) -> None:
        """Refuse a target of other ids, for which it would draft and never be right.

        Raises:
            ValueError: ids that the target does not have, another vocabulary, or a mask without an
                embedding.
        """
        ours, theirs = self.config.vocab_size, target.config.get_text_config().vocab_size
        if self.vocabulary is not None and int(self.vocabulary.max()) >= theirs:
            raise ValueError(
                f"{who} guesses ids up to {int(self.vocabulary.max())}; the target's end at "
                f"{theirs - 1}."
            )
        if self.vocabulary is None and abs(ours - theirs) > max(PADDING, theirs // 100):
            raise ValueError(
                f"{who} was made for a vocabulary of {ours}, and the target's has {theirs}: it was "
                "made for another target."
            )
        table = target.get_input_embeddings() if self.embedding is None else self.embedding
        if self.mask_token is not None and not 0 <= self.mask_token < len(table.weight):
            raise ValueError(
                f"{who} guesses in place of mask token {self.mask_token}, and its embedding ends "
                f"at {len(table.weight) - 1}: it was made for another target, or for one with more "
                "tokens."
            )

    def started_beside(self, target: PreTrainedModel) -> Self:
        """Attach an untrained drafter to `target`, and copy the scale of the target's final norm.

        The head is used to that scale.
        """
        with torch.no_grad():
            final_norm(self.stack).weight.copy_(final_scale(target))
        self.to(input_device(target)).attach(target)
        return self

    def drafting(self, config: SpeculationConfig, max_length: int) -> Any:
        """Begin a call with the target that was attached last; arguments as for a `Reader`."""
        return self.drafts_by(self, config, max_length)

    def start_drafting(self, target: PreTrainedModel, max_length: int) -> Drafting:
        """Begin a `generate` call; its state is its own."""
        window = getattr(self.stack.config, "max_position_embeddings", None)
        if window is not None and max_length > window:
            logger.warning_once(
                f"This call may reach {max_length} tokens, and the {self.title} has positions for "
                f"{window}: after them fewer of its guesses may be right."
            )
        return pair(self, target).drafting(self.speculation_config, max_length)

    def draft_logits(
        self,
        input_ids: LongTensor,
        features: dict[FeatureKey, Tensor] | None = None,
        num_draft_tokens: int | None = None,
    ) -> Tensor:
        """Compute logits of the next tokens after a whole prefix, without caches.

        Args:
            input_ids: int64 `(B, n)`, n at least 2, without padding.
            features: the features by key, `(B, n - 1, d_t)`: the newest token has none.
            num_draft_tokens: K; default: as configured.

        Returns:
            `(B, K, V')`; row `d` guesses the token at distance `d + 1`. A guess that depends on the
            tokens before it stands after the most probable ones.

        Raises:
            ValueError: it guesses fewer tokens, or features are missing.
        """
        count = num_draft_tokens or self.speculation_config.num_draft_tokens
        self._check_count(count)
        drafting = self.drafting(SpeculationConfig(), 0)
        return drafting.logits_after_texts(input_ids.to(self.device), features, count)

    def embed(self, ids: LongTensor) -> Tensor:
        """Embed ids, `(…, hidden)` in its own dtype, by its own table or the target's."""
        if self.embedding is not None:
            inside = ids.where(ids < self.embedding.num_embeddings, 0)
            return self.embedding(inside.to(self.device))
        return self.shared.embed(ids, self.raw_target).to(self.device, self.dtype)

    def logits(self, states: Tensor) -> Tensor:
        """Compute logits `(…, V')` of normed states, by the drafter's own head or the target's.

        Scale and softcap, too, are its own, or the target's where it has none.
        """
        if self.head is None:
            return self.shared.logits(states, self.softcap, self.logit_scale, self.raw_target)
        logits = self.head(states)
        if self.target_head is None:
            return finished(logits, self.softcap, self.logit_scale or 1.0)
        return self.target_head.finished(logits, self.softcap, self.logit_scale, self.raw_target)

    @property
    def shared(self) -> TargetHead:
        """The embedding and head of the target that it was attached to last.

        Raises:
            ValueError: it is attached to no target.
        """
        if self.target_head is None:
            raise ValueError(
                f"This {self.title} shares its target's embedding or head: attach(target) first."
            )
        return self.target_head


def feature_names(features: tuple) -> str:
    """Describe feature keys in words, for people."""
    names = {-1: "the embedding's output", "normed": "the normed last state"}
    return ", ".join(names.get(key, f"output of layer {key}") for key in features)
