"""Any small causal LM as a drafter, one token a forward (Leviathan et al., 2023); its folder says
that it is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedModel

from ..outer_names import innermost
from ..protocol import Drafting, SpeculationConfig
from .drafter import SavedDrafter
from .formats.files import load_model, save_model
from .formats.folder import DrafterFolder
from .formats.values import provenance_of
from .pard.config import mend_sampling
from .reading.causal import CausalRows, check_drafts, check_merged, logits_after
from .reading.reader import Reader


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
