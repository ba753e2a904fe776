"""Tiny random drafters of blocks in every published layout: DFlash, DSpark and their relatives."""

import torch

from .parts import (
    DRAFTED,
    G4,
    HD,
    HEADS,
    LAYERS,
    MASK,
    OWN,
    SIZES,
    TABLES,
    D,
    V,
    body,
    fill,
    gemma4_layer,
    markov,
)


def zlab(nested=None, **config):
    options = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": LAYERS,
    }
    dflash = {
        "block_size": 5,
        "target_layer_ids": [1, 3, 5],
        "mask_token_id": MASK,
        **(nested or {}),
    }
    return {**SIZES, **options, "dflash_config": dflash, **config}, body(2, 3)


def with_keys(layout, **keys):
    config, tensors = layout
    return {**config, **keys}, tensors


def zlab_default():
    config, _ = zlab()
    config = {**config, "block_size": 5}
    config["dflash_config"] = {"mask_token_id": MASK}
    return config, body(2, 2)


def zlab_sliding():
    return zlab(
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=7,
        use_sliding_window=True,
    )


def zlab_swa():
    return zlab({"use_swa": True, "swa_window_size": 7})


def zlab_causal():
    return zlab(is_causal=True)


def specforge_dspark():
    config, _ = zlab(
        {
            "projector_type": "dspark",
            "markov_rank": 4,
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
        }
    )
    return {**config, "architectures": ["DFlashDraftModel"]}, body(
        2, 3, markov(4, "vanilla", prefix="logit_head").items()
    )


def lfm2_dspark():
    """LiquidAI's: a DSpark by its name and heads, whose rotary embedding turns neighbours."""
    nested = {
        "target_layer_ids": [1, 3, 5],
        "mask_token_id": MASK,
        "num_target_layers": LAYERS,
        "block_size": None,
    }
    config, _ = zlab(
        nested,
        architectures=["Lfm2DSparkDraftModel"],
        block_size=5,
        rope_is_neox_style=False,
        markov_rank=4,
    )
    config |= {
        "num_target_layers": None,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
    }
    heads = markov(4, "vanilla", confidence=True)
    return {**config, "confidence_head_with_markov": True, "has_lm_head": False}, body(
        2, 3, heads.items()
    )


def jetspec():
    return zlab({"causal": True})


def deepspec(rank=4, kind="vanilla", confidence=True):
    config = {
        **SIZES,
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": LAYERS,
        "block_size": 4,
        "mask_token_id": MASK,
        "target_layer_ids": [-1, 2, 6],
        "markov_rank": rank,
        "markov_head_type": kind,
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": bool(confidence),
        "num_anchors": 512,
        "tie_word_embeddings": False,
    }
    heads = markov(rank, kind, confidence=confidence) if rank else {}
    return config, body(2, 3, {**OWN, **heads}.items())


SPECULATORS = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}
SPECULATORS |= {"dflash2": "DFlash2DraftModel", "xpress": "XPressSpeculator"}


def speculators(kind="dflash", trimmed=True, **config):
    sliding = config.pop("sliding", False)
    layers = {**SIZES, "model_type": "qwen3", "num_hidden_layers": 2}
    if sliding:
        layers |= {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 7,
            "use_sliding_window": True,
            "max_window_layers": 2,
        }
    options = {
        "speculators_model_type": kind,
        "architectures": [SPECULATORS[kind]],
        "transformer_layer_config": layers,
        "aux_hidden_state_layer_ids": [2, 4, 8],
        "block_size": 5,
        "mask_token_id": MASK,
        "draft_vocab_size": len(DRAFTED) if trimmed else V,
        "sample_from_anchor": kind == "dspark",
    }
    extra = {"lm_head.weight": (len(DRAFTED), D)} if trimmed else {}
    if kind == "dspark":
        options |= {
            "markov_rank": 4,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        options |= config
        guesses = len(DRAFTED) if trimmed else V
        extra |= markov(4, options["markov_head_type"], guesses, confidence=True)
    if kind == "dflash2":
        options |= SELECTED
        extra |= {**convolutions(), **selector()}
    if kind == "xpress":
        options |= {"xpress_rank": 4, "xpress_mlp_ratio": 2, "num_jacobi_passes": 6}
        names = (
            "token_embed.weight",
            "readout.weight",
            "mix_l",
            "mlp_gate.weight",
            "mlp_up.weight",
            "mlp_down.weight",
        )
        extra |= refiner("refiner_head", names, len(DRAFTED) if trimmed else V)
    return {**options, **config}, {**body(2, 3, extra.items()), **(TABLES if trimmed else {})}


def qwen35_dspark():
    """DeepSpec's for Qwen3.5: queries bring a gate, norms are offsets from one, half of each head
    turns.
    """
    config, tensors = deepspec()
    tensors = {
        name: tensor - 1 if name.endswith("norm.weight") else tensor
        for name, tensor in tensors.items()
    }
    for index in range(2):
        tensors[f"layers.{index}.self_attn.q_proj.weight"] = fill(
            {"q": (2 * HEADS * HD, D)}, 5 + index
        )["q"]
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
    }
    config = {name: value for name, value in config.items() if name != "rope_theta"}
    gated = {
        "architectures": ["Qwen35DSparkModel"],
        "model_type": "qwen3_5",
        "enable_qwen35_gated_q_proj": True,
    }
    return {**config, **gated, "rope_parameters": rope}, tensors


def minicpm5_dspark():
    """OpenBMB's: DeepSpec's with the target's tables, and a vocabulary that says it is whole."""
    config, tensors = deepspec()
    tables = ("embed_tokens.weight", "lm_head.weight")
    said = {
        "projector_type": "dspark",
        "draft_vocab_size": V,
        "auto_map": {"AutoModel": "modeling.Qwen3DSparkModel"},
    }
    return {**config, **said}, {
        name: tensor for name, tensor in tensors.items() if name not in tables
    }


def convolutions():
    """DFlash2's in two layers, of two taps, four channels sharing a kernel."""
    shapes = {}
    for conv in (
        f"layers.{index}.{part}_conv" for index in range(2) for part in ("attention", "mlp")
    ):
        shapes |= {
            f"{conv}.base_kernel": (2, 2, D),
            f"{conv}.kernel_projection.weight": (2 * 2 * D // 4, D),
        }
    return shapes


def selector(rank=4):
    shapes = {
        f"candidate_selector.{name}_codebook": (V, rank) for name in ("predecessor", "successor")
    }
    return {**shapes, "candidate_selector.hidden_projection.weight": (rank, D)}


SELECTED = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 6}


def zlab_dflash2():
    """All of its windows see both ways."""
    windows = {
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 7,
        "use_sliding_window": True,
        "is_causal": False,
    }
    nested = {**SELECTED, "final_logit_softcapping": 4.0, "output_multiplier": 0.5}
    config, _ = zlab(nested, architectures=["DFlash2DraftModel"], **windows)
    return config, body(2, 3, {**convolutions(), **selector()}.items())


def dspine():
    """SpecForge's: DFlash's tensors, messages after each layer, and a table of codes."""
    rank, size = 6, 5
    config, _ = zlab(architectures=["DSpineDraftModel"], is_causal=True)
    config["dspine_config"] = {
        "transfer_rank": rank,
        "message_size": size,
        "top_k": 6,
        "ce_weight": 0.1,
        "replacement_layers": 3,
    }
    shapes = {f"injection.readouts.{index}.weight": (rank, D) for index in range(2)}
    shapes |= {f"injection.writes.{index}.weight": (D, size) for index in range(2)}
    gates = ("message", "receiver_gate", "predecessor_gate")
    shapes |= {f"injection.{name}.weight": (size, rank) for name in gates} | {
        "injection.bias": (size,)
    }
    tensors = body(2, 3, {**shapes, "transfer_codes": (V, rank)}.items())
    codes = tensors["transfer_codes"]
    return config, {
        **tensors,
        "transfer_codes": codes / codes.norm(dim=-1, keepdim=True),
        "transfer_ready": torch.tensor(True),
    }


def refiner(prefix, names, guesses=V, rank=4):
    shapes = (
        (V, rank),
        (guesses, rank),
        (rank, 5, 5),
        (2 * rank, rank),
        (2 * rank, rank),
        (rank, 2 * rank),
    )
    linear = {"down_h": (rank, D), "down_g": (rank, D), "in_proj": (rank, 3 * rank)}
    shapes = {
        **dict(zip(names, shapes, strict=True)),
        **{f"{name}.weight": shape for name, shape in linear.items()},
    }
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def xpress():
    """As vLLM reads it."""
    config, _ = zlab(
        {"block_size": None}, architectures=["Qwen3XPressModel"], xpress_block_size=5, xpress_rank=4
    )
    names = (
        "w1.weight",
        "w2.weight",
        "mix.L",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    )
    return {**config, "xpress_mlp_hidden": 8, "xpress_num_passes": 6}, body(
        2, 3, refiner("xpress_head", names).items()
    )


def muse():
    config = {
        **SIZES,
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "num_hidden_layers": 2,
        "block_size": 5,
        "mask_token_id": MASK,
        "target_layer_ids": [1, 3, 5],
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 7,
    }
    tensors = body(2, 3)
    tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
    tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
    return config, tensors


def deepspec_gemma4(rank=4, shared=True, **config):
    options, _ = deepspec(rank)
    options = {
        **{name: value for name, value in options.items() if name not in SIZES},
        **G4,
        "attention_k_eq_v": shared,
    }
    shapes = {"fc.weight": (D, 3 * D), "hidden_norm.weight": (D,), "norm.weight": (D,), **OWN}
    for index in range(2):
        shapes |= gemma4_layer(f"layers.{index}", shared=shared)
    tensors = fill({**shapes, **(markov(rank, "vanilla", confidence=True) if rank else {})}, 2)
    for index in range(2):
        tensors[f"layers.{index}.layer_scalar"] = torch.tensor([0.6 + 0.3 * index])
    options |= {"architectures": ["Gemma4DSparkModel"], "layer_types": ["full_attention"] * 2}
    return {**options, **({} if rank else {"enable_confidence_head": False}), **config}, tensors
