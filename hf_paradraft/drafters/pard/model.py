"""`PardDrafter`: any causal LM of transformers with a mask token, able to guess K tokens in one
forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import LongTensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from ...files import tensor_names
from ...notes import last_target, remember_target
from ...outer_names import innermost
from ...protocol import Drafting, SpeculationConfig
from ...protocol.drafter import FeatureKey
from ..causal import CausalRows, check_drafts, check_merged, load_whole, logits_after
from ..drafter import SavedDrafter
from ..formats.files import mend_sampling
from ..formats.folder import ADAPTER, DrafterFolder, refuse_foreign
from ..formats.layout import PARD2
from ..formats.values import provenance_of, transformers_config
from ..reading.reader import Reader
from .config import MASK_KEYS, read_mask_token_id, write_mask_token_id
from .pard2 import FILE, ProjectedFeatures, Projection


class PardDrafter(SavedDrafter):
    """A causal LM that drafts in parallel (PARD, section 3).

    The class is mixed into the class of the model that the drafter is made from. The saved folder
    is a plain causal LM: `AutoModelForCausalLM`, vLLM, TensorRT-LLM and AMD's code load it as it
    is. Plain `generate` stays ordinary decoding; as `assistant_model` of a target it drafts.

    Attributes:
        mask_token_id: the id of the mask token.
        speculation_config: the options of its use; saved with it.
        last_stats: the statistics of the last `generate` call that it assisted, or None.
    """

    kind = "pard"
    title = "PARD drafter"
    template = "pard.jinja"
    training_options = "PardTraining"
    made_from = "base_model"
    has_tokenizer = True
    fits = (
        "transformers with hf_paradraft; vLLM and TensorRT-LLM with a target of the same "
        "vocabulary size"
    )

    config: PreTrainedConfig
    device: torch.device
    dtype: torch.dtype
    resize_token_embeddings: Callable[..., Any]

    mask_token_id: int
    projection: Projection | None = None

    @classmethod
    def recognises(cls, folder: DrafterFolder) -> bool:
        """Implement `SavedDrafter.recognises`: a causal LM whose config names a mask token.

        It is not one of another kind.
        """
        if folder.holds(ADAPTER):
            return False
        names_a_mask = any(folder.config.get(key) is not None for key in MASK_KEYS)
        other = folder.provenance.get("kind", cls.kind) != cls.kind
        return folder.identified == PARD2 or (
            folder.identified is None and names_a_mask and not other
        )

    @classmethod
    def load_folder(
        cls,
        folder: DrafterFolder,
        mask_token_id: int | None = None,
        target_independent: bool = False,
        **kwargs: Any,
    ) -> PardDrafter:
        """Load a PARD or PARD-2 drafter, in AMD's published format or as this library saves it.

        Args:
            folder: a drafter's folder.
            mask_token_id: the id to take instead of the config's.
            target_independent: draft without the target's hidden states, where a PARD-2 drafter
                would read them.
            kwargs: arguments of `AutoModelForCausalLM.from_pretrained`.

        Raises:
            OSError: a damaged file.
            ValueError: it is no PARD drafter; the message says why.
        """
        tensor_names(folder.path)
        refuse_foreign(folder.identified)
        if "draft_vocab_size" in folder.config:
            raise ValueError(
                f"{folder} guesses some of its target's tokens alone (paradraft shrink --vocab of "
                "version 0.3): train an MTP layer, which is faster, or load it with that version."
            )
        projection = None
        if folder.identified == PARD2 and not target_independent:
            projection = Projection.read(folder.path, folder.config)
        config = kwargs.pop("config", None) or AutoConfig.from_pretrained(
            folder.path, trust_remote_code=False
        )
        for name in kwargs.keys() & config.to_dict().keys() - {"dtype", "quantization_config"}:
            setattr(config, name, kwargs.pop(name))
        mask_token_id = read_mask_token_id(config, mask_token_id)
        drafter_type = drafter_class(type(config))  # type: ignore[arg-type]  # a class is hashable
        load = super(SavedDrafter, drafter_type).from_pretrained
        loaded = load_whole(load, drafter_type.__name__, folder.path, config, kwargs)
        drafter = _prepare(loaded, mask_token_id)
        if (
            projection is not None
            and projection.weight.shape[0] != drafter.get_input_embeddings().weight.shape[1]
        ):
            raise ValueError(
                f"{folder}: the projection's width is not that of the drafter's embedding: it is "
                "another drafter's."
            )
        drafter.projection = projection
        return drafter

    @classmethod
    def from_causal_lm(
        cls, model: PreTrainedModel | str | Path, mask_token_id: int | None = None, **kwargs: Any
    ) -> PardDrafter:
        """Turn a causal LM into a PARD drafter, untrained unless the model was one already.

        Args:
            model: a loaded model, whose weights are shared and not copied, or a folder or Hub id.
            mask_token_id: an id with an embedding that ordinary text does not use; default: the
                config's.
            kwargs: arguments of `from_pretrained`, if `model` is a name.

        Raises:
            ValueError: no mask token, or not a causal LM.
        """
        if isinstance(model, str | Path):
            return cls.from_pretrained(model, mask_token_id=mask_token_id, **kwargs)
        model = innermost(model)  # adapters stay in it
        mask_token_id = read_mask_token_id(model.config, mask_token_id)
        drafter_type = drafter_class(type(model.config))  # type: ignore[arg-type]  # a class is hashable
        if not issubclass(drafter_type, type(model)):
            raise ValueError(
                f"{type(model).__name__} is not the causal LM of its config; load it with "
                "AutoModelForCausalLM first."
            )
        drafter = drafter_type.__new__(drafter_type)
        drafter.__dict__ = {**model.__dict__, "_modules": dict(model._modules)}
        drafter.config = copy.deepcopy(model.config)
        drafter.generation_config = copy.deepcopy(model.generation_config)
        return _prepare(drafter, mask_token_id)

    def write(self, folder: Path, **kwargs: Any) -> None:
        """Save a plain causal LM whose config tells every engine the mask token.

        See `PreTrainedModel.save_pretrained`.
        """
        check_merged(self)
        self.config.paradraft = {
            **self.paradraft,
            "speculation_config": self.speculation_config.saved(),
        }
        super(SavedDrafter, self).save_pretrained(folder, **kwargs)
        if self.projection is not None:
            self.projection.save(folder)

    @classmethod
    def check_folder(cls, folder: DrafterFolder) -> None:
        """Refuse a folder that is not a whole PARD drafter with its tokenizer."""
        super().check_folder(folder)
        refuse_foreign(folder.identified)
        if folder.identified == PARD2 and not folder.holds(FILE):
            raise ValueError(
                f"{folder} is a PARD-2 drafter without {FILE}: load it and save_pretrained it."
            )
        read_mask_token_id(AutoConfig.from_pretrained(folder.path, trust_remote_code=False))

    @classmethod
    def details(cls, config: dict[str, Any], names: list[str]) -> list[tuple[str, Any]]:
        """List its mask token, vocabulary and training, as (name, value) pairs."""
        described = transformers_config(AutoConfig.for_model, config)
        provenance, size = provenance_of(config), described.get_text_config().vocab_size
        training, options = provenance["training"], provenance.get("speculation_config") or {}
        tau = training.get("acceptance", {}).get("mean_emitted")
        states = "of the target's hidden states, -1 the normed last one"
        layers = config.get("pard2_target_layers")
        return [
            *([] if layers is None else [("reads", f"entries {layers} {states}")]),
            ("architecture", ", ".join(config.get("architectures") or ["?"])),
            ("mask token", read_mask_token_id(described)),
            ("guesses ids", size),
            ("adapted from", training.get("base_model") or "not recorded"),
            ("trained with K", training.get("num_depths") or "not recorded"),
            ("τ on held-out rows", f"{tau:.2f}" if isinstance(tau, float) else "not recorded"),
            ("drafts K", options.get("num_draft_tokens", 12)),
        ]

    def attach(self, target: PreTrainedModel) -> None:
        """Check the target where its hidden states are read; as for `Projection.keys`."""
        if self.projection is not None:
            self.projection.keys(target)
            remember_target(self, target)

    def needs(self, target: PreTrainedModel) -> tuple[FeatureKey, ...]:
        """List the features of the target that a PARD-2 drafter reads; none for others."""
        return () if self.projection is None else tuple(dict.fromkeys(self.projection.keys(target)))

    def start_drafting(self, target: PreTrainedModel, max_length: int) -> Drafting:
        """Begin a `generate` call of rows up to `max_length` tokens; its state is its own.

        Raises:
            ValueError: a model of this architecture cannot draft.
        """
        check_drafts(self)
        config, mask = self.speculation_config, self.mask_token_id
        if self.projection is None:
            rows = CausalRows(self, [mask] * (config.num_draft_tokens - 1), mask)
        else:
            rows = ProjectedFeatures(self, target)
        return Reader(rows, config, max_length)

    def draft_logits(
        self,
        input_ids: LongTensor,
        features: dict[FeatureKey, torch.Tensor] | None = None,
        num_draft_tokens: int | None = None,
    ) -> torch.Tensor:
        """Compute logits of the next tokens after a whole prefix, without caches.

        Args:
            input_ids: int64 `(B, n)`, without padding.
            features: a PARD-2 drafter's, by key, `(B, n - 1, d_t)`: the newest token has none.
                Others read none.
            num_draft_tokens: K; default: as configured.

        Returns:
            `(B, K, V')` in the drafter's dtype; row `d` guesses the token at distance `d + 1`.
        """
        count = num_draft_tokens or self.speculation_config.num_draft_tokens
        if self.projection is not None:
            rows = ProjectedFeatures(self, last_target(self))
            drafting = Reader(rows, SpeculationConfig(), 0)
            return drafting.logits_after_texts(input_ids.to(self.device), features, count)
        return logits_after(self, input_ids, [self.mask_token_id] * (count - 1))

    def __reduce__(self) -> tuple:
        return _rebuild, (type(self.config), self.__dict__)


def _rebuild(config_class: type[PreTrainedConfig], state: dict[str, Any]) -> PardDrafter:
    drafter_type = drafter_class(config_class)  # type: ignore[arg-type]  # a class is hashable
    drafter = drafter_type.__new__(drafter_type)
    drafter.__dict__ = {**state}  # a copy by copy.copy has options of its own
    return drafter


@cache
def drafter_class(config_class: Any) -> type[PardDrafter]:
    """Make the causal LM class of `config_class` with `PardDrafter` mixed in.

    It has the base's own name.

    Raises:
        ValueError: transformers has no causal LM for it.
    """
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"transformers has no causal language model for {config_class.__name__}; a drafter "
            "must be one."
        )
    base = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    return type(base.__name__, (PardDrafter, base), {"__module__": base.__module__})


def _prepare(drafter: PardDrafter, mask_token_id: int) -> PardDrafter:
    write_mask_token_id(drafter.config, mask_token_id)
    drafter.mask_token_id = mask_token_id
    section = getattr(drafter.config, "paradraft", None)
    is_own = isinstance(section, dict) and section.get("kind", "pard") == "pard"
    drafter.paradraft = section if is_own else {}
    drafter.speculation_config = SpeculationConfig.from_saved(
        drafter.paradraft.get("speculation_config")
    )
    drafter.last_stats = None
    # transformers' own assisted loop asks its assistant for these: K tokens a round, always.
    mend_sampling(drafter.generation_config)
    drafter.generation_config.num_assistant_tokens = drafter.speculation_config.num_draft_tokens
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    drafter.generation_config.assistant_confidence_threshold = 0.0
    return drafter
