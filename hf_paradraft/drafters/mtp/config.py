"""The config of an MTP drafter: layers of its target's own class."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ...outer_names import experts_of
from ..formats.fields import proposed_tokens
from ..formats.keys import check_described
from ..formats.speculators import layer_config
from ..formats.values import transformers_config
from ..layers import describe_layers


class MtpConfig(PreTrainedConfig):
    """MTP layers.

    Attributes:
        target: the text config of the target that they belong to.
        num_layers: D. One layer guesses at every step; of several, each at its own.
        hidden_first: the projection reads `[state; embedding]` instead of `[embedding; state]`.
        bare: the layers have no experts, whatever the target has, and no norm stands after them.
        num_draft_tokens: K as trained, if it is written.
        layout: the publisher whose names the tensors had.
    """

    has_no_defaults_at_init = True

    target: PreTrainedConfig
    num_layers: int = 1
    hidden_first: bool = False
    bare: bool = False
    num_draft_tokens: int | None = None
    layout: str = "speculators"

    @property
    def vocab_size(self) -> int:
        """V, of the target."""
        return self.target.vocab_size

    @property
    def layer(self) -> PreTrainedConfig:
        """Make the config of one layer, as transformers has it.

        Raises:
            ValueError: the target has no layers of ordinary attention.
        """
        described = describe_layers(self.target, 1, dense=self.bare)
        experts = experts_of(self.target)  # by which kernel the target runs its own
        return transformers_config(
            AutoConfig.for_model, {**described, "experts_implementation": experts}
        )


def mtp_config(config: Mapping[str, Any]) -> MtpConfig:
    """Read a `config.json` of speculators' MTP folders.

    Raises:
        ValueError: it describes no layers, or several, or has a key that nothing obeys.
    """
    described = layer_config(config)
    check_described(config, {"num_nextn_predict_layers", "draft_vocab_size"})
    if (count := config.get("num_nextn_predict_layers", 1)) != 1:
        raise ValueError(f"An MTP folder has one layer, and this one speaks of {count}.")
    values = copy.deepcopy(dict(described))
    return MtpConfig(
        target=transformers_config(AutoConfig.for_model, values),
        num_draft_tokens=proposed_tokens(config),
    )
