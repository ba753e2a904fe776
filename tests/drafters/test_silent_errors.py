"""Errors that raise nothing change a published drafter's logits: comparisons would notice them."""

import pytest
import torch
from layouts import LAYOUTS
from published import TARGET, features_behind


def changed(name, what):
    """A layout with one of the silent errors of the field in it."""
    config, tensors = LAYOUTS[name]()
    what(config)
    return config, tensors


WRONG = {
    "a layer off by one": (
        "z-lab",
        lambda config: config["dflash_config"].update(target_layer_ids=[2, 4, 6]),
    ),
    "inputs taken for outputs": (
        "speculators DFlash",
        lambda config: config.update(aux_hidden_state_layer_ids=[3, 5, 8]),
    ),
    "features in another order": (
        "z-lab",
        lambda config: config["dflash_config"].update(target_layer_ids=[3, 1, 5]),
    ),
    "another anchor": (
        "speculators DSpark",
        lambda config: config.update(sample_from_anchor=False),
    ),
    "no window": (
        "z-lab, sliding",
        lambda config: config.update(layer_types=["full_attention"] * 2),
    ),
    "halves taken for neighbours": ("z-lab", lambda config: config.update(is_neox_style=False)),
    "neighbours taken for halves": (
        "LFM2 DSpark",
        lambda config: config.update(rope_is_neox_style=True),
    ),
    "JetSpec without its order": (
        "JetSpec",
        lambda config: config["dflash_config"].update(causal=False),
    ),
    "a block behind its anchor": ("DeepSpec DSpark", lambda config: config.update(logits_start=1)),
    "another half of the heads": (
        "DeepSpec, Qwen3.5's layers",
        lambda config: config["rope_parameters"].update(rope_theta=20.0),
    ),
    "all of the heads": (
        "DeepSpec, Qwen3.5's layers",
        lambda config: config["rope_parameters"].update(
            partial_rotary_factor=1.0, mrope_section=[2, 1, 1]
        ),
    ),
    "fewer candidates": (
        "z-lab DFlash2",
        lambda config: config["dflash_config"].update(selector_top_k=2),
    ),
    "fewer codes to choose among": (
        "DSpine",
        lambda config: config["dspine_config"].update(top_k=2),
    ),
    "windows that see one way": ("z-lab DFlash2", lambda config: config.update(is_causal=None)),
    "XPress from the anchor": (
        "speculators XPress",
        lambda config: config.update(sample_from_anchor=True),
    ),
    "a causal block": ("z-lab", lambda config: config.update(is_causal=True)),
    "a longer block": ("z-lab", lambda config: config["dflash_config"].update(block_size=6)),
    "the raw state fed back": (
        "speculators EAGLE-3.1",
        lambda config: config.update(norm_output=False),
    ),
    "no cap": (
        "DeepSpec Gemma 4 EAGLE-3",
        lambda config: config.update(final_logit_softcapping=None),
    ),
    "all frequencies": (
        "DeepSpec Gemma 4 DSpark",
        lambda config: config["rope_parameters"]["full_attention"].update(
            partial_rotary_factor=1.0
        ),
    ),
    "another residual": (
        "speculators EAGLE-3",
        lambda config: config.update(norm_before_residual=False),
    ),
}


@pytest.mark.parametrize("error", WRONG)
@torch.no_grad()
def test_silent_errors_change_logits(error, load):
    name, what = WRONG[error]
    right, wrong = load(name, attach=False), load(changed(name, what), attach=False)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])
    rows = []
    for drafter in (right, wrong):
        drafter.attach(TARGET)
        rows.append(
            drafter.draft_logits(ids, features_behind(drafter, TARGET, ids), 3).nan_to_num(
                neginf=-9.0
            )
        )
    assert (rows[0] - rows[1]).abs().max() > 0.05


@torch.no_grad()
def test_features_of_another_position_change_logits(load):
    for name in ("z-lab", "speculators EAGLE-3", "speculators P-EAGLE"):
        drafter = load(name, attach=False)
        drafter.attach(TARGET)
        ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
        features = features_behind(drafter, TARGET, ids)
        rolled = {key: states.roll(1, 1) for key, states in features.items()}
        assert (
            drafter.draft_logits(ids, features, 2) - drafter.draft_logits(ids, rolled, 2)
        ).abs().max() > 0.05


LAST = {
    "speculators DFlash": lambda config: None,
    "z-lab": lambda config: config["dflash_config"].update(target_layer_ids=[1, 3, 7]),
    "speculators EAGLE-3": lambda config: config.update(eagle_aux_hidden_state_layer_ids=[2, 4, 8]),
}


@pytest.mark.parametrize("name", LAST)
@torch.no_grad()
def test_the_normed_last_layer_instead_of_the_raw_one_changes_logits(name, load):
    """The last one of transformers' `hidden_states` is normed, and drafters read what the last
    layer gives.
    """
    drafter = load(changed(name, LAST[name]), attach=False)
    drafter.attach(TARGET)
    assert drafter.features[-1] == 7
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    features = features_behind(drafter, TARGET, ids)
    normed = TARGET(ids, output_hidden_states=True).hidden_states[-1][:, :-1]
    torch.testing.assert_close(TARGET.model.norm(features[7]), normed)
    wrong = {**features, 7: normed}
    assert (
        drafter.draft_logits(ids, features, 3) - drafter.draft_logits(ids, wrong, 3)
    ).abs().max() > 0.05
