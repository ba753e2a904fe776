"""A published layout: how a publisher's config describes a drafter, and what its tensors are
called.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedConfig

from ...protocol.drafter import FeatureKey
from .keys import check_keys, layers_config, with_draft_layers

# the titles of published kinds
DFLASH, DFLASH2, XPRESS = "DFlash drafter", "DFlash2 drafter", "XPress drafter"
DSPARK, DSPINE = "DSpark drafter", "DSpine drafter"
EAGLE3, PEAGLE, MTP = "EAGLE-3 drafter", "P-EAGLE drafter", "MTP drafter"
PARD2 = "PARD-2 drafter"


class OwnFields(PreTrainedConfig):
    """A config of its own fields and those that transformers writes with each, and no others."""

    has_no_defaults_at_init = True

    def __post_init__(self, **kwargs: Any) -> None:
        if unknown := kwargs.keys() - PreTrainedConfig().to_dict().keys():
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}.")
        super().__post_init__(**kwargs)


class DrafterConfig(OwnFields):
    """The fields of a drafter's config, which layouts fill in.

    These are the fields that the families have in common.

    Attributes:
        layers: the config of its own transformer layers.
        in_pairs: the file's rotary embedding turns neighbours; the loaded layers turn halves, as
            `neighbours_to_halves` has it.
        target_hidden_size: d_t.
        target_layers: L, if the file says so.
        vocab_size: V of the target.
        draft_vocab_size: V', if it is smaller.
        softcap, logit_scale: cap and scale of its logits, instead of the target's.
        raw_target: the target's table and head are used as they are, without the target's own
            scales and cap.
        layout: the publisher whose layout it is.
        notes: assumptions made in reading, as (name, value) pairs for people.
    """

    layers: PreTrainedConfig
    target_hidden_size: int
    vocab_size: int
    in_pairs: bool = False
    target_layers: int | None = None
    draft_vocab_size: int | None = None
    softcap: float | None = None
    logit_scale: float | None = None
    raw_target: bool = False
    layout: str = "speculators"
    notes: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Layout:
    """A publisher's way to write the drafters of a family.

    Attributes:
        name: the publisher's name, for people.
        when: tells whether a config is written so; of a family's layouts the first one that says so
            counts.
        fields: the fields of the drafter's config, each a value, or a function of `Said` that gives
            it. They are read in this order.
        part: the part of the config that is looked into before its top, as "dflash_config"; "" for
            none.
        described: finds the part of the config that describes layers.
        layer_names: the publisher's names of the keys that describe layers, and transformers' own.
        classes: classes that its configs name, and the titles of their kinds.
        tensors: beginnings of tensors' names that the family's layouts before it do not have, and
            ours.
    """

    name: str
    when: Callable[[Mapping[str, Any]], bool]
    fields: Mapping[str, Any]
    part: str = ""
    described: Callable[[Mapping[str, Any]], Mapping[str, Any]] = with_draft_layers
    layer_names: Mapping[str, str] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)

    def read(self, config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
        """Read the fields of a drafter's config from its files.

        Args:
            config: the config as it was read.
            names: our names of the folder's tensors.

        Raises:
            ValueError: something is missing that may not be assumed, a variant that is not served,
                or a key that nothing obeys.
        """
        said = Said(self, config, names)
        values = {
            name: value(said) if callable(value) else value for name, value in self.fields.items()
        }
        check_keys(said)
        return {"layout": self.name, **values}


@dataclass
class Said:
    """A folder's word on its drafter; keys that were asked for are obeyed, where they stand.

    Attributes:
        layout: the layout in which it is written.
        config: the config as it was read.
        names: our names of the folder's tensors.
        asked: the keys that were asked for, by the part in which: "" is the top.
    """

    layout: Layout
    config: Mapping[str, Any]
    names: Collection[str]
    asked: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def __call__(self, *keys: str, default: Any = None) -> Any:
        """Look up the first of some keys that is said, in the layout's own part or at the top."""
        values = [self.only(part, *keys) for part in dict.fromkeys((self.layout.part, ""))]
        return next((value for value in values if value is not None), default)

    def only(self, part: str, *keys: str) -> Any:
        """Look up the first of some keys that is said in one part of the config.

        The part "" is its top. None: none of the keys is said there.
        """
        self.asked[part].update(keys)
        said = (self.config.get(part) or {}) if part else self.config
        return next((said[key] for key in keys if said.get(key) is not None), None)

    @cached_property
    def described(self) -> Mapping[str, Any]:
        """The part of the config that describes layers, by transformers' names."""
        names = self.layout.layer_names
        described = self.layout.described(self.config)
        return {names.get(name, name): value for name, value in described.items()}

    @cached_property
    def layers(self) -> PreTrainedConfig:
        """The config of the drafter's own layers."""
        return layers_config(self.described, self.names)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of attention that its layers have."""
        return tuple(dict.fromkeys(getattr(self.layers, "layer_types", None) or ["full_attention"]))

    def has(self, beginning: str) -> bool:
        """Tell whether there is a tensor whose name begins so."""
        return any(name.startswith(beginning) for name in self.names)


def architecture(config: Mapping[str, Any]) -> str:
    """Look up the first class that a config names; "" for none."""
    return str((config.get("architectures") or [""])[0])


def proposed_tokens(config: Mapping[str, Any]) -> int | None:
    """Look up how many tokens engines are told to draft."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or []
    return next((method.get("speculative_tokens") for method in methods), None)


def key(*keys: str, default: Any = None) -> Callable[[Said], Any]:
    """Make a field that reads the first of some keys.

    `default` also stands for 0 and False.
    """
    return lambda said: said(*keys) or default


def outputs(
    *keys: str, offset: int = 0, needed: bool = False
) -> Callable[[Said], tuple[FeatureKey, ...] | None]:
    """Make a field that turns a file's numbers of layers into feature keys.

    Args:
        keys: the names that the numbers may have.
        offset: is added to the numbers, which count outputs then.
        needed: whether there have to be numbers; else None stands for none.

    Raises:
        ValueError: there have to be numbers, or a number is below the first one.
    """

    def read(said: Said) -> tuple[FeatureKey, ...] | None:
        if not (ids := said(*keys)):
            if needed:
                raise ValueError(
                    f"This {said.layout.name} drafter names no layers ({keys[0]}), and there is no "
                    "default: save or download it again."
                )
            return None
        if min(ids) + offset < -1:
            raise ValueError(
                f"The drafter's layer list is {ids}, which counts from {-1 - offset}: save or "
                "download it again."
            )
        return tuple(index + offset for index in ids)

    return read
