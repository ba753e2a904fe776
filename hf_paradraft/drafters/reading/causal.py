"""A causal LM that drafts: its texts, with masks after them, as a `Reader` runs it; and without
one, where it takes no masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import LongTensor, Tensor
from transformers import Cache, DynamicLayer, PreTrainedConfig, PreTrainedModel

from ...admission import check_forgets
from ...decoding.cache import empty_cache
from ...decoding.recurrent import MOST_UNREAD, States, crop, is_recurrent
from ...decoding.tree_attention import attention_windows, or_sdpa
from ...files import INDEX, WHOLE, refuse_missing, tensor_files
from ...names import stores_nothing, with_cache
from ...outer_names import innermost
from ...protocol import Drafting, GuessedLogits, Prefix, SpeculationConfig
from .cache import check_continues, newer_halves, no_guess
from .reader import Reader
from .row_model import RowModel


def unwrapped(model: Any) -> Any:
    """Take a model out of the wrappers of PEFT or `torch.compile`.

    Its adapters stay in it. A name stays a name.
    """
    return innermost(model) if isinstance(model, torch.nn.Module) else model


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
    """Refuse a model that cannot draft, whatever it was taught.

    Raises:
        ValueError: it cannot forget masks that it has read.
    """
    if attention_windows(model) is not None:
        return
    check_forgets(model)
    cache = empty_cache(model)
    if not any(isinstance(layer, DynamicLayer) for layer in cache.layers):
        raise ValueError(
            f"{type(model).__name__} has no attention layers, so nothing counts what it has read: "
            "it cannot draft."
        )
    if is_recurrent(cache):
        check_continues(model)


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
        masks: ids of the K - 1 places to be guessed at most, in their order.
        unknown: stands for ids that the model has no embedding of.
    """

    reads_features = False

    def __init__(self, model: PreTrainedModel, masks: Sequence[int] = (), unknown: int = 0):
        self.stack, self.mask_ids, self.unknown = model, list(masks), unknown
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
        mask: Tensor | dict[str, Tensor] | None,
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

    def reads_like(self, other: RowModel) -> bool:
        """Implement `RowModel.reads_like`: the same model and masks."""
        return (
            isinstance(other, CausalRows)
            and other.stack is self.stack
            and other.mask_ids == self.mask_ids
        )

    def drafting(self, config: SpeculationConfig, max_length: int) -> Drafting:
        """Begin one call's drafting; arguments as for `Reader`.

        A model without explicit masks reads one text at a time.
        """
        if attention_windows(self.stack) is None:
            return OneTextReader(self)
        return Reader(self, config, max_length)


def read_with_masks(
    model: PreTrainedModel, ids: LongTensor, cache: Cache, masks: Sequence[int], unknown: int
) -> Tensor:
    """Compute logits after a prefix and each mask, by reading on from a cache.

    The cache then holds `ids`, or fewer of them where layers are recurrent.

    Args:
        model: run once, or twice where many tokens wait to be read after a recurrent state.
        ids: int64 `(1, n)` on the model's device, the whole prefix.
        cache: holds fewer than `n` leading tokens of it, and no masks.
        masks: ids of the K - 1 places to be guessed.
        unknown: stands for ids that the model has no embedding of.

    Returns:
        `(K, V')` in the model's dtype; row `d` guesses the token at distance `d + 1`. `(1, V')`
        after a recurrent drafter's very first token.
    """
    vocab_size = model.get_input_embeddings().num_embeddings
    length, recurrent = cache.get_seq_length(), is_recurrent(cache)
    new = ids[:, length:]
    new = new.where((new >= 0) & (new < vocab_size), unknown)

    def read(fed: LongTensor, logits_to_keep: int) -> Tensor:
        positions = torch.arange(length, length + fed.shape[1], device=fed.device)[None]
        inputs = {
            "input_ids": fed,
            "position_ids": positions,
            "use_cache": True,
            **with_cache(model, cache),
        }
        return model(**inputs, logits_to_keep=logits_to_keep).logits[0]

    if recurrent and new.shape[1] > (MOST_UNREAD if length else 1):
        read(new[:, :-1], 1)
        crop(cache, 0)
        length, new = ids.shape[1] - 1, new[:, -1:]
    if recurrent and length == 0:
        masks = []  # there is no state yet that could be put back
    fed = torch.cat([new, ids.new_tensor([list(masks)])], dim=1)
    states = States(cache)
    states.copy()
    logits = read(fed, len(masks) + 1)
    if recurrent and masks:
        states.restore([0])
    crop(cache, fed.shape[1] if recurrent and masks else len(masks))
    return logits


class OneTextReader(Drafting):
    """One call's drafting by a causal LM that takes no explicit masks.

    Such a model has flash attention or a recurrent state.

    Args:
        model: the causal LM, and its masks.
    """

    def __init__(self, model: CausalRows):
        self.model, self.cache, self.start, self.length = model, empty_cache(model.stack), 0, 0

    def check_texts(self, count: int) -> None:
        """Refuse more than one text."""
        if count > 1:
            network = self.model.stack
            raise ValueError(
                f"{type(network).__name__} as it is loaded here takes no explicit masks, so it "
                "drafts for one prompt at a time: call generate once per "
                f"prompt{or_sdpa(network)}."
            )

    @torch.no_grad()
    def propose(self, prefixes: list[Prefix]) -> list[GuessedLogits]:
        """Read what is new of the text, and guess the tokens after it."""
        model, network, prefix = self.model, self.model.stack, prefixes[0]
        ids = prefix.ids[0].to(network.device)
        self._forget(min(prefix.kept, len(ids) - 1))
        count, (start,) = newer_halves([ids], [self.start], prefix.room, prefixes, model.context)
        if count < 1:
            return [no_guess(prefix)]
        if start != self.start:
            self.cache, self.start = empty_cache(network), start
        self.length = len(ids)
        masks = model.mask_ids[: count - 1]
        logits = read_with_masks(network, ids[None, start:], self.cache, masks, model.unknown)
        return [GuessedLogits(logits[: prefix.room])]

    def _forget(self, length: int) -> None:
        """Drop the tokens that were read after the first `length`.

        Where the cache cannot be cropped so, all is read anew.
        """
        self.length = min(self.length, length)
        more = self.start + self.cache.get_seq_length() - self.length
        if self.length < self.start:
            self.cache, self.start = empty_cache(self.model.stack), 0
        elif more > 0:
            if all(
                type(layer) is DynamicLayer or stores_nothing(layer) for layer in self.cache.layers
            ):
                self.cache.crop(-more)
            else:  # a state cannot go back so far, and a window has dropped what it would need
                self.cache = empty_cache(self.model.stack)


def load_whole(
    load: Callable[..., Any],
    name: str,
    folder: Path,
    config: PreTrainedConfig,
    args: tuple,
    kwargs: dict,
) -> Any:
    """Load a model with exactly the weights of a folder's safetensors.

    Pickles may lie next to them, and are not read.

    Args:
        load: `from_pretrained` of its class.
        name: of that class in transformers.
        folder, config: of the drafter.
        args, kwargs: for `load`.

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
        *args,
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
