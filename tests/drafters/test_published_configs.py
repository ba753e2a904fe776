"""What a published folder may not hold or say, and what publishers really write."""

import copy

import pytest
import torch
from layouts import LAYOUTS, write
from layouts.blocks import zlab
from layouts.eagle import safeai
from layouts.parts import DRAFTED, LAYERS, TABLES, D, V
from tiny import tiny_model

import hf_paradraft
from hf_paradraft.drafters.formats.fields import BLOCKS
from hf_paradraft.drafters.formats.layout import DFLASH, Layout, key, outputs
from hf_paradraft.drafters.mtp.config import MtpConfig


def without(name, *tensors, config=None):
    made, weights = LAYOUTS[name]()
    return {**made, **(config or {})}, {
        key: value for key, value in weights.items() if key not in tensors
    }


def with_tensors(name, **tensors):
    config, weights = LAYOUTS[name]()
    return config, {**weights, **{key.replace("__", "."): value for key, value in tensors.items()}}


REFUSED = {
    "lacks 1 of its weights": (lambda: without("z-lab", "norm.weight"), OSError),
    "no place in it": (lambda: with_tensors("z-lab", aux__weight=torch.zeros(2)), ValueError),
    "fc reads 96 numbers": (lambda: zlab({"target_layer_ids": [1, 3]}), ValueError),
    "fc reads 96 numbers, and 2": (
        lambda: without("speculators EAGLE-3", config={"eagle_aux_hidden_state_layer_ids": [1, 2]}),
        ValueError,
    ),
    "no table of offsets": (
        lambda: with_tensors("speculators EAGLE-3", d2t=torch.tensor(DRAFTED)),
        ValueError,
    ),
    "d2t and t2d": (
        lambda: with_tensors("SafeAI", t2d=torch.ones(V, dtype=torch.bool)),
        ValueError,
    ),
    "has no table of them": (lambda: without("speculators DFlash", "d2t", "t2d"), OSError),
    "names no mask token": (lambda: zlab({"mask_token_id": None}), ValueError),
    "config names no mask": (
        lambda: without("speculators P-EAGLE", config={"mask_token_id": None}),
        ValueError,
    ),
    "no layers \\(aux_hidden": (
        lambda: without("speculators DFlash", config={"aux_hidden_state_layer_ids": None}),
        ValueError,
    ),
    "neither its layers": (
        lambda: without("z-lab, default layers", config={"num_target_layers": None}),
        ValueError,
    ),
    "interleaved rotary embedding": (
        lambda: without("DeepSpec Gemma 4 DSpark", config={"rope_is_neox_style": False}),
        ValueError,
    ),
    "dflash_config.attention_sink_bias = True, a variant": (
        lambda: zlab({"attention_sink_bias": True}),
        ValueError,
    ),
    "log_snr_conditioning = True": (
        lambda: without("DeepSpec DSpark", config={"log_snr_conditioning": True}),
        ValueError,
    ),
    "eagle_config.use_mtp_layernorm = True": (
        lambda: safeai(eagle_config={"use_mtp_layernorm": True}),
        ValueError,
    ),
    "Domino": (lambda: zlab({"projector_type": "domino"}), ValueError),
    "its config asks for \\(64, 32\\)": (
        lambda: without("DeepSpec DSpark", config={"architectures": ["Qwen35DSparkModel"]}),
        ValueError,
    ),
    "LiLiCorr": (lambda: zlab(architectures=["LiLiCorrDraftModel"]), ValueError),
    "projector_type = 'domino'": (
        lambda: without("DeepSpec DSpark", config={"projector_type": "domino"}),
        ValueError,
    ),
    "selector_rank=None, and the tensors": (
        lambda: with_tensors("z-lab", candidate_selector__predecessor_codebook=torch.zeros(2)),
        ValueError,
    ),
    "names no xpress_rank": (
        lambda: without("speculators DFlash", config={"speculators_model_type": "xpress"}),
        ValueError,
    ),
    "names no selector_rank": (
        lambda: without("speculators DFlash", config={"speculators_model_type": "dflash2"}),
        ValueError,
    ),
    "xpress_rank=None, and the tensors": (
        lambda: without("XPress", config={"xpress_rank": None}),
        ValueError,
    ),
    "groups of 5 channels": (
        lambda: without("speculators DFlash2", config={"conv_group_size": 5}),
        ValueError,
    ),
    "among all of its target's tokens": (
        lambda: (
            {**LAYOUTS["speculators DFlash2"]()[0], "draft_vocab_size": len(DRAFTED)},
            {**LAYOUTS["speculators DFlash2"]()[1], **TABLES},
        ),
        ValueError,
    ),
    "Gemma 4 with experts": (
        lambda: without("DeepSpec Gemma 4 DSpark", config={"enable_moe_block": True}),
        ValueError,
    ),
    "inputs for each layer": (
        lambda: without("DeepSpec Gemma 4 EAGLE-3", config={"hidden_size_per_layer_input": 16}),
        ValueError,
    ),
    "markov_rank=0": (lambda: without("speculators DSpark", config={"markov_rank": 0}), ValueError),
    "no block_size": (lambda: zlab({"block_size": None}), ValueError),
    "use_aux_hidden_state": (
        lambda: safeai(eagle_config={"use_aux_hidden_state": False}),
        ValueError,
    ),
    "obeys: output_multiplier": (lambda: zlab(output_multiplier=2.0), ValueError),
    "obeys: input_embedding_scale": (lambda: zlab(input_embedding_scale=2.0), ValueError),
    "obeys: final_logit_softcapping": (lambda: zlab(final_logit_softcapping=2.0), ValueError),
    "dflash_config.use_aux_hidden_state = False": (
        lambda: zlab({"use_aux_hidden_state": False}),
        ValueError,
    ),
    "use_sliding_window false": (
        lambda: zlab(
            layer_types=["sliding_attention"] * 2, sliding_window=7, use_sliding_window=False
        ),
        ValueError,
    ),
    "windows of 3 tokens, shorter": (
        lambda: zlab({"use_swa": True, "swa_window_size": 3}),
        ValueError,
    ),
    "norm_before_fc=False": (
        lambda: without("speculators EAGLE-3, gpt-oss", config={"norm_before_fc": False}),
        ValueError,
    ),
    "fc_norm=False": (
        lambda: without("speculators EAGLE-3.1", config={"fc_norm": False}),
        ValueError,
    ),
    "EAGLE-1 or EAGLE-2": (
        lambda: ({"architectures": ["X"]}, {"fc.weight": torch.zeros(D, 2 * D)}),
        ValueError,
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_folders_are_refused_on_loading(message, load):
    made, error = REFUSED[message]
    with pytest.raises(error, match=message):
        load(made(), attach=False)


def test_keys_that_count_are_obeyed_where_their_publisher_reads_them(load):
    """JetSpec's causal head; and z-lab's windows on layers that are said to be full, as vLLM has
    it.
    """
    assert load(zlab({"causal_head": True}), attach=False).config.causal == ("full_attention",)
    swa = load(
        zlab({"use_swa": True, "swa_window_size": 7}, layer_types=["full_attention"] * 2),
        attach=False,
    )
    assert swa.windows == {"sliding_attention": 7}
    assert swa.config.causal == ()


ACME = Layout(
    "Acme",
    when=lambda config: "acme" in config,
    fields={
        **BLOCKS,
        "features": outputs("taps", offset=-1),
        "block_size": key("rows"),
        "fill_in": True,
    },
    part="acme",
    layer_names={"width": "hidden_size"},
    classes={"AcmeBlocks": DFLASH},
    tensors={"mixer.": "fc."},
)


def test_a_layout_is_one_object(monkeypatch, load):
    """As docs/add-a-drafter.md has it: the drafter is z-lab's, word for word in another's words."""
    layouts = (ACME, *hf_paradraft.DFlashDrafter.layouts)
    monkeypatch.setattr(hf_paradraft.DFlashDrafter, "layouts", layouts)
    monkeypatch.setattr("hf_paradraft.drafters.formats.folder.BLOCK_LAYOUTS", layouts)
    made, tensors = zlab(architectures=["AcmeBlocks"])
    tensors["mixer.weight"] = tensors.pop("fc.weight")
    nested = made.pop("dflash_config")
    acme = {
        "rows": nested["block_size"],
        "taps": [2, 4, 6],
        "mask_token_id": nested["mask_token_id"],
    }
    made["width"] = made.pop("hidden_size")
    drafter, same = load(({**made, "acme": acme}, tensors)), load("z-lab")
    ids, features = torch.arange(9)[None], {key: torch.randn(1, 8, D) for key in same.features}
    assert (drafter.features, drafter.config.layout) == (same.features, "Acme")
    assert torch.equal(drafter.draft_logits(ids, features), same.draft_logits(ids, features))
    with pytest.raises(ValueError, match=r"that nothing here obeys: acme\.turns = 3"):
        load(({**made, "acme": {**acme, "turns": 3}}, tensors))


SPECULATORS_MTP = {
    "speculators_model_type": "mtp",
    "transformer_layer_config": tiny_model("llama").config.to_dict(),
}

CONFIGS = {**{name: LAYOUTS[name]()[0] for name in LAYOUTS}, "speculators MTP": SPECULATORS_MTP}

READERS = {
    "dflash": hf_paradraft.DFlashDrafter.read_config,
    "eagle3": hf_paradraft.Eagle3Drafter.read_config,
    "mtp": lambda config, _: MtpConfig.from_saved(config),
}


def read(name, config):
    tensors = LAYOUTS[name]()[1] if name in LAYOUTS else ()
    kind = (
        "mtp"
        if name not in LAYOUTS
        else "eagle3"
        if "EAGLE" in name or name.startswith(("SafeAI", "NVIDIA"))
        else "dflash"
    )
    return READERS[kind](config, tensors)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("value", [1, 0.5, True, False, "x", [1], {"a": 1}])
def test_a_made_up_key_is_refused_by_name_wherever_it_stands(name, value):
    read(name, {**CONFIGS[name], "made_up": None})
    parts = [
        part
        for part in (
            "dflash_config",
            "dspine_config",
            "eagle_config",
            "rope_parameters",
            "rope_scaling",
        )
        if part in CONFIGS[name]
    ]
    parts += (
        ["transformer_layer_config"]
        if "transformer_layer_config" in CONFIGS[name] and name in LAYOUTS
        else []
    )
    for part in (None, *parts):
        config = copy.deepcopy(CONFIGS[name])
        where = "made_up" if part is None else f"{part}.made_up"
        (config if part is None else config[part])["made_up"] = value
        if part == "rope_parameters" and isinstance(config[part].get("full_attention"), dict):
            config[part]["full_attention"]["made_up"] = config[part].pop("made_up")
        with pytest.raises(
            ValueError, match=f"that nothing here obeys: {where} = .* pass ignore_keys="
        ):
            read(name, config)


def test_a_key_that_makes_no_difference_can_be_said_to(tmp_path):
    config, tensors = LAYOUTS["z-lab"]()
    config["dflash_config"]["note"] = "hello"
    folder = write(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=r"ignore_keys=\['note'\]"):
        hf_paradraft.AutoDrafter.from_pretrained(folder)
    assert hf_paradraft.AutoDrafter.from_pretrained(folder, ignore_keys=["note"]).features == (
        1,
        3,
        5,
    )
    assert hf_paradraft.DFlashDrafter.from_pretrained(
        folder, ignore_keys=["dflash_config.note"]
    ).features == (1, 3, 5)


COPIED = {
    "hidden_act": "silu",
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
}

PUBLISHED = {
    "NVIDIA": {
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True,
            "use_last_layernorm": True,
            "use_input_layernorm_in_first_layer": True, "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
        },
        "mlp_bias": False, "pretraining_tp": 1, "initializer_range": 0.02, "bos_token_id": 1,
        "eos_token_id": [2, 3],
    },
    "SafeAI": {"use_cache": True, "torch_dtype": "float16", "transformers_version": "4.47.0",
    "pad_token_id": 0},
    "z-lab": {
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "max_window_layers": 2,
        "attention_dropout": 0.0,
        "dtype": "bfloat16", "rope_scaling": None, "target_hidden_size": None,
        "sliding_window": None,
        "use_sliding_window": False, "_name_or_path": "x",
    },
    "SpecForge "
    "DSpark": {"dflash_config": {**LAYOUTS["SpecForge DSpark"]()[0]["dflash_config"],
    "attention_mode": "gqa",
        "confidence_head_alpha": 1.0, "pure_draft_prefix_len": 1, "shift_label": False}},
    "DeepSpec "
    "DSpark": {**COPIED, "model_type": "qwen3_5_text", "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16},
    "DeepSpec "
    "EAGLE-3": {"target_model_name_or_path": "Qwen/Qwen3-4B", "step_loss_decay": 0.8,
    "_attn_implementation": "sdpa"},
    "DeepSpec Gemma 4 "
    "DSpark": {"target_model_type": "gemma4", "target_text_model_type": "gemma4_text",
    "num_anchors": 512},
    "speculators "
    "EAGLE-3": {"embed_requires_grad": False, "norm_before_fc": False,
    "speculators_version": "0.9.0"},
    "speculators "
    "DSpark": {"max_anchors": 3072, "num_target_layers": LAYERS, "torch_dtype": "bfloat16"},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_publishers_really_write_is_understood(name):
    """As their packages write it, and as configs copied from a target's say of that."""
    assert read(name, {**CONFIGS[name], **PUBLISHED[name]}).layers.hidden_size == D
