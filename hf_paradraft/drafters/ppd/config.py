"""The config of a PPD adapter."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from peft import PeftConfig, TaskType

from ..formats.folder import DrafterFolder


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
