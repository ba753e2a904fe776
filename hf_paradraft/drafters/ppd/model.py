"""Draft with a model's own prompt tokens: one forward verifies this round's guesses and makes the
next's (PPD, section 4).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME as WEIGHTS
from safetensors.torch import load_file
from torch import LongTensor, Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ...decoding.checks import Refused
from ...files import names_of
from ...notes import last_target, notes_on, remember_target
from ...protocol import Drafter, SpeculationConfig
from ..drafter import OF_TARGET, SavedDrafter
from ..formats.files import save_tensors
from ..formats.folder import DrafterFolder
from .adapter import PpdConfig, PpdModel, check_embeds_once, check_takes_masks, prompt_embedding
from .drafting import SIZES, PpdDrafting
from .prompted import PromptedDrafter

logger = logging.get_logger(__name__)


class PpdDrafter(SavedDrafter):
    """A PPD adapter as `assistant_model` of the model it belongs to.

    Args:
        prompts: `(m·E, hidden)`; row `i·E + e` is prompt `i` of ensemble `e`.
        config: the adapter's config.
        tensor_name: the prompts' name in the adapter's file.
        speculation_config: `tree_size` is the number of a round's rows next to the root's, guesses
            and prompts together; default: the fastest on this hardware for a calibrated adapter,
            else a few.
    """

    kind = "ppd"
    title = "PPD adapter"
    template = "ppd.jinja"
    made_from = "base_model"
    is_adapter = True
    fits = "transformers with hf_paradraft and PEFT"
    training_options = "PpdTraining"
    guesses_in_target = True

    def __init__(
        self,
        prompts: Tensor,
        config: PpdConfig,
        tensor_name: str,
        speculation_config: SpeculationConfig | None = None,
    ):
        self.prompts, self.config, self.tensor_name = prompts, config, tensor_name
        usual = max(15, 3 * config.num_ids)
        self.speculation_config = speculation_config or SpeculationConfig(
            config.num_prompt_tokens, tree_size=usual if config.accuracy is None else "auto"
        )

    @classmethod
    def recognises(cls, folder: DrafterFolder) -> bool:
        """Implement `SavedDrafter.recognises`: any adapter with no record of another kind.

        PEFT's other adapters are refused by name.
        """
        return folder.record.get("kind", cls.kind) == cls.kind

    @classmethod
    def load_folder(cls, folder: DrafterFolder, **kwargs: Any) -> PpdDrafter:
        """Load the drafter in an adapter's folder; the base model is not loaded.

        Args:
            folder: an adapter's folder, as PEFT writes it.
            kwargs: arguments of `configured`; `dtype` is the prompts', and they go where the target
                is.

        Raises:
            OSError: nothing loadable there.
            ValueError: an adapter of another kind.
        """
        cls.check_folder(folder)
        config = PpdConfig.from_pretrained(str(folder))
        tensors = load_file(folder.path / WEIGHTS)
        shapes = [tensor.shape for tensor in tensors.values()]
        if shapes != [(config.num_ids, config.hidden_size)]:
            raise ValueError(
                f"{folder} does not hold the {config.num_ids} prompts its config speaks of: save "
                "it again."
            )
        ((name, prompts),) = tensors.items()
        return cls(prompts, config, name).configured(**{**kwargs, **OF_TARGET})

    @classmethod
    def from_model(cls, model: PeftModel | PreTrainedModel) -> PpdDrafter:
        """Make a drafter of the active adapter of a loaded model; the prompts are shared.

        Raises:
            ValueError: it has no PPD adapter, or the adapter is disabled.
        """
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        embedding = prompt_embedding(base)
        config = embedding.config()
        prompts: Any = embedding.prompts()
        path = next(path for path, module in base.named_modules() if module is embedding)
        return cls(prompts.detach(), config, f"base_model.model.{path}.ppd_prompts")

    def eval(self) -> PpdDrafter:
        """Return itself, for prompts have no training mode."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> PpdDrafter:
        """Move or cast the prompts, as `Tensor.to`, and return itself."""
        self.prompts = self.prompts.to(*args, **kwargs)
        return self

    def write(self, folder: Path, **kwargs: Any) -> None:
        """Write the adapter as PEFT does: `adapter_config.json` and `adapter_model.safetensors`."""
        self.config.save_pretrained(str(folder))
        save_tensors({self.tensor_name: self.prompts}, folder / WEIGHTS, format="pt")

    @classmethod
    def check_folder(cls, folder: DrafterFolder) -> None:
        """Refuse a folder that is not a whole PPD adapter."""
        check_adapter(folder)
        names_of(folder.path / WEIGHTS)

    @classmethod
    def read_description(cls, folder: DrafterFolder) -> dict[str, Any]:
        """Read the adapter's config, completed with defaults."""
        check_adapter(folder)
        return PpdConfig.from_pretrained(str(folder)).to_dict()

    @classmethod
    def details(cls, config: dict[str, Any], names: list[str]) -> list[tuple[str, Any]]:
        """List its prompts' numbers and calibration."""
        first = config.get("accuracy") and ", ".join(
            f"{100 * row[0]:.0f} %" for row in config["accuracy"]
        )
        return [
            ("prompt tokens", f"{config['num_prompt_tokens']} × {config['num_ensembles']}"),
            ("base's embedding", f"{config['vocab_size']} × {config['hidden_size']}"),
            ("right, by distance", first or "not calibrated"),
        ]

    @classmethod
    def adopt(cls, target: PreTrainedModel, assistant: object) -> Drafter | None:
        """Make the drafter of a model with a PPD adapter.

        It is the target's own, or a small model that guesses in parallel. None: no such model.
        """
        if not isinstance(assistant, PeftModel) or not isinstance(assistant.base_model, PpdModel):
            return None
        # One drafter in all calls of a model: its measurements stay, and its `last_stats` are found
        # again.
        drafters, base = notes_on(assistant), assistant.get_base_model()
        embedding = prompt_embedding(base)
        key, prompts = (base is target, embedding.active_name), embedding.prompts()
        if key not in drafters or drafters[key][0] is not prompts:
            make = cls.from_model if base is target else PromptedDrafter
            drafters[key] = prompts, make(assistant)
        return drafters[key][1]

    def attach(self, target: PreTrainedModel) -> None:
        """Refuse a model that the prompts were not trained on, or that they cannot ride along in.

        Raises:
            ValueError: its embedding has other sizes, it takes no masks and positions as given, or
                the prompts are no numbers.
        """
        check_takes_masks(target)
        check_embeds_once(target)
        if not torch.isfinite(self.prompts.to(target.dtype)).all():
            raise ValueError(
                f"The adapter's prompts are not finite numbers in {target.dtype}: train it again, "
                "or load it anew."
            )
        sizes = tuple(target.get_input_embeddings().weight.shape)
        if sizes != (self.config.vocab_size, self.config.hidden_size):
            raise ValueError(
                "This PPD adapter belongs to a model with an embedding of "
                f"{self.config.vocab_size} × {self.config.hidden_size}, and the target's is "
                f"{sizes[0]} × {sizes[1]}: use "
                f"{self.config.base_model_name_or_path or 'its own base'}."
            )
        remember_target(self, target)

    @property
    def max_rows(self) -> int:
        """The rows of a round at most, guesses and prompts together, without the last token's.

        That is the tree size, or the number that a chain or `auto` comes to.

        Raises:
            ValueError: too few for the prompts.
        """
        size, prompts = self.speculation_config.tree_size, self.config.num_ids
        if size is None:  # one guess at each distance
            return self.config.num_prompt_tokens * (1 + prompts) + prompts
        if size == "auto":
            return max(SIZES[-1], prompts + 1)
        if size <= prompts:
            raise ValueError(
                f"tree_size={size}: for prompt tokens it is a number of rows, here {prompts + 1} "
                "at least."
            )
        return size

    def start_drafting(self, target: PreTrainedModel, max_length: int) -> PpdDrafting:
        """Begin a `generate` call; its state is its own."""
        return PpdDrafting(target, self)

    @torch.no_grad()
    def draft_logits(
        self, input_ids: LongTensor, features: None = None, num_draft_tokens: int | None = None
    ) -> Tensor:
        """Compute the prompts' logits after whole prefixes, without caches.

        They come from forwards of the attached target.

        Args:
            input_ids: int64 `(B, n)`, n at least 2: prompts hang below the last token that has been
                read, which is the one before the newest.
            features: not read.
            num_draft_tokens: K, at most m; default: m.

        Returns:
            `(B, K, V)` float32; row `d` guesses the token at distance `d + 1`.

        Raises:
            ValueError: it is attached to no target, or more is asked for than there are prompts.
        """
        m, e = self.config.num_prompt_tokens, self.config.num_ensembles
        count = m if num_draft_tokens is None else num_draft_tokens
        target = last_target(self)
        if not 1 <= count <= m:
            raise ValueError(f"num_draft_tokens={count}: the adapter has {m} prompt tokens.")
        text = target.get_input_embeddings()(input_ids[:, :-1])
        by_ensemble = []
        for prompts in self.prompts.to(text).unflatten(0, (m, e)).unbind(1):
            rows = torch.cat([text, prompts.expand(len(text), -1, -1)], dim=1)
            logits = target(inputs_embeds=rows, use_cache=False).logits
            by_ensemble.append(logits[:, -m:].float())
        return torch.stack(by_ensemble).mean(0)[:, :count]


def check_adapter(folder: DrafterFolder) -> None:
    """Refuse an adapter that is not PPD's.

    Raises:
        OSError: its config is missing or not JSON.
        ValueError: an adapter of another kind.
    """
    if (kind := folder.adapter.get("peft_type")) != "PPD":
        uno = ", or UnoDrafter.from_pretrained if it is UNO's" if kind == "LORA" else ""
        raise ValueError(
            f"{folder} is a PEFT adapter of type {kind}, not a drafter: use PEFT's own PeftModel "
            f"for it{uno}."
        )


def _generate(self: PpdModel, *args: Any, **kwargs: Any) -> Any:
    """Draft in `PeftModel.generate` with an active PPD adapter.

    A call that cannot be drafted for is decoded plainly.
    """
    drafts = kwargs.get("assistant_model") is None and "custom_generate" not in kwargs
    if drafts and prompt_embedding(self.model).prompts() is not None:
        drafter = PpdDrafter.from_model(self.model)
        try:
            return self.model.generate(*args, **{**kwargs, "assistant_model": drafter})
        except Refused as reason:
            if kwargs.get("streamer") is not None:  # it has been shown the prompt
                raise
            logger.warning_once(f"{reason} Decoding plainly.")
    return self.model.generate(*args, **kwargs)


PpdModel.generate = _generate
