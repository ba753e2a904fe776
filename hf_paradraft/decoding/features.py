"""Hidden states of the target for drafters: only those that a drafter asks for, of accepted tokens.

Keys are as in `protocol.FeatureKey`: `-1` is the first layer's input, `0 … L-1` is each layer's raw
output (so `L-1` is the state before the final norm), `"normed"` is the head's input, and
`KeyValues(i)` are the keys and values that layer `i` has put into the cache.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel, StaticLayer

from ..names import cache_in
from ..protocol.drafter import FeatureKey, KeyValues


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Look up the target's decoder, which is the model without its head.

    Raises:
        ValueError: it has no part of that kind.
    """
    decoder = model.get_decoder()
    if decoder is None or decoder is model:
        raise ValueError(
            f"{type(model).__name__} has no decoder apart from its head: its hidden states cannot "
            "be read."
        )
    return decoder


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Look up the target's decoder layers, in their order.

    Raises:
        ValueError: they are not a list in its decoder.
    """
    count = model.config.get_text_config().num_hidden_layers
    lists = [
        part
        for part in decoder_of(model).children()
        if isinstance(part, nn.ModuleList) and len(part) == count
    ]
    if len(lists) != 1:
        raise ValueError(
            f"{type(model).__name__} has no single list of its {count} layers: their outputs "
            "cannot be read."
        )
    return lists[0]


def entries(layer: Any, count: int) -> Tensor:
    """Copy the last `count` keys and values of a cache's layer, `(B, count, 2·H·D)`.

    A sliding window keeps no more entries than it has; before them there are zeros.
    """
    end = int(layer.cumulative_length) if isinstance(layer, StaticLayer) else layer.keys.shape[2]
    new = slice(max(0, end - count), end)
    both = [states[:, :, new].transpose(1, 2).flatten(2) for states in (layer.keys, layer.values)]
    rows = torch.cat(both, dim=-1)
    return pad(rows, (0, 0, count - rows.shape[1], 0))


class Features:
    """A collector of hidden states in one call's forwards, while it is entered.

    Without keys, nothing is hooked.

    Several calls may share a target, each in a thread of its own: forwards of other threads than
    the one that entered are ignored.

    Args:
        model: the target.
        keys: the features to collect.

    Raises:
        ValueError: the target lacks a layer that is asked for, or its layers cannot be found.
    """

    def __init__(self, model: PreTrainedModel, keys: Sequence[FeatureKey]):
        self.model, self.keys = model, tuple(dict.fromkeys(keys))
        self.rows: dict[FeatureKey, Tensor] = {}  # of the last forward, (B, rows, hidden)
        self.verified: dict[FeatureKey, Tensor] = {}  # of the last one that was `collect`ed
        self.handles: list[Any] = []
        self.thread = 0  # the one that entered
        if not self.keys:
            return
        self.layers = layers_of(model)
        numbers = [
            key.layer if isinstance(key, KeyValues) else key for key in self.keys if key != "normed"
        ]
        known = range(-1, len(self.layers))
        wrong = [number for number in numbers if type(number) is not int or number not in known]
        if wrong:
            raise ValueError(
                f"The drafter reads {', '.join(map(repr, wrong))} of {type(model).__name__}, which "
                f"has layers 0 … {len(self.layers) - 1}: it was made for another target."
            )

    def start(self) -> None:
        """Collect from here on, in forwards of this thread."""
        self.thread = threading.get_ident()
        for key in self.keys:
            part = self.layers[max(key, 0)] if isinstance(key, int) else decoder_of(self.model)
            self.handles.append(part.register_forward_hook(self._hook(key), with_kwargs=True))

    def __enter__(self) -> "Features":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop collecting; it may be called again."""
        while self.handles:
            self.handles.pop().remove()
        self.rows, self.verified = {}, {}

    @property
    def _is_ours(self) -> bool:
        """Whether a forward is this call's.

        A compiled forward is traced without the question, which would break its graph.
        """
        return torch.compiler.is_dynamo_compiling() or threading.get_ident() == self.thread

    def _hook(self, key: FeatureKey) -> Any:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            if not self._is_ours:
                return
            if isinstance(key, KeyValues):
                if (cache := cache_in(kwargs)) is not None:  # guidance runs the target without one
                    ids = args[0] if args else kwargs.get("input_ids")
                    count = (kwargs["inputs_embeds"] if ids is None else ids).shape[1]
                    self.rows[key] = entries(cache.layers[key.layer], count)
            elif key == -1:
                self.rows[key] = args[0] if args else kwargs["hidden_states"]
            else:
                self.rows[key] = output if isinstance(output, Tensor) else output[0]

        return hook

    def collect(self) -> None:
        """Keep the last forward's states until they are read.

        A logits processor may run the target before that, for its own purposes.
        """
        self.verified, self.rows = self.rows, {}

    def of_sequence(self, row: int, rows: list[int]) -> dict[FeatureKey, Tensor]:
        """Select a sequence's states `(f, hidden)` at these rows of the collected forward."""
        return {key: states[row, rows] for key, states in self.verified.items()}
