"""Gemma 4's assistants (google/gemma-4-*-it-assistant): a few layers without keys of their own,
which query the target's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedModel

from ..decoding.features import layers_of
from ..decoding.tree_attention import additive
from ..notes import pair
from ..protocol import GuessedLogits, Observation, Prefix, SpeculationConfig
from ..protocol.drafter import FeatureKey, KeyValues
from .feature_drafter import PADDING
from .formats.files import load_model, save_model
from .formats.folder import DrafterFolder
from .reading.context import ContextDrafting, KeyValueDrafter


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
        logits, states = self.read_nodes(newest[:, None], torch.stack(before)[:, None])
        for row, state in zip(self.rows, states[:, 0], strict=True):
            row.states = [state]
        return [GuessedLogits(guess, extend=self.extend) for guess in logits]

    def read_nodes(self, ids: LongTensor, before: Tensor, *nodes: Any) -> tuple[Tensor, Tensor]:
        """Implement `RaggedDrafting.read_nodes`: no node sees another; all stand in one place."""
        network, table = self.model.network, self.model.table
        ends = torch.tensor(self.lengths, device=network.device)[:, None]
        embedded = table(ids.to(next(table.parameters()).device))
        embedded = embedded.to(network.device, network.dtype)
        layers = dict(zip(self.model.shapes, self.cache.cache.layers, strict=True))
        outputs = network.model(
            inputs_embeds=network.pre_projection(
                torch.cat([embedded, before.to(embedded)], dim=-1)
            ),
            attention_mask=self._seen(),
            position_ids=ends.expand_as(ids),
            shared_kv_states={kind: (layer.keys, layer.values) for kind, layer in layers.items()},
            use_cache=False,
            # of an int 5.24 slices inputs of layers, which these have not
            logits_to_keep=torch.arange(ids.shape[1], device=ids.device),
        )
        states = outputs.last_hidden_state
        after = network.post_projection(states)
        if network.masked_embedding is None:
            return network.lm_head(states), after
        logits = network.masked_embedding(states, network.lm_head.weight)
        # Tokens of other centroids all have one logit, below any other: they are not guessed.
        return logits.masked_fill(logits == logits.min(), -torch.inf), after

    def _seen(self) -> dict[str, Tensor]:
        """Make additive masks `(B, 1, 1, slots)` of the cache, by kind of layer."""
        network, lengths = self.model.network, self.cache.lengths
        slots = torch.arange(max(lengths), device=network.device)
        ends = torch.tensor(lengths, device=network.device)[:, None]
        seen = slots < ends
        # transformers' own masks reach as far back, measured from the last key.
        near = seen & (slots >= ends - 1 - network.config.get_text_config().sliding_window)
        rows = {kind: near if kind == "sliding_attention" else seen for kind in self.model.shapes}
        return {kind: additive(row, network.dtype)[:, None, None] for kind, row in rows.items()}


class Gemma4Drafter(KeyValueDrafter):
    """A Gemma 4 assistant that guesses token after token over the target's keys and values.

    It reads the target's embedding of the last token, the target's state before that, and the
    target's keys and values in two layers: the last full and the last sliding one that have any.
    All guesses of a round stand at the text's end.

    Args:
        model: transformers' own class for it, which reads and writes its files.
        speculation_config: default: as for other drafters.

    Attributes:
        model: transformers' model.
        table: the embedding of the target that this is a view of.
    """

    kind = "gemma4"
    title = "Gemma 4 assistant"
    model_types = ("gemma4_assistant", "gemma4_unified_assistant")
    about = "queries the target's own keys and values, and guesses one token after the other"
    fits = "transformers, vLLM and SGLang, with its Gemma 4 target"

    drafts_by = Gemma4Drafting
    table: torch.nn.Module = None

    def __init__(self, model: PreTrainedModel, speculation_config: SpeculationConfig | None = None):
        self.model = self.network = model
        self.speculation_config = speculation_config or SpeculationConfig()
        layers = {layer.self_attn.layer_type: layer.self_attn for layer in model.model.layers}
        heads = model.config.get_text_config().num_attention_heads
        self.shapes = {
            kind: (heads // part.num_key_value_groups, part.head_dim, part.head_dim)
            for kind, part in layers.items()
        }

    @classmethod
    def load_folder(cls, folder: DrafterFolder, **kwargs: Any) -> Self:
        """Load the assistant in a folder.

        Args:
            folder: the folder with its files.
            kwargs: arguments of `AutoModelForCausalLM.from_pretrained`.

        Raises:
            OSError, ValueError: it is damaged, incomplete, or something else.
        """
        if not cls.recognises(folder):
            raise ValueError(
                f"{folder} holds no {cls.title}: its model_type is none of "
                f"{', '.join(cls.model_types)}."
            )
        model = load_model(folder.path, **kwargs)
        _check_centroids(model, folder.path)
        saved = folder.provenance.get("speculation_config")
        return cls(model, SpeculationConfig.from_saved(saved))

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
    def device(self) -> torch.device:
        """The device of its weights."""
        return self.model.device

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
        vocab_size = self.network.config.get_text_config().vocab_size
        if abs(vocab_size - config.vocab_size) > PADDING:
            raise ValueError(
                f"{who} guesses {vocab_size} ids, and the target has {config.vocab_size}."
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
        """Return no masks, for rows have none of their own: a forward makes them."""
        return {}


def _check_centroids(model: PreTrainedModel, folder: Path) -> None:
    """Refuse an assistant that cannot choose its centroids, or whose tokens are not all theirs.

    Raises:
        OSError: they do not share all tokens out, each once.
        ValueError: it chooses more of them than it has.
    """
    if (head := model.masked_embedding) is None:
        return
    if model.config.centroid_intermediate_top_k > model.config.num_centroids:
        raise ValueError(f"{folder} chooses more centroids than it has: download it again.")
    tokens = head.token_ordering.flatten().long().cpu()
    if not torch.equal(tokens.sort().values, torch.arange(len(tokens))):
        raise OSError(
            f"{folder}: its token_ordering does not name every token once: download it again."
        )
