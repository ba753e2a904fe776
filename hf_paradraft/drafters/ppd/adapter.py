"""The adapter: ids after the vocabulary are prompts, and nothing else of the model changes.

Importing this registers the method with PEFT, so that `get_peft_model`,
`PeftModel.from_pretrained`, `load_adapter` and `AutoPeftModelForCausalLM` know it.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from peft import PeftConfig, TaskType, mapping
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import LongTensor, Tensor, nn
from transformers import PreTrainedModel

from ...decoding.checks import Refused
from ...decoding.tree_attention import attention_windows, or_sdpa


class PpdType(str, Enum):  # noqa: UP042  (PEFT's tables and files want the value as a plain string)
    """The name of the method as PEFT's registry has it: its own enum is closed."""

    PPD = "PPD"


@dataclass
class PpdConfig(PeftConfig):
    """Prompt tokens for parallel prompt decoding; a `PeftConfig` for `peft.get_peft_model`.

    Args:
        num_prompt_tokens: m, how far ahead they guess.
        num_ensembles: E, embeddings per prompt token, whose guesses are averaged.
        hidden_size: the base model's width; filled in when the adapter is made.
        vocab_size: the size of the base model's embedding; prompt `i` of ensemble `e` has the id
            `vocab_size + i·E + e`.
        accuracy: m rows that `paradraft calibrate` counted: `accuracy[d][r]` is how often the guess
            of rank `r` at distance `d + 1` was right if all before it were. None: trees go by usual
            accuracies.

    Raises:
        ValueError: m or E below 1, or an accuracy that is not m rows of chances.
    """

    num_prompt_tokens: int = 3
    num_ensembles: int = 1
    hidden_size: int | None = None
    vocab_size: int | None = None
    accuracy: list[list[float]] | None = None
    target_modules: None = None  # always the input embedding; PEFT asks for the name

    def __post_init__(self):
        super().__post_init__()
        self.peft_type = PpdType.PPD
        # other tasks have no generate of their own in PEFT
        self.task_type = self.task_type or TaskType.CAUSAL_LM
        for name in ("num_prompt_tokens", "num_ensembles"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, but is {value!r}.")
        if self.accuracy is not None and not _are_falling(self.accuracy, self.num_prompt_tokens):
            raise ValueError(
                "accuracy must be one row of chances, falling by rank, for each prompt token: "
                "calibrate again."
            )

    def get_text_config(self, **_: object) -> None:
        """Refuse transformers' own assisted loop, which asks for this and has no place for prompts.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "Prompt tokens ride along in the target's own forward, which transformers' assisted "
            "generation cannot do: use a version of transformers that hf_paradraft's loop is "
            "installed in, or custom_generate=speculative_decoding."
        )

    @property
    def num_ids(self) -> int:
        """m·E, the ids after the vocabulary that are prompts."""
        return self.num_prompt_tokens * self.num_ensembles


def _are_falling(rows: Any, count: int) -> bool:
    try:
        return len(rows) == count and all(
            row == sorted(row, reverse=True) and row[-1] >= 0 and sum(row) <= 1.001 for row in rows
        )
    except (IndexError, TypeError):  # an empty row; no rows of numbers
        return False


class PromptEmbedding(nn.Module, BaseTunerLayer):
    """An input embedding that maps the ids after its vocabulary to prompts.

    All other ids give exactly the same embeddings as before.

    Args:
        base_layer: the model's input embedding. Prompts are not scaled, as its own rows may be
            (Gemma's are).
    """

    adapter_layer_names = ("ppd_prompts",)
    other_param_names = ()

    def __init__(self, base_layer: nn.Embedding):
        super().__init__()
        self.base_layer = base_layer
        self.ppd_prompts = nn.ParameterDict()
        self.configs: dict[str, PpdConfig] = {}

    @property
    def num_embeddings(self) -> int:
        """The vocabulary's size, without prompts."""
        return len(self.weight)

    def add(self, adapter_name: str, config: PpdConfig) -> None:
        """Make an adapter's prompts `(m·E, hidden)`, each begun as a random token's embedding."""
        rows = torch.randint(self.num_embeddings, (config.num_ids,), device=self.weight.device)
        with torch.no_grad():
            self.ppd_prompts[adapter_name] = nn.Parameter(self.base_layer(rows))
        self.configs[adapter_name] = config
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    @property
    def active_name(self) -> str | None:
        """The name of the active PPD adapter; None: there is none."""
        return next((name for name in self.active_adapters if name in self.ppd_prompts), None)

    def prompts(self) -> Tensor | None:
        """Look up the active adapter's prompts; None if it is disabled or there is none."""
        name = None if self.disable_adapters else self.active_name
        return None if name is None else self.ppd_prompts[name]

    def config(self) -> PpdConfig:
        """Look up the active adapter's config.

        PEFT's own table forgets it once another kind of adapter takes its name.

        Raises:
            ValueError: no PPD adapter is active.
        """
        if self.prompts() is None:
            raise ValueError("The model's PPD adapter is disabled: enable it first.")
        return self.configs[self.active_name]

    def forward(self, input_ids: LongTensor) -> Tensor:
        """Embed ids `(…)`, prompts among them, as `(…, hidden)` in the base embedding's dtype.

        Raises:
            IndexError: an id is after the vocabulary and no adapter's prompt.
        """
        prompts = self.prompts()
        if prompts is None:
            return self.base_layer(input_ids)
        is_prompt = input_ids >= self.num_embeddings
        embeddings = self.base_layer(input_ids.masked_fill(is_prompt, 0))
        chosen = (input_ids - self.num_embeddings).clamp(min=0)
        return torch.where(is_prompt[..., None], prompts.to(embeddings.dtype)[chosen], embeddings)


class PpdModel(BaseTuner):
    """PEFT's wrapper around the model with a `PromptEmbedding`."""

    prefix = "ppd_"
    tuner_layer_cls = PromptEmbedding
    target_module_mapping: dict[str, list[str]] = {}  # noqa: RUF012

    def _prepare_adapter_config(self, peft_config: PpdConfig, model_config: Any) -> PpdConfig:
        check_embeds_once(self.model)
        embedding = self.model.get_input_embeddings()
        sizes = {"vocab_size": embedding.weight.shape[0], "hidden_size": embedding.weight.shape[1]}
        for name, size in sizes.items():
            made_for = getattr(peft_config, name)
            if made_for not in (None, size):
                raise ValueError(
                    f"This PPD adapter was made for a base model with {name}={made_for}, and this "
                    f"one has {size}: load it on the base it belongs to "
                    f"({peft_config.base_model_name_or_path or 'not recorded'}), not resized."
                )
            setattr(peft_config, name, size)
        return peft_config

    def _check_target_module_exists(self, peft_config: PpdConfig, key: str) -> bool:
        return self.model.get_submodule(key) is self.model.get_input_embeddings()

    def _create_and_replace(
        self, peft_config, adapter_name, target, target_name, parent, current_key, **kwargs
    ) -> None:
        if not isinstance(target, PromptEmbedding):
            target = PromptEmbedding(target)
            setattr(parent, target_name, target)
        target.add(adapter_name, peft_config)

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to merge the adapter into the model's weights.

        Raises:
            ValueError: always; prompts are inputs, not weights.
        """
        raise ValueError(
            "Prompt tokens cannot be merged into a model's weights: they are extra inputs. "
            "unload() takes them off."
        )

    merge_and_unload = merge_adapter


def check_takes_masks(model: PreTrainedModel) -> None:
    """Refuse a model in whose forward prompts cannot be hidden from the text.

    Raises:
        Refused: it takes no mask and positions as they are given.
    """
    if attention_windows(model) is None:
        raise Refused(
            "Prompt tokens need a target that takes a mask and positions as they are given, and "
            f"{type(model).__name__} as it is loaded here does not: use another "
            f"one{or_sdpa(model)}."
        )


def check_embeds_once(model: PreTrainedModel) -> None:
    """Refuse a model whose layers look their input up by id too: prompts have no such rows.

    Raises:
        ValueError: it is one (Gemma 3n, Gemma 4).
    """
    if getattr(model.config.get_text_config(), "hidden_size_per_layer_input", None):
        raise ValueError(
            f"{type(model).__name__} embeds every layer's own input by id, and prompt tokens have "
            "none."
        )


def prompt_embedding(model: PreTrainedModel) -> PromptEmbedding:
    """Look up the input embedding of a model that has a PPD adapter, which holds the prompts.

    Raises:
        ValueError: it has none.
    """
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, PromptEmbedding):
        raise ValueError(
            f"{type(model).__name__} has no PPD adapter: load one with PeftModel.from_pretrained "
            "or load_adapter."
        )
    return embedding


# PEFT's `register_peft_method` takes only names of its own closed enum
mapping.PEFT_TYPE_TO_CONFIG_MAPPING[PpdType.PPD] = PpdConfig
mapping.PEFT_TYPE_TO_TUNER_MAPPING[PpdType.PPD] = PpdModel
mapping.PEFT_TYPE_TO_PREFIX_MAPPING[PpdType.PPD] = PpdModel.prefix
