"""The target's embedding and head, which drafters share by reference, outside their modules."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import LongTensor, Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..hardware import input_device
from ..notes import notes_on
from .features import Features
from .shortlist import Shortlist, chosen

TOLERANCE = 0.1  # relative to the logits' norm; bf16 is off by a hundredth, another scale by more


def logit_scale(config: PreTrainedConfig) -> float:
    """Compute the factor by which a target multiplies its head's logits, before it caps them.

    Args:
        config: the config of its text model.
    """
    scale = 1.0
    # Cohere's, Falcon H1's, Muse's
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        scale *= getattr(config, name, None) or 1.0
    scaling = getattr(config, "logits_scaling", None) or 1.0
    # Granite divides by the value of this name
    return scale * scaling if config.model_type == "hyperclovax" else scale / scaling


def finished(logits: Tensor, softcap: float | None, scale: float) -> Tensor:
    """Scale and then cap the logits of a head."""
    logits = logits * scale if scale != 1 else logits
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class TargetHead:
    """The target's embedding and head, as the target itself uses them; never saved, moved or cast.

    Args:
        target: the model; unless it is offloaded, it reads a few tokens, once, to check that its
            logits are made in a known way.
        vocabulary: int64 `(V',)`, the ids whose rows of the head are wanted; None: all. Rows are
            gathered once where the head is an ordinary matrix; another one (quantised, offloaded)
            gives all logits, of which these are taken.
        shortlist: a choice of the tokens whose logits are computed, where that is faster; the
            others' are -inf.

    Raises:
        ValueError: the target has no embedding or no head, or its logits are made in a way that is
            not known.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        vocabulary: LongTensor | None = None,
        shortlist: Shortlist | None = None,
    ):
        config = target.config.get_text_config()
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        if embedding is None or head is None:
            raise ValueError(
                f"{type(target).__name__} has no embedding or no head that a drafter could share."
            )
        self.embedding, self.head, self.vocabulary = embedding, head, vocabulary
        self.device = input_device(target)  # for parts whose weights are elsewhere
        self.multiplier = getattr(config, "embedding_multiplier", None) or 1.0  # Granite's
        self.scale = logit_scale(config)
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.gathered: tuple[Tensor, Tensor, Tensor | None] | None = (
            None  # the head's weight; its wanted rows, and their bias
        )
        self.version = 0  # of the head's weight, which an optimiser's step changes
        self.shortlist = shortlist
        self.steps: tuple[Tensor, Tensor] | None = None  # the shortlist's, for these rows
        self.gathers = vocabulary is not None and type(head) is torch.nn.Linear
        if self.gathers and int(vocabulary.max()) >= len(head.weight):
            raise ValueError(
                f"The drafter guesses ids up to {int(vocabulary.max())}, and the target has "
                f"{len(head.weight)}."
            )
        self._check(target)

    @torch.no_grad()
    def _check(self, target: PreTrainedModel) -> None:
        """Compare logits of states with those that the target gives itself."""
        if "known head" in notes_on(target) or any(
            parameter.is_meta for parameter in target.parameters()
        ):
            return
        ids = torch.arange(min(4, len(self.embedding.weight)), device=self.device)[None]
        with Features(target, ("normed",)) as features:
            theirs = target.forward(
                input_ids=ids, use_cache=False
            ).logits.float()  # no hook of the caller's sees it
            ours = (
                self.finished(self._all_logits(features.rows["normed"])).float().to(theirs.device)
            )
        size = min(ours.shape[-1], theirs.shape[-1])
        if (ours[..., :size] - theirs[..., :size]).norm() > TOLERANCE * theirs[..., :size].norm():
            raise ValueError(
                f"{type(target).__name__} makes its logits of its last states in a way that is not "
                "known here (a scale, or something between norm and head): a drafter that shares "
                "its head cannot be served."
            )
        notes_on(target)["known head"] = True

    def embed(self, ids: LongTensor, raw: bool = False) -> Tensor:
        """Compute embeddings `(…, hidden)` as the target's first layer reads them.

        Ids that the target does not have count as 0.

        Args:
            ids: int64 `(…,)`.
            raw: whether to return the table's own rows, without a scale of the target's.
        """
        # adapters do not change the number of rows
        ids = ids.where((ids >= 0) & (ids < len(self.embedding.weight)), 0)
        if raw:
            with align_module_device(self.embedding):  # an offloaded target's is fetched
                table = self.embedding.weight
                return torch.nn.functional.embedding(ids.to(table.device), table)
        return self.embedding(ids.to(self._device_of(self.embedding))) * self.multiplier

    @property
    def is_plain(self) -> bool:
        """Whether the target neither scales its embedding nor scales or caps its logits."""
        first = torch.zeros(1, dtype=torch.long, device=self.device)
        return (
            self.softcap is None
            and self.scale == 1
            and torch.equal(self.embed(first), self.embed(first, raw=True))
        )

    def logits(
        self,
        states: Tensor,
        softcap: float | None = None,
        scale: float | None = None,
        raw: bool = False,
    ) -> Tensor:
        """Compute logits `(…, V')` of normed states `(…, hidden)`; the rest as in `finished`."""
        # with a slice torch multiplies each sequence by a copy of the head, a hundred times slower
        states = states.contiguous()
        if self.gathers and not self.head.weight.is_meta:
            rows, bias = self._rows(self.head.weight)
            if self.shortlist is not None and self.shortlist.serves(states):
                self.steps = self.steps or self.shortlist.steps(rows)
                ids, logits = chosen(states.to(rows).flatten(0, -2), self.steps, rows, bias)
                others = logits.new_full((len(logits), len(rows)), -torch.inf)
                return others.scatter_(1, ids, self.finished(logits, softcap, scale, raw)).view(
                    *states.shape[:-1], -1
                )
            logits = torch.nn.functional.linear(states.to(rows), rows, bias)
        else:
            logits = self._all_logits(states)
            if self.vocabulary is not None:
                logits = logits[..., self.vocabulary.to(logits.device)]
        return self.finished(logits, softcap, scale, raw)

    def _all_logits(self, states: Tensor) -> Tensor:
        """Run the head itself: logits `(…, V)`."""
        weight = getattr(self.head, "weight", None)  # packed ones have none
        floating = isinstance(weight, Tensor) and weight.is_floating_point()
        return self.head(
            states.to(self._device_of(self.head), weight.dtype if floating else states.dtype)
        )

    def _rows(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gather the wanted rows of an ordinary head, and their bias.

        They are gathered anew where the head was moved, cast, trained or replaced.
        """
        before, version = self.gathered, 0 if weight.is_inference() else weight._version
        if (
            before is None
            or before[0] is not weight
            or (before[1].device, before[1].dtype) != (weight.device, weight.dtype)
        ):
            wanted, bias = self.vocabulary.to(weight.device), self.head.bias
            with torch.inference_mode(False):  # they outlive this call, and are trained with
                # CUDA graphs copy tensors that are not parameters
                rows = torch.nn.Parameter(weight.detach()[wanted], requires_grad=False)
            self.steps = None
            self.gathered = (weight, rows, None if bias is None else bias.detach()[wanted])
            self.version = version
        # the target was trained on; CUDA graphs know the place of these rows
        elif self.version != version:
            wanted, self.version, self.steps = self.vocabulary.to(weight.device), version, None
            before[1].data.copy_(weight.detach()[wanted])
            if before[2] is not None:
                before[2].copy_(self.head.bias.detach()[wanted])
        return self.gathered[1:]

    def _device_of(self, part: torch.nn.Module) -> torch.device:
        """Look up the device that a part's inputs belong on."""
        tensors = (*part.parameters(), *part.buffers())
        return next((tensor.device for tensor in tensors if not tensor.is_meta), self.device)

    def finished(
        self,
        logits: Tensor,
        softcap: float | None = None,
        scale: float | None = None,
        raw: bool = False,
    ) -> Tensor:
        """Scale and then cap the logits of a head.

        Args:
            logits: the raw logits of a head.
            softcap, scale: the values to use instead of the target's.
            raw: whether to leave the target's out where none is given.
        """
        return finished(
            logits,
            softcap or (None if raw else self.softcap),
            scale or (1.0 if raw else self.scale),
        )

    def __deepcopy__(self, memo: Any) -> TargetHead:
        return self

    def __reduce__(self) -> tuple:
        return _nothing, ()


def _nothing() -> None:
    """Return None, which stands for the target in a pickled drafter."""
