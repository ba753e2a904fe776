"""Gemma 4's assistants (google/gemma-4-*-it-assistant): a few layers without keys of their own,
which query the target's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedModel

from ...decoding.cache import RaggedCache
from ...decoding.features import layers_of
from ...decoding.tree_attention import additive
from ...protocol import GuessedLogits, Observation, Prefix, SpeculationConfig
from ...protocol.drafter import FeatureKey, KeyValues
from ..feature_drafter import PADDING
from ..formats.files import load_model, save_model
from ..formats.folder import DrafterFolder
from ..pairs import pair
from ..reading.context import ContextDrafting, KeyValueDrafter

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


class Gemma4Drafting(ContextDrafting):
    """One call's drafting, in which no row sees a guessed token.

    So a tree's nodes are independent, all at the text's last position.

    Args:
        drafter: attached to its target; nothing of it changes.
    """

    def __init__(self, drafter: Any):
        super().__init__(drafter)
        network = drafter.network
        size = network.config.backbone_hidden_size
        self.nothing = torch.zeros(size, device=network.device, dtype=network.dtype)

    def observe(self, observations: list[Observation | None]) -> None:
        """Keep keys and values, and the newest state."""
        super().observe(observations)
        for row, seen in zip(self.rows, observations, strict=True):
            # a piece may be only padding
            if seen is not None and len(seen.features.get("normed", ())):
                row.newest = seen.features["normed"][-1].to(self.nothing)

    def guesses(self, newest: LongTensor, prefixes: list[Prefix]) -> list[GuessedLogits]:
        """Implement `ContextDrafting.guesses`: one token after each row, and more by `extend`."""
        before = [self.nothing if row.newest is None else row.newest for row in self.rows]
        logits, states = self._read(newest[:, None], torch.stack(before)[:, None])
        for row, state in zip(self.rows, states[:, 0], strict=True):
            row.states = [state]
        return [GuessedLogits(guess, extend=self.extend) for guess in logits]

    @torch.no_grad()
    def extend(self, tokens: list[LongTensor], parents: list[list[int]]) -> list[Tensor]:
        """Read guessed tokens, each with the state after its parent; as `Extend`."""
        ids, before = self.laid_out(tokens, parents, max(map(len, tokens)))
        logits, states = self._read(ids, before)
        self.keep_states(tokens, states)
        return [guess[: len(new)] for guess, new in zip(logits, tokens, strict=True)]

    def _read(self, ids: LongTensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Compute logits `(B, M, V)` and states `(B, M, d_t)` after tokens `(B, M)`.

        Each token is read with the state of the token before it.
        """
        positions = torch.tensor(self.lengths, device="cpu")[:, None].expand_as(ids)
        return self.model.read(ids, before, positions, self.cache)


class Gemma4Drafter(KeyValueDrafter):
    """A Gemma 4 assistant that guesses token after token over the target's keys and values.

    It reads the target's embedding of the last token, the target's state before that, and the
    target's keys and values in two layers: the last full and the last sliding one that have any.
    All guesses of a round stand at the text's end.

    Args:
        model: transformers' own class for it, which reads and writes its files.
        speculation_config: default: as for other drafters.

    Attributes:
        table: the embedding of the target that this is a view of.
    """

    kind = "gemma4"
    title = "Gemma 4 assistant"
    about = "queries the target's own keys and values, and guesses one token after the other"
    fits = "transformers, vLLM and SGLang, with its Gemma 4 target"

    drafts_by = Gemma4Drafting
    table: torch.nn.Module = None

    def __init__(self, model: PreTrainedModel, speculation_config: SpeculationConfig | None = None):
        self.network, self.speculation_config = model, speculation_config or SpeculationConfig()
        layers = {layer.self_attn.layer_type: layer.self_attn for layer in model.model.layers}
        heads = model.config.get_text_config().num_attention_heads
        self.shapes = {
            kind: (heads // part.num_key_value_groups, part.head_dim, part.head_dim)
            for kind, part in layers.items()
        }

    @classmethod
    def recognises(cls, folder: DrafterFolder) -> bool:
        """Implement `SavedDrafter.recognises`, by the `model_type` that its config names."""
        return folder.config.get("model_type") in MODEL_TYPES

    @classmethod
    def load_folder(cls, folder: DrafterFolder, **kwargs: Any) -> Self:
        """Load the assistant in a folder.

        Args:
            folder: the folder with its files.
            kwargs: arguments of `AutoModelForCausalLM.from_pretrained`, and `speculation_config`.

        Raises:
            OSError, ValueError: it is damaged, incomplete, or something else.
        """
        if not cls.recognises(folder):
            raise ValueError(
                f"{folder} holds no {cls.title}: its model_type is none of "
                f"{', '.join(MODEL_TYPES)}."
            )
        config = folder.config
        chosen = config.get("centroid_intermediate_top_k", 32)
        all_of_them = config.get("num_centroids", 2048)
        if config.get("use_ordered_embeddings") and chosen > all_of_them:
            raise ValueError(f"{folder} chooses more centroids than it has: download it again.")
        wanted = kwargs.pop("speculation_config", None)
        model = load_model(folder.path, **kwargs)
        _check_centroids(model, folder.path)
        saved = folder.provenance.get("speculation_config")
        return cls(model, wanted or SpeculationConfig.from_saved(saved))

    def write(self, folder: Path, **kwargs: Any) -> None:
        """Write it as transformers does, with how to use it here."""
        use = {"speculation_config": self.speculation_config.saved()}
        save_model(self.network, folder, use, **kwargs)

    @classmethod
    def details(cls, config: dict[str, Any], names: list[str]) -> list[tuple[str, Any]]:
        """List the target's hidden size, the layers and the head's type as (name, value) pairs."""
        text = config.get("text_config") or {}
        return [
            ("target's hidden size", config.get("backbone_hidden_size", "?")),
            (
                "layers",
                f"{text.get('num_hidden_layers', '?')} of {text.get('hidden_size', '?')} numbers",
            ),
            ("head", "by centroids" if config.get("use_ordered_embeddings") else "of all tokens"),
        ]

    @property
    def model(self) -> PreTrainedModel:
        """The assistant, as transformers loads it."""
        return self.network

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        return self.network.device

    def sources(self, target: PreTrainedModel) -> dict[str, int]:
        """Find the target's layers whose keys and values are read, by kind.

        Each is the last layer of its kind that has some of its own.
        """
        config = target.config.get_text_config()
        own = config.layer_types[
            : config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
        ]
        return {kind: len(own) - 1 - own[::-1].index(kind) for kind in self.shapes if kind in own}

    def needs(self, target: PreTrainedModel) -> tuple[FeatureKey, ...]:
        """List the features that are read: the normed last state, two layers' keys and values."""
        return "normed", *(KeyValues(layer) for layer in self.sources(target).values())

    def attach(self, target: PreTrainedModel) -> None:
        """Check the target's sizes, and share its embedding.

        Raises:
            ValueError: it was made for another target, or for other options; the message says why.
        """
        config, who = target.config.get_text_config(), f"This {self.title}"
        if not config.model_type.startswith("gemma4"):
            raise ValueError(
                f"{who} reads keys and values of Gemma 4, and the target is of type "
                f"{config.model_type}."
            )
        if config.hidden_size != self.network.config.backbone_hidden_size:
            raise ValueError(
                f"{who} reads states of {self.network.config.backbone_hidden_size} numbers, and "
                f"the target's have {config.hidden_size}: it was made for another target."
            )
        if abs(self.network.config.get_text_config().vocab_size - config.vocab_size) > PADDING:
            raise ValueError(
                f"{who} guesses {self.network.config.get_text_config().vocab_size} ids, and the "
                f"target has {config.vocab_size}."
            )
        layers, sources = layers_of(target), self.sources(target)
        for kind, (heads, size, _) in self.shapes.items():
            attention = layers[sources[kind]].self_attn if kind in sources else None
            if attention is None or (attention.k_proj.out_features, attention.head_dim) != (
                heads * size,
                size,
            ):
                raise ValueError(
                    f"{who} reads {heads} heads of {size} numbers in {kind} layers, and the target "
                    "has others."
                )
        pair(self, target, table=target.get_input_embeddings())
        super().attach(target)

    def masks(self, offsets: list[int]) -> dict[str, Any]:
        """Return no masks, for rows have none of their own: `_masks` makes those of a forward."""
        return {}

    def _masks(self, lengths: list[int], size: int) -> dict[str, Tensor]:
        """Hide the slots of the cache that a row's queries do not see, by kind of layer.

        The masks are additive, `(B, 1, size, slots)`, for `size` queries after each row.
        """
        window = self.network.config.get_text_config().sliding_window
        slots = torch.arange(max(lengths), device=self.network.device)
        ends = torch.tensor(lengths, device=self.network.device)[:, None]
        seen = slots < ends
        # transformers' own masks reach as far back, measured from the last key.
        near = seen & (slots >= ends - 1 - window)
        by_kind = {kind: near if kind == "sliding_attention" else seen for kind in self.shapes}
        return {
            kind: additive(rows[:, None, None].expand(-1, 1, size, -1), self.network.dtype)
            for kind, rows in by_kind.items()
        }

    def read(
        self, ids: LongTensor, before: Tensor, positions: LongTensor, cache: RaggedCache
    ) -> tuple[Tensor, Tensor]:
        """Guess the tokens after some tokens, each a row of its own.

        Args:
            ids: int64 `(B, M)`.
            before: `(B, M, d_t)`: the target's state of the token before, or one of these states.
            positions: int64 `(B, M)`, of the texts' last tokens.
            cache: the target's keys and values.

        Returns:
            Logits `(B, M, V)`, and states `(B, M, d_t)`.
        """
        embedded = self.table(ids.to(next(self.table.parameters()).device)).to(
            self.network.device, self.network.dtype
        )
        inputs = self.network.pre_projection(torch.cat([embedded, before.to(embedded)], dim=-1))
        layers = dict(zip(self.shapes, cache.cache.layers, strict=True))
        outputs = self.network.model(
            inputs_embeds=inputs,
            attention_mask=self._masks(cache.lengths, ids.shape[1]),
            position_ids=positions.to(self.network.device),
            shared_kv_states={kind: (layer.keys, layer.values) for kind, layer in layers.items()},
            use_cache=False,
            # of an int 5.24 slices inputs of layers, which these have not
            logits_to_keep=torch.arange(ids.shape[1], device=ids.device),
        )
        states = outputs.last_hidden_state
        if self.network.masked_embedding is None:
            return self.network.lm_head(states), self.network.post_projection(states)
        logits = self.network.masked_embedding(states, self.network.lm_head.weight)
        # Tokens of other centroids all have one logit, below any other: they are not guessed.
        return logits.masked_fill(logits == logits.min(), -torch.inf), self.network.post_projection(
            states
        )


def _check_centroids(model: PreTrainedModel, folder: Path) -> None:
    """Refuse an assistant whose centroids do not share all tokens out, each once.

    Raises:
        OSError: they do not.
    """
    if (head := model.masked_embedding) is None:
        return
    tokens = head.token_ordering.flatten().long().cpu()
    if not torch.equal(tokens.sort().values, torch.arange(len(tokens))):
        raise OSError(
            f"{folder}: its token_ordering does not name every token once: download it again."
        )
