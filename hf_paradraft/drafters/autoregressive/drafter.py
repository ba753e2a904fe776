"""Any small causal LM in the loop of this library: chains and trees, batches, static caches, never slower."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo
from torch import LongTensor, Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ...decoding.tree_attention import attention_windows, or_sdpa
from ...files import local_folder, names_folder, tensor_names
from ...protocol import Drafter, Drafting, GuessedLogits, Prefix, SpeculationConfig
from ...training.target import refuse_missing, refuse_trimmed
from ...whole_files import write_whole
from ..causal_lm import push_with_tokenizer
from ..config_file import read_config
from ..lm import LmReader, check_drafts, logits_behind
from .publish import KIND, card_fields, check_folder, is_autoregressive, options_of


class AutoregressiveDrafter(Drafter):
    """Guesses a token at a time; where trees are wanted, what it guesses behind several of its candidates.

    Args:
        model: a causal LM that takes explicit masks, with the target's tokens.
        speculation_config: default: chains of 5.

    Raises:
        ValueError: a model that cannot draft so.
    """

    def __init__(self, model: PreTrainedModel, speculation_config: SpeculationConfig | None = None):
        refuse_trimmed(model.config.to_dict(), model.name_or_path)
        check_drafts(model)
        if attention_windows(model) is None:
            raise ValueError(
                f"{type(model).__name__} as it is loaded here takes no explicit masks, which its guesses are read with: pass it "
                f"as assistant_model itself{or_sdpa(model)}."
            )
        self.model = model
        self.speculation_config = speculation_config or SpeculationConfig(5, None)
        self.config, self.name_or_path = model.config, model.name_or_path

    @classmethod
    def from_causal_lm(cls, model: PreTrainedModel | str | Path, **kwargs: Any) -> AutoregressiveDrafter:
        """Wrap a causal LM.

        Args:
            model: a loaded model, which is shared and not copied, or a folder or Hub id.
            kwargs: for `AutoModelForCausalLM.from_pretrained`, if `model` is a name.

        Raises:
            OSError: nothing loadable there.
            ValueError: a model that cannot draft so.
        """
        if isinstance(model, PreTrainedModel):
            return cls(model)
        found_under = {name: kwargs[name] for name in ("revision", "subfolder") if kwargs.get(name)}
        folder = local_folder(model, kwargs)
        described = read_config(folder)
        refuse_trimmed(described, model)
        options = options_of(described)
        tensor_names(folder)
        loaded, info = AutoModelForCausalLM.from_pretrained(
            folder, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **kwargs
        )
        refuse_missing(info, type(loaded).__name__, folder)
        drafter = cls(loaded.eval(), None if options is None else SpeculationConfig.from_saved(options))
        drafter.name_or_path, drafter.found_under = str(model), found_under
        return drafter

    @classmethod
    @names_folder
    def from_pretrained(cls, repo_or_dir: str | Path, **kwargs: Any) -> AutoregressiveDrafter:
        """One that was saved as a drafter; arguments as for `from_causal_lm`.

        Raises:
            OSError: nothing loadable there.
            ValueError: an ordinary model.
        """
        folder = local_folder(repo_or_dir, dict(kwargs))
        if not is_autoregressive(read_config(folder)):
            raise ValueError(f"{repo_or_dir} is an ordinary model: AutoregressiveDrafter.from_causal_lm makes a drafter of it.")
        return cls.from_causal_lm(repo_or_dir, **kwargs)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Save the model, with a config that says that it is a drafter; the model's own stays as it is."""
        self.model.save_pretrained(save_directory)
        config = read_config(Path(save_directory))
        config["paradraft"] = {"kind": KIND, "speculation_config": asdict(self.speculation_config)}
        write_whole(Path(save_directory) / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")

    def push_to_hub(self, repo_id: str, tokenizer: PreTrainedTokenizerBase | None = None, **kwargs: Any) -> CommitInfo:
        """Publish model, tokenizer and card in one commit.

        Args:
            repo_id: `user/name`.
            tokenizer: default: the one that lies where the model was loaded from.
            kwargs: `private`, `revision`, `create_pr`, `token`, `commit_message`, `license`, as for `push_drafter`.

        Raises:
            OSError: the Hub refused, or there is no tokenizer.
            ValueError: nothing says which tokenizer it is.
        """
        return push_with_tokenizer(self, repo_id, tokenizer, check_folder, card_fields, **kwargs)

    def start_drafting(self, target: PreTrainedModel, max_length: int) -> AutoregressiveDrafting:
        """Begin a `generate` call; its state is its own."""
        return AutoregressiveDrafting(self.model, self.speculation_config, max_length)

    def draft_logits(self, input_ids: LongTensor, features: None = None, num_draft_tokens: int | None = None) -> Tensor:
        """What is guessed behind a whole prefix, each token after the most probable one, without caches.

        Args:
            input_ids: int64 `(B, n)`, without padding.
            features: none are read.
            num_draft_tokens: K; default: as configured.

        Returns:
            `(B, K, V')` in the model's dtype; row `d` guesses the token at distance `d + 1`.
        """
        ids, rows = input_ids, []
        for _ in range(num_draft_tokens or self.speculation_config.num_draft_tokens):
            rows.append(logits_behind(self.model, ids, []))
            ids = torch.cat([ids, rows[-1].argmax(-1).to(ids.device)], dim=1)
        return torch.cat(rows, dim=1)


class AutoregressiveDrafting(Drafting):
    """One call's drafting: a cache over the prefixes, and behind them over the nodes that the engine asked about.

    Args:
        model: shared with other calls.
        config: how it is used.
        max_length: tokens of a row at most.
    """

    def __init__(self, model: PreTrainedModel, config: SpeculationConfig, max_length: int):
        self.reader = LmReader(model, max_length, [], 0)

    def propose(self, prefixes: list[Prefix]) -> list[GuessedLogits]:
        """What follows each row, one token far; `extend` goes on from there."""
        logits = self.reader.read(prefixes, 1, max(prefix.room for prefix in prefixes))
        if logits is None:
            return [GuessedLogits(prefix.ids.new_zeros((0, 1)).float()) for prefix in prefixes]
        return [GuessedLogits(row, extend=self.reader.read_nodes) for row in logits]
