"""Draft with a model's own prompt tokens: one forward verifies this round's guesses and makes the next's (PPD, section 4)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ...decoding import Draft, Prefix, SpeculationConfig, SpeculationStats
from ...decoding.cost import RoundCost
from ...decoding.pace import Pace
from ...decoding.tree_attention import attention_windows, or_sdpa
from ...integration.files import check_weights, local_folder, read_json
from ...trees.best_first import Paths, best_paths
from ...trees.sparse import SIZES, SparseTree, attach_prompts, build_trees, ends, sizes
from .config import PpdConfig
from .tuner import PpdModel, check_embeds_once, prompt_embedding

logger = logging.get_logger(__name__)
MAX_RANKS = 16  # guesses of one distance that a tree can hold


class PpdDrafter:
    """A PPD adapter as `assistant_model` of the model it belongs to.

    Args:
        prompts: `(m·E, hidden)`; row `i·E + e` is prompt `i` of ensemble `e`.
        config: of the adapter.
        tensor_name: of the prompts in the adapter's file.
        speculation_config: `tree_size` is the number of a round's rows beside the root's, guesses and prompts together; default:
            what is fastest on this hardware for a calibrated adapter, else a few.

    Attributes:
        last_stats: of the last `generate` call it assisted, or None.
    """

    def __init__(self, prompts: Tensor, config: PpdConfig, tensor_name: str, speculation_config: SpeculationConfig | None = None):
        self.prompts, self.config, self.tensor_name = prompts, config, tensor_name
        rows = "auto" if config.accuracy is not None else max(15, 3 * config.num_ids)
        self.speculation_config = speculation_config or SpeculationConfig(config.num_prompt_tokens, tree_size=rows)
        self.last_stats: SpeculationStats | None = None

    @classmethod
    def from_pretrained(cls, repo_or_dir: str | Path, dtype: torch.dtype | str | None = None, **kwargs: Any) -> PpdDrafter:
        """The drafter in an adapter's folder or Hub repository; the base model is not loaded.

        Raises:
            OSError: nothing loadable there.
            ValueError: an adapter of another kind.
        """
        folder = local_folder(repo_or_dir, kwargs)
        kind = read_json(folder / "adapter_config.json").get("peft_type")
        if kind != "PPD":
            raise ValueError(f"{repo_or_dir} is a PEFT adapter of type {kind}, not a drafter: load it with PeftModel.")
        config = PpdConfig.from_pretrained(str(folder))
        check_weights(folder)
        tensors = load_file(folder / "adapter_model.safetensors")
        if len(tensors) != 1 or next(iter(tensors.values())).shape != (config.num_ids, config.hidden_size):
            raise ValueError(f"{repo_or_dir} does not hold the {config.num_ids} prompts its config speaks of: save it again.")
        name, prompts = next(iter(tensors.items()))
        kwargs.pop("device_map", None)  # prompts go where the target is
        if isinstance(dtype, str):
            dtype = None if dtype == "auto" else getattr(torch, dtype, None)
        return cls(prompts if dtype is None else prompts.to(dtype), config, name)

    @classmethod
    def from_model(cls, model: PeftModel | PreTrainedModel) -> PpdDrafter:
        """The active adapter of a loaded model; the prompts are shared.

        Raises:
            ValueError: it has no PPD adapter, or the adapter is disabled.
        """
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        embedding = prompt_embedding(base)
        prompts = embedding.prompts()
        if prompts is None:
            raise ValueError("The model's PPD adapter is disabled: enable it first.")
        path = next(path for path, module in base.named_modules() if module is embedding)
        return cls(prompts.detach(), embedding.config(), f"base_model.model.{path}.ppd_prompts")

    def eval(self) -> PpdDrafter:
        """Itself: prompts have no training mode."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> PpdDrafter:
        """Itself, with prompts of another dtype or on another device, as `Tensor.to`."""
        self.prompts = self.prompts.to(*args, **kwargs)
        return self

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Save the adapter as PEFT does: `adapter_config.json` and `adapter_model.safetensors`."""
        self.config.save_pretrained(str(save_directory))
        prompts = self.prompts.detach().cpu().contiguous()
        save_file({self.tensor_name: prompts}, Path(save_directory) / "adapter_model.safetensors", metadata={"format": "pt"})

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> CommitInfo:
        """Publish adapter and card in one commit.

        Args:
            repo_id: `user/name`.
            kwargs: `private`, `revision`, `create_pr`, `token`, `commit_message`, `license`, as for `push_folder`.

        Raises:
            OSError: the Hub refused.
        """
        from ...integration.push import push_folder  # needs the whole library

        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push_folder(folder, repo_id, **kwargs)

    def check_target(self, target: PreTrainedModel) -> None:
        """Refuse a model that the prompts were not trained on, or that they cannot ride along in.

        Raises:
            ValueError: its embedding has other sizes, or it takes no masks and positions as given.
        """
        if attention_windows(target) is None:
            raise ValueError(
                f"Prompt tokens need a target that takes a mask and positions as they are given, and {type(target).__name__} "
                f"as it is loaded here does not: use another drafter{or_sdpa(target)}."
            )
        check_embeds_once(target)
        if not bool(torch.isfinite(self.prompts.to(target.dtype)).all()):
            raise ValueError(f"The adapter's prompts are not finite numbers in {target.dtype}: train it again, or load it anew.")
        sizes = tuple(target.get_input_embeddings().weight.shape)
        if sizes != (self.config.vocab_size, self.config.hidden_size):
            raise ValueError(
                f"This PPD adapter belongs to a model with an embedding of {self.config.vocab_size} × {self.config.hidden_size}, "
                f"and the target's is {sizes[0]} × {sizes[1]}: use {self.config.base_model_name_or_path or 'its own base'}."
            )

    def start_drafting(self, max_length: int) -> PpdDrafting:
        """Begin a `generate` call; its state is its own.

        Raises:
            ValueError: options that prompt tokens cannot serve.
        """
        if not bool(torch.isfinite(self.prompts).all()):
            raise ValueError("The adapter's prompts are not finite numbers: train it again, or load it anew.")
        options, least = self.speculation_config, self.config.num_ids + 1
        if options.tree_size == "auto" and self.config.accuracy is None:
            raise ValueError("tree_size='auto' needs a calibrated adapter: run paradraft calibrate, or give a number of rows.")
        rows = SIZES[-1] if options.tree_size == "auto" else options.tree_size or 0
        if rows < least:
            raise ValueError(f"tree_size={options.tree_size!r}: for prompt tokens it is a number of rows, here {least} at least.")
        if options.acceptance == "rejection":
            raise ValueError("Prompt tokens' guesses are not sampled, as acceptance='rejection' needs: use 'auto'.")
        return PpdDrafting(self)

    def trees(self, cost: RoundCost | None) -> list[SparseTree]:
        """A calibrated adapter's trees by state, of `tree_size` rows, or of the size that brings most tokens per second.

        Args:
            cost: the target's; asked for with `tree_size="auto"`.
        """
        accuracy, e, size = self.config.accuracy, self.config.num_ensembles, self.speculation_config.tree_size
        if size != "auto":
            return build_trees(accuracy, size, e)
        return max(sizes(accuracy, e, cost.latency, cost.batch_size), key=lambda found: found.tau / found.seconds).trees


class PpdDrafting:
    """One call's drafting: what each row's last prompts guessed.

    Args:
        drafter: shared with other calls.
    """

    def __init__(self, drafter: PpdDrafter):
        self.drafter = drafter
        self.m, self.e = drafter.config.num_prompt_tokens, drafter.config.num_ensembles
        self.trees: list[SparseTree] | None = None
        self.riders: dict[int, tuple[list[int], list[int], Tensor]] = {}  # of each state's tree
        self.drafts: list[Draft] = []
        self.guesses: list[Tensor | None] = []  # of each row, logits (k, V) for the tokens behind its last one

    def propose(self, prefixes: list[Prefix]) -> list[Draft]:
        """Each row's tree over its last guesses, with prompts below the nodes where the round is likely to end."""
        if self.trees is None and self.drafter.config.accuracy is not None and any(prefix.branches for prefix in prefixes):
            self.trees = self.drafter.trees(prefixes[0].pace.cost)
        self.guesses = self.guesses or [None] * len(prefixes)
        self.drafts = [self._draft(prefix, guess) for prefix, guess in zip(prefixes, self.guesses, strict=True)]
        return self.drafts

    def observe(self, outputs: Any, paths: list[list[int] | None]) -> None:
        """Take the guesses of the prompts below the node where each row ended."""
        self.guesses = [None] * len(paths)
        for row, (draft, path) in enumerate(zip(self.drafts, paths, strict=False)):
            end = path[-1] if path else -1
            below = [rider for rider, node in enumerate(draft.rider_nodes) if node == end]
            if path is not None and below:
                rows = outputs.logits[row, [1 + len(draft) + rider for rider in below]]
                self.guesses[row] = rows.float().unflatten(0, (-1, self.e)).mean(1)  # E embeddings of a prompt stand together
        self.drafts = []  # there may be no draft in the next round

    def _draft(self, prefix: Prefix, guess: Tensor | None) -> Draft:
        draft = Draft.chain(prefix.ids[0, :0])
        if not prefix.branches or prefix.room == 0:
            return draft
        if guess is None:
            guess = self.drafter.prompts.new_zeros((0, 1))
        guess = guess[: prefix.room, : min(self.drafter.config.vocab_size, prefix.vocab_size)]
        ranks = max(map(len, self.drafter.config.accuracy)) if self.trees is not None else MAX_RANKS
        top, ids = guess.topk(min(ranks, guess.shape[1]), dim=-1)
        state = len(guess)
        if self.trees is not None:
            tree = self.trees[state]
            riders = self.riders[state] = self.riders.get(state) or self._riders(tree)
        else:
            tree = self._tree_by_belief((top - guess.logsumexp(-1, keepdim=True)), prefix.pace)
            riders = self._riders(tree)
        if tree.paths.parents:
            tokens = ids[tree.paths.depths, tree.paths.ranks].to(prefix.ids.device)
            draft = Draft(tokens, tree.paths.parents, beliefs=tree.paths.beliefs)
        draft.rider_nodes, draft.rider_parents, draft.rider_embeddings = riders
        return draft

    def _riders(self, tree: SparseTree) -> tuple[list[int], list[int], Tensor]:
        nodes, parents, which = tree.riders(self.e)
        return nodes, parents, self.drafter.prompts[which]

    def _tree_by_belief(self, scores: Tensor, pace: Pace) -> SparseTree:
        """Without calibration: the guesses' own probabilities, corrected by what came true in this call."""
        budget = self.drafter.speculation_config.tree_size
        factors = torch.from_numpy(pace.factors[1 : 1 + len(scores)]).to(scores)
        num_nodes = max(1, (budget - self.m * self.e) // 2)  # the root's own prompts are counted
        paths = best_paths((scores + factors[:, None].log()).tolist(), num_nodes) if len(scores) else Paths()
        accepted = (pace.held + 1) / (pace.tried + 2)
        values = [0.0, *accepted[1 : self.m + 1].cumprod().cumsum()]
        chances = ends(paths)
        room = min((budget - len(paths.parents)) // self.e, self.m * len(chances))
        return SparseTree(paths, attach_prompts(chances, values, room))


NOT_DRAFTED = {"num_beams": 1, "use_cache": True, "output_hidden_states": False, "output_attentions": False}


def _generate(self: PpdModel, *args: Any, **kwargs: Any) -> Any:
    """`PeftModel.generate` with an active PPD adapter drafts by itself."""
    embedding = prompt_embedding(self.model)
    config = kwargs.get("generation_config") or next(iter(args[1:2]), None) or self.model.generation_config
    asked = {name: kwargs.get(name, getattr(config, name, None)) for name in NOT_DRAFTED}
    if any(asked[name] not in (None, usual) for name, usual in NOT_DRAFTED.items()) or "inputs_embeds" in kwargs:
        logger.warning_once("This call of generate cannot be drafted for (beams, no cache, hidden states): decoding plainly.")
        return self.model.generate(*args, **kwargs)
    if kwargs.get("assistant_model") is None and "custom_generate" not in kwargs and embedding.prompts() is not None:
        kwargs["assistant_model"] = PpdDrafter.from_model(self.model)
    return self.model.generate(*args, **kwargs)


PpdModel.generate = _generate
