"""Causal LMs that draft: how a `Reader` runs their texts, and any small one as a drafter of one
token a forward (Leviathan et al., 2023), whose folder says that it is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import LongTensor, Tensor
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from ..decoding.tree_attention import attention_windows, or_sdpa
from ..files import INDEX, WHOLE, refuse_missing, tensor_files
from ..names import with_cache
from ..outer_names import innermost
from ..protocol import Drafting, SpeculationConfig
from .drafter import SavedDrafter
from .formats.files import load_model, mend_sampling, save_model
from .formats.folder import DrafterFolder
from .formats.values import provenance_of
from .reading.network import Mask, RowModel
from .reading.reader import Reader


def check_merged(model: PreTrainedModel) -> None:
    """Refuse to save a model with adapters in it, whose weights have other names.

    Raises:
        ValueError: it has some.
    """
    if any(isinstance(part, BaseTunerLayer) for part in model.modules()):
        raise ValueError(
            "The drafter has an adapter in it, and is saved without: make it of "
            "model.merge_and_unload()."
        )


def check_drafts(model: PreTrainedModel) -> None:
    """Refuse a model that takes no explicit masks.

    Raises:
        ValueError: it takes none; the message names a remedy.
    """
    if attention_windows(model) is None:
        raise ValueError(
            f"{type(model).__name__} as it is loaded here takes no explicit masks, which its "
            "guesses are read with: draft with a model whose layers are all of ordinary "
            "attention, or pass an ordinary small one as assistant_model "
            f"itself{or_sdpa(model)}."
        )


@torch.no_grad()
def logits_after(model: PreTrainedModel, input_ids: LongTensor, masks: Sequence[int]) -> Tensor:
    """Compute logits after each prefix and each mask, by one forward without caches.

    Caches are tested against this.

    Args:
        model: a causal LM.
        input_ids: int64 `(B, n)`.
        masks: ids of the K - 1 places to be guessed.

    Returns:
        `(B, K, V')` in the model's dtype.
    """
    masked = input_ids.new_tensor([list(masks)]).expand(len(input_ids), -1)
    fed = torch.cat([input_ids, masked], dim=1).to(model.device)
    return model(input_ids=fed, use_cache=False, logits_to_keep=len(masks) + 1).logits


class CausalRows(RowModel):
    """A causal LM's texts by their ids, and masks after them (PARD, section 3.2).

    Args:
        model: shared with other calls; nothing of it changes.
        masks: ids of the K - 1 places to be guessed at most, in their order; None: it goes on from
            tokens that the engine chose.
        unknown: stands for ids that the model has no embedding of.
    """

    reads_features = False

    def __init__(self, model: PreTrainedModel, masks: list[int] | None = None, unknown: int = 0):
        self.stack, self.mask_ids, self.unknown = model, masks, unknown
        self.extends = masks is None
        self.context = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    def text(self, ids: LongTensor, fused: Tensor) -> Tensor:
        """Implement `RowModel.text`: ids, with `unknown` for those that the model does not have.

        The ids are int64 `(B, M)`.
        """
        return ids.where(
            (ids >= 0) & (ids < self.stack.get_input_embeddings().num_embeddings), self.unknown
        )

    def masks(self, fused: Tensor, count: int) -> Tensor:
        """Implement `RowModel.masks`: ids of the first `count` masks, or of all."""
        return torch.tensor(
            self.mask_ids[:count], dtype=torch.long, device=self.stack.device
        ).expand(len(fused), -1)

    def forward_rows(
        self,
        inputs: Tensor,
        mask: Mask,
        positions: LongTensor,
        cache: Cache,
        count: int,
    ) -> tuple[Tensor, Tensor]:
        """Implement `RowModel.forward_rows`, by the model's own forward.

        Nodes are fed with nothing but their ids.
        """
        fed = {
            "inputs_embeds" if inputs.is_floating_point() else "input_ids": inputs,
            "attention_mask": mask,
        }
        given = {"position_ids": positions, "use_cache": True, **with_cache(self.stack, cache)}
        logits = self.stack(**fed, **given, logits_to_keep=count).logits
        return logits, logits[..., :0]


def load_whole(
    load: Callable[..., Any],
    name: str,
    folder: Path,
    config: PreTrainedConfig,
    kwargs: dict,
) -> Any:
    """Load a model with exactly the weights of a folder's safetensors.

    Pickles may lie next to them, and are not read.

    Args:
        load: `from_pretrained` of its class.
        name: the name of that class in transformers.
        folder, config: those of the drafter.
        kwargs: arguments of `load`.

    Raises:
        OSError: weights are missing.
        ValueError: the config is another class's, or there are weights that the class has no place
            for.
    """
    if (wanted := config.architectures or []) and wanted[0] != name:
        raise ValueError(
            f"{folder} holds a {wanted[0]}, and its config is that of a {name}: it is no PARD "
            "drafter, which is a plain causal LM."
        )
    if (folder / WHOLE).exists() and folder / WHOLE not in tensor_files(folder).values():
        raise ValueError(
            f"{folder} has weights in one piece and in several ({WHOLE}, {INDEX}), and "
            "transformers reads the former: remove those that do not belong there."
        )
    drafter, info = load(
        folder,
        config=config,
        output_loading_info=True,
        **{**kwargs, "use_safetensors": True},
    )
    refuse_missing(info, name, folder)
    if more := sorted(info["unexpected_keys"]):
        raise ValueError(
            f"The {name} in {folder} has no place for {len(more)} of the model's weights "
            f"({', '.join(more[:3])}, …): it is no PARD drafter, or another kind."
        )
    return drafter


class AutoregressiveDrafter(SavedDrafter):
    """A causal LM as a drafter that guesses one token per forward.

    Where trees are wanted, it continues several candidates.

    Args:
        model: a causal LM that takes explicit masks, with the target's tokens.
        speculation_config: default: 20 tokens deep, as in transformers' own assisted generation, in
            trees as large as pays.

    Raises:
        ValueError: a model that cannot draft so.
    """

    kind = "autoregressive"
    title = "autoregressive drafter"
    template = "autoregressive.jinja"
    made_from = "base_model"
    has_tokenizer = True
    fits = (
        "transformers with hf_paradraft; as a plain model, any engine's autoregressive speculation"
    )

    def __init__(self, model: PreTrainedModel, speculation_config: SpeculationConfig | None = None):
        check_drafts(model)
        self.model = model
        self.speculation_config = speculation_config or SpeculationConfig(20)
        self.config, self.name_or_path = model.config, model.name_or_path

    @classmethod
    def from_causal_lm(
        cls, model: PreTrainedModel | str | Path, **kwargs: Any
    ) -> AutoregressiveDrafter:
        """Wrap a causal LM.

        Args:
            model: a loaded model, which is shared and not copied, or a folder or Hub id.
            kwargs: arguments of `AutoModelForCausalLM.from_pretrained`, if `model` is a name.

        Raises:
            OSError: nothing loadable there.
            ValueError: a model that cannot draft so.
        """
        if isinstance(model, str | Path):
            return cls.from_pretrained(model, **kwargs)
        return cls(innermost(model))  # adapters stay in it

    @classmethod
    def recognises(cls, folder: DrafterFolder) -> bool:
        """Implement `SavedDrafter.recognises`, by the record that `write` adds to the config.

        The model's own `config.json` holds it.
        """
        return folder.provenance.get("kind") == cls.kind

    @classmethod
    def load_folder(cls, folder: DrafterFolder, **kwargs: Any) -> AutoregressiveDrafter:
        """Load a folder's causal LM as a drafter, with its saved `speculation_config` if any.

        Args:
            folder: the folder with its files.
            kwargs: arguments of `AutoModelForCausalLM.from_pretrained`.

        Raises:
            OSError, ValueError: it is damaged, incomplete, or cannot draft so.
        """
        options = folder.provenance.get("speculation_config") if cls.recognises(folder) else None
        return cls(
            load_model(folder.path, **kwargs),
            None if options is None else SpeculationConfig.from_saved(options),
        )

    @classmethod
    def details(cls, config: dict[str, Any], names: list[str]) -> list[tuple[str, Any]]:
        """List architecture, vocabulary size and number of drafts, as (name, value) pairs."""
        options = provenance_of(config).get("speculation_config") or {}
        return [
            ("architecture", ", ".join(config.get("architectures") or ["?"])),
            ("vocabulary", config.get("vocab_size", "?")),
            ("drafts K", options.get("num_draft_tokens", "not recorded")),
        ]

    def write(self, folder: Path, **kwargs: Any) -> None:
        """Save the model with a config that says that it is a drafter.

        The loaded model's own config stays as it is.
        """
        check_merged(self.model)
        mend_sampling(self.model.generation_config)
        use = {"kind": self.kind, "speculation_config": self.speculation_config.saved()}
        save_model(self.model, folder, use, **kwargs)

    def start_drafting(self, target: PreTrainedModel, max_length: int) -> Drafting:
        """Begin a `generate` call; its state is its own. No round is compiled."""
        return Reader(CausalRows(self.model), SpeculationConfig(), max_length)

    def draft_logits(
        self, input_ids: LongTensor, features: None = None, num_draft_tokens: int | None = None
    ) -> Tensor:
        """Compute logits of the tokens after whole prefixes, without caches.

        Each row follows the most probable tokens of the rows before it.

        Args:
            input_ids: int64 `(B, n)`, without padding.
            features: none are read.
            num_draft_tokens: K; default: as configured.

        Returns:
            `(B, K, V')` in the model's dtype; row `d` guesses the token at distance `d + 1`.
        """
        ids, rows = input_ids, []
        for _ in range(num_draft_tokens or self.speculation_config.num_draft_tokens):
            rows.append(logits_after(self.model, ids, []))
            ids = torch.cat([ids, rows[-1].max(-1).indices.to(ids.device)], dim=1)
        return torch.cat(rows, dim=1)
