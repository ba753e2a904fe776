"""MTP: layers of the target's own class that guess a token after the other (DeepSeek-V3, section
2.2; FastMTP).

Row `t` is `eh_proj [enorm(E[token t + 1]); hnorm(h_t)]`, through one decoder layer and its norm,
and guesses token `t + 2` by the target's head. `h_t` is the target's state after its final norm;
for the next guess it is the layer's own, after its norm too.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import LongTensor, Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ...files import names_folder
from ...hardware import input_device
from ...outer_names import commit_of
from ...protocol import SpeculationConfig
from ..feature_drafter import FeatureDrafter
from ..formats.files import check_size, vocabulary_in, weights_in
from ..formats.folder import DrafterFolder
from ..formats.layout import MTP
from ..layers import decoder_stack, final_norm
from ..reading.reader import Reader
from .config import SAVED, MtpConfig, brought_layers, mtp_layers, unscaled
from .drafting import MtpStep, StepDrafting

PROJECTED = ("enorm", "hnorm", "eh_proj")
NOTHING = (
    "{} brings no MTP layers: `paradraft train mtp` makes one, and `paradraft train --help` names "
    "other drafters."
)


class MtpLayer(nn.Module):
    """One layer, with the projection and norms before and after it.

    Args:
        config: the config of its drafter.
        weights: its weights by names as `mtp_layers` has them; default: random ones.
    """

    def __init__(self, config: MtpConfig, weights: dict[str, Tensor] | None = None):
        super().__init__()
        naming, inner = config.naming, None
        if weights is not None:
            weights = unscaled(weights)
            if naming.hidden_first:  # ours reads the embedding first
                halves = weights["eh_proj.weight"].chunk(2, dim=1)
                weights["eh_proj.weight"] = torch.cat(halves[::-1], dim=1)
            inner = {k: v for k, v in weights.items() if not k.startswith(PROJECTED)}
            if naming.bare:
                inner["norm.weight"] = weights["enorm.weight"]  # for there is none
        self.stack = decoder_stack(config.layer, inner)
        norm = final_norm(self.stack)
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        if naming.bare:
            self.stack.norm = nn.Identity()
        size = config.target.hidden_size
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        if weights is not None:
            for name in PROJECTED:
                getattr(self, name).load_state_dict({"weight": weights[f"{name}.weight"]})
            self.to(weights["eh_proj.weight"].dtype)


class MtpDrafter(FeatureDrafter):
    """MTP layers as `assistant_model` of the target that they belong to.

    Args:
        config: the config of the layers.
        weights: each layer's weights, by names as `mtp_layers` has them; default: one layer of
            random ones.
        vocabulary: int64 `(V',)`, the target's ids that it guesses; default: all.
    """

    kind = "mtp"
    config_class = MtpConfig
    config: MtpConfig
    title = MTP
    saved_names = SAVED
    training_options = "MtpTraining"

    def __init__(
        self,
        config: MtpConfig,
        weights: list[dict[str, Tensor]] | None = None,
        vocabulary: LongTensor | None = None,
    ):
        target = config.target
        super().__init__(config, ("normed",), target.hidden_size, vocabulary)
        self.target_layers = target.num_hidden_layers
        self.layers = nn.ModuleList(MtpLayer(config, layer) for layer in weights or [None])
        self.most_drafts = len(self.layers) if len(self.layers) > 1 else None
        self.speculation_config = SpeculationConfig(
            self.most_drafts or config.num_draft_tokens or 5
        )
        self.eval()

    @property
    def stack(self) -> PreTrainedModel:
        """The first layer."""
        return self.layers[0].stack

    @classmethod
    def from_target(
        cls, target: PreTrainedModel, new: bool | None = False, vocabulary: LongTensor | None = None
    ) -> MtpDrafter:
        """Load a target's own MTP layers, or make a new one, as a drafter attached to the target.

        Args:
            target: a model as it was loaded from a folder or the Hub; its revision is taken.
            new: a new layer instead, which knows nothing; None: where the target brings none.
            vocabulary: int64 `(V',)`, the ids that it guesses; default: all.

        Raises:
            OSError: its files are not there.
            ValueError: they bring no such layers, or some that are not served.
        """
        config, name = target.config.get_text_config(decoder=True), target.name_or_path
        if not new:
            if not name:
                raise ValueError(
                    f"This {type(target).__name__} was not loaded from files, which would bring "
                    "MTP layers."
                )
            brought = brought_layers(name, config, commit_of(target))
            if brought is not None:
                drafter = cls(*brought, vocabulary).to(input_device(target), target.dtype)
                drafter.attach(target)
                return drafter
            if new is False:
                raise ValueError(NOTHING.format(name))
        drafter = cls(MtpConfig(target=config), None, vocabulary).to(target.dtype)
        if getattr(final_norm(drafter.stack), "bias", None) is not None:
            raise ValueError(
                f"A new MTP layer of {type(target).__name__} could not be saved: its norms have "
                "biases, which layouts of MTP layers have no place for."
            )
        return drafter.started_beside(target)

    @classmethod
    @names_folder
    def from_pretrained(cls, repo_or_dir: str | Path, **kwargs: Any) -> MtpDrafter:
        """Load the MTP layers of a target's folder or repository, or a trained one.

        Of a target, only the files that hold the layers are fetched.

        Args:
            repo_or_dir: a target that brings such layers, or a folder in speculators' layout.
            kwargs: arguments of `SavedDrafter.from_pretrained`; `config`: the config of a target
                whose own is not known to transformers.

        Raises:
            OSError: nothing loadable there.
            ValueError: no MTP layers are there.
        """
        hub = {name: kwargs.pop(name, None) for name in ("revision", "token")}
        described, _ = PreTrainedConfig.get_config_dict(repo_or_dir, **hub)
        if "speculators_model_type" in described:
            return super().from_pretrained(repo_or_dir, **kwargs, **hub)
        config = kwargs.pop("config", None) or AutoConfig.from_pretrained(
            repo_or_dir, trust_remote_code=False, **hub
        )
        text = config.get_text_config(decoder=True)
        if (brought := brought_layers(str(repo_or_dir), text, **hub)) is None:
            raise ValueError(NOTHING.format(repo_or_dir))
        wanted = kwargs.pop("speculation_config", None)
        drafter = cls(*brought).configured(**kwargs)
        drafter.speculation_config = wanted or drafter.speculation_config
        return drafter

    @classmethod
    def read_folder(cls, folder: DrafterFolder) -> MtpDrafter:
        """Implement `FeatureDrafter.read_folder`, of speculators' layout."""
        config, tensors = MtpConfig.from_saved(folder.config), weights_in(folder.path)
        if (brought := mtp_layers(tensors, config.target.num_hidden_layers)) is None:
            raise OSError(f"{folder} holds no MTP layer: download it again.")
        check_size(tensors, config.layer)
        config.layout, layers = brought
        return cls(config, layers, vocabulary_in(tensors, config.vocab_size))

    @classmethod
    def details(cls, config: dict[str, Any], names: list[str]) -> list[tuple[str, Any]]:
        """List the facts that its files tell, as (name, value) pairs."""
        target = MtpConfig.from_saved(config).target
        return [
            ("reads", "the normed last state"),
            ("own layers", f"1 × {target.hidden_size} of {target.model_type}"),
            ("guesses", "a token after the other"),
        ]

    @classmethod
    def describe_target(
        cls, config: dict[str, Any], sizes: dict[str, int]
    ) -> list[tuple[str, Any]]:
        """Describe the MTP layers of a target by its config and its tensors' parameter counts.

        The description is empty if it brings none.
        """
        text = config.get("text_config")
        layers = (text if isinstance(text, dict) else config).get("num_hidden_layers")
        if not isinstance(layers, int) or (brought := mtp_layers(sizes, layers)) is None:
            return []
        publisher, layers = brought
        count = sum(size for layer in layers for size in layer.values())
        return [
            ("kind", "a target that brings MTP layers"),
            ("architecture", ", ".join(config.get("architectures") or ["?"])),
            (
                "MTP layers",
                f"{len(layers)}, of {count / 1e6:,.1f} million parameters, named as {publisher}'s",
            ),
            ("use", "MtpDrafter.from_target(target), or --drafter mtp"),
        ]

    def drafting(self, config: SpeculationConfig, max_length: int) -> Reader:
        """Implement `FeatureDrafter.drafting`, by one repeated layer or by one layer a step."""
        steps = [MtpStep(self, layer) for layer in self.layers]
        if len(steps) == 1:
            return Reader(steps[0], config, max_length)
        return StepDrafting(steps, config, max_length)
