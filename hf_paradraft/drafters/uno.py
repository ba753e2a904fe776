"""UNO: LoRA on a frozen model, which is on only in noise, makes its rows over noise guess
(s-sahoo/uno-qwen3-8B; SGLang).

A round's first forward reads the newest token without the adapter, and noise after it with the
adapter: the first row gives the target's own next token, each further one guesses the token after
its own place. The second forward, the target's, verifies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy
import torch
from numpy import ndarray
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME as WEIGHTS
from safetensors.torch import load_file
from torch import LongTensor, Tensor
from transformers import PreTrainedModel

from ..decoding.features import layers_of
from ..decoding.tree_attention import TreeAttention, attention_windows, or_sdpa
from ..files import names_of, write_json
from ..names import with_cache
from ..notes import pair
from ..protocol import GuessedLogits, Prefix, SpeculationConfig
from ..protocol.drafter import FeatureKey, KeyValues
from .drafter import OF_TARGET
from .formats.files import save_tensors
from .formats.folder import RECORD, DrafterFolder
from .reading.context import ContextDrafting, KeyValueDrafter
from .reading.network import last_position, plain_cache, ragged_masks
from .reading.ragged import guesses_of
from .reading.reader import ragged_rows

BEYOND_NOISE = "modules_to_save", "trainable_token_indices", "alora_invocation_tokens", "bias"
# by position, so that drafts can be repeated
NOISE = torch.randint(2**31, (4096,), generator=torch.Generator().manual_seed(0), device="cpu")


def noise_at(positions: LongTensor, vocab_size: int) -> LongTensor:
    """Look up noise tokens `(…)` for positions `(…)`, uniform over the vocabulary.

    A position always has the same token.
    """
    return NOISE.to(positions.device)[positions % len(NOISE)] % vocab_size


class UnoDrafting(ContextDrafting):
    """One call's drafting over rows of noise after the part of each text that was read.

    There is a row for every token to be guessed but the first.
    """

    def guesses(self, newest: LongTensor, prefixes: list[Prefix]) -> list[GuessedLogits]:
        """Implement `ContextDrafting.guesses`, by one forward over the newest tokens and noise."""
        count = max(1, *(prefix.room for prefix in prefixes))
        network, cache = self.model.network, self.cache
        no_padding: ndarray = numpy.zeros((len(newest), 1), dtype=int)
        mask, positions = self.masks["rows"].inputs(
            cache.lengths,
            *ragged_rows(no_padding, count),
            cache.num_slots,
            # noise beyond a text's own room, which is not read, may have no position of its own
            self.model.last_position,
        )
        ids = noise_at(positions, network.config.get_text_config().vocab_size)
        ids[:, 0] = newest
        logits = network(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **with_cache(network, cache.cache),
        ).logits
        cache.keep([[]] * len(newest), count)
        return guesses_of(logits, prefixes)


class UnoDrafter(KeyValueDrafter):
    """A target that guesses by itself, with an adapter that is on only in noise.

    Args:
        config: the LoRA adapter's config.
        tensors: the adapter's tensors, as PEFT saves them.
        speculation_config: the options of its use; default: 5 tokens.

    Attributes:
        network: a target's weights with the adapter; None without a target.
        last_position: the last position of the target.
    """

    kind = "uno"
    title = "UNO adapter"
    about = (
        "lets the model guess over noise, with LoRA that is on in noise alone, and verify by itself"
    )
    is_adapter = True
    fits = "transformers with hf_paradraft and PEFT, SGLang"
    drafts_by = UnoDrafting
    last_position: int

    def __init__(
        self,
        config: LoraConfig,
        tensors: dict[str, Tensor],
        speculation_config: SpeculationConfig | None = None,
    ):
        self.config, self.tensors = config, tensors
        self.speculation_config = speculation_config or SpeculationConfig(5)

    @classmethod
    def recognises(cls, folder: DrafterFolder) -> bool:
        """Implement `SavedDrafter.recognises`, by a record: any LoRA adapter looks like it."""
        return folder.record.get("kind") == cls.kind

    @classmethod
    def load_folder(cls, folder: DrafterFolder, **kwargs: Any) -> UnoDrafter:
        """Load the adapter in a folder of any publisher; the target is not loaded.

        Args:
            folder: an adapter's folder, as PEFT writes it.
            kwargs: arguments of `configured`; `dtype` is the adapter's, which goes with the target.

        Raises:
            OSError: nothing loadable there.
            ValueError: another kind of adapter, or one that changes more than noise.
        """
        cls.check_folder(folder)
        try:
            config = LoraConfig.from_pretrained(str(folder))
        except (AttributeError, RecursionError, TypeError) as error:
            raise ValueError(
                f"{folder} has an adapter config that PEFT makes no LoRA of: {error}"
            ) from None
        saved = folder.record.get("speculation_config")
        options = None if saved is None else SpeculationConfig.from_saved(saved)
        drafter = cls(config, load_file(folder.path / WEIGHTS), options)
        return drafter.configured(**{**kwargs, **OF_TARGET})

    @classmethod
    def check_folder(cls, folder: DrafterFolder) -> None:
        """Refuse a folder that is not a whole LoRA adapter, or one that changes more than noise."""
        config = folder.adapter
        if config.get("peft_type") != "LORA":
            raise ValueError(
                f"{folder} is a PEFT adapter of type {config.get('peft_type')}, and UNO's are of "
                "type LORA."
            )
        changed = [name for name in BEYOND_NOISE if (config.get(name) or "none") != "none"]
        if changed:
            raise ValueError(
                f"{folder} changes more of a model than rows of noise ({', '.join(changed)}): not "
                "UNO's."
            )
        if not folder.holds(WEIGHTS):
            raise OSError(f"{folder} has no {WEIGHTS}: save the adapter there again.")
        names_of(folder.path / WEIGHTS)

    def write(self, folder: Path, **kwargs: Any) -> None:
        """Write the adapter as PEFT does, and how to use it in `paradraft.json`."""
        self.config.save_pretrained(str(folder))
        save_tensors(self.tensors, folder / WEIGHTS, format="pt")
        write_json(
            folder / RECORD,
            {"kind": self.kind, "speculation_config": self.speculation_config.saved()},
        )

    @classmethod
    def details(cls, config: dict[str, Any], names: list[str]) -> list[tuple[str, Any]]:
        """List its rank."""
        return [("rank", config.get("r", "?"))]

    def eval(self) -> Self:
        """Return itself, for drafting knows no training mode."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast the adapter, as `Tensor.to`, and return the drafter."""
        self.tensors = {name: tensor.to(*args, **kwargs) for name, tensor in self.tensors.items()}
        return self

    def needs(self, target: PreTrainedModel) -> tuple[FeatureKey, ...]:
        """List its features of the target: all layers' keys and values."""
        return tuple(KeyValues(layer) for layer in range(len(layers_of(target))))

    def attach(self, target: PreTrainedModel) -> None:
        """Put the adapter next to the target's own weights.

        Raises:
            ValueError: a target that it was not made for, or whose layers do not all keep keys and
                values of their own.
        """
        if attention_windows(target) is None:
            raise ValueError(
                f"A {self.title} reads keys and values of every layer after a mask, and "
                f"{type(target).__name__} has none that can be read so{or_sdpa(target)}."
            )
        if getattr(target.config.get_text_config(), "num_kv_shared_layers", None):
            raise ValueError(
                f"{type(target).__name__} shares keys and values between layers, which a "
                f"{self.title} cannot read."
            )
        super().attach(target)
        network = pair(self, target).network
        # Moving a target replaces its buffers, and resizing it its embedding.
        if network is None or not _tensors(target).keys() <= _tensors(network).keys():
            network = with_adapter(target, self.config, self.tensors)
            last = last_position(network)
            pair(self, target, network=network, shapes=_shapes(network), last_position=last)

    def masks(self, offsets: list[int]) -> dict[str, TreeAttention]:
        """Make the attention masks of rows whose first cache slots hold these positions."""
        return {"rows": ragged_masks(self.network, offsets, attention_windows(self.network))}


def _after_the_first(layer: Any) -> Callable[..., Tensor]:
    """Make the forward of a LoRA layer without the adapter in the first row of every text."""
    adapted = type(layer).forward

    def forward(rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if rows.ndim != 3:
            raise ValueError(
                "This target's layers see rows without their texts, in which an UNO adapter cannot "
                "be switched on."
            )
        own, noise = rows[:, :1].contiguous(), rows[:, 1:].contiguous()
        return torch.cat(
            [layer.base_layer(own, *args, **kwargs), adapted(layer, noise, *args, **kwargs)], dim=1
        )

    return forward


def with_adapter(
    target: PreTrainedModel, config: LoraConfig, tensors: dict[str, Tensor]
) -> PreTrainedModel:
    """Copy a target, sharing its weights, with an adapter in all rows of a text but the first.

    Args:
        target: the model that the adapter belongs to.
        config: the adapter's config.
        tensors: the adapter's tensors, as PEFT saves them.

    Raises:
        ValueError: the adapter has no place in the target.
    """
    if any(".experts." in name for name in tensors):
        raise ValueError(
            "This UNO adapter changes experts, which see tokens without their places: such "
            "adapters are not served."
        )
    trained = {parameter: parameter.requires_grad for parameter in target.parameters()}
    network = copy.deepcopy(target, _tensors(target))
    try:
        with torch.random.fork_rng():  # a caller's seed is for the text
            adapted = get_peft_model(network, copy.deepcopy(config))
        result = set_peft_model_state_dict(adapted, tensors)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"This UNO adapter does not fit {type(target).__name__}: it was made for another "
            f"target. {error!s:.300}"
        ) from error
    finally:
        for parameter, was_trained in trained.items():  # which PEFT froze
            parameter.requires_grad_(was_trained)
    missing = [name for name in result.missing_keys if ".lora_" in name]
    if missing or result.unexpected_keys:
        raise ValueError(
            f"This UNO adapter does not fit {type(target).__name__}: {len(result.unexpected_keys)} "
            f"of its weights have no place there, and {len(missing)} are missing."
        )
    for layer in adapted.modules():
        if isinstance(layer, LoraLayer):
            layer.forward = _after_the_first(layer)
    return network.eval()


def _tensors(model: PreTrainedModel) -> dict[int, Tensor]:
    """List a model's parameters and buffers by their identities."""
    return {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}


@torch.no_grad()
def _shapes(model: PreTrainedModel) -> dict[int, tuple[int, int, int]]:
    """Find each layer's heads, and numbers of a key and a value, by reading one token."""
    cache, token = plain_cache(model), torch.zeros((1, 1), dtype=torch.long, device=model.device)
    model(input_ids=token, use_cache=True, **with_cache(model, cache))
    return {
        index: (layer.keys.shape[1], layer.keys.shape[-1], layer.values.shape[-1])
        for index, layer in enumerate(cache.layers)
    }
