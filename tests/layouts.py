"""Tiny random drafters in every published layout: exact keys and names, as their publishers write them."""

import json

import torch
from safetensors.torch import save_file

D, LAYERS, V, HEADS, KV, HD, INNER = 32, 8, 32, 4, 2, 8, 48
SIZES = {
    "hidden_size": D,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HD,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": V,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "attention_bias": False,
}
MASK = 31


def _layer(prefix, width=D, norms=True):
    shapes = {
        "self_attn.q_proj.weight": (HEADS * HD, width),
        "self_attn.k_proj.weight": (KV * HD, width),
        "self_attn.v_proj.weight": (KV * HD, width),
        "self_attn.o_proj.weight": (D, HEADS * HD),
        "mlp.gate_proj.weight": (INNER, D),
        "mlp.up_proj.weight": (INNER, D),
        "mlp.down_proj.weight": (D, INNER),
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
    }
    if norms:
        shapes |= {"self_attn.q_norm.weight": (HD,), "self_attn.k_norm.weight": (HD,)}
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _fill(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        found[name] = 1 + 0.2 * noise if len(shape) == 1 and "norm" in name else noise * (0.35 if len(shape) > 1 else 0.1)
    return found


def _body(num_layers, m, extra=(), seed=0):
    shapes = {"fc.weight": (D, m * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for index in range(num_layers):
        shapes |= _layer(f"layers.{index}")
    return _fill({**shapes, **dict(extra)}, seed)


def _markov(rank, kind, guesses=V, prefix="markov_head", confidence=None):
    shapes = {f"{prefix}.markov_w1.weight": (V, rank), f"{prefix}.markov_w2.weight": (guesses, rank)}
    if kind == "gated":
        shapes |= {f"{prefix}.gate_proj.weight": (rank, D + rank), f"{prefix}.gate_proj.bias": (rank,)}
    if kind == "rnn":
        shapes |= {f"{prefix}.joint_proj.weight": (3 * rank, 2 * rank + D), f"{prefix}.joint_proj.bias": (3 * rank,)}
    if confidence is not None:
        shapes |= {"confidence_head.proj.weight": (1, D + (rank if confidence else 0)), "confidence_head.proj.bias": (1,)}
    return shapes


DRAFTED = [index for index in range(V) if index % 3 != 1]  # of a trimmed vocabulary
TABLES = {
    "d2t": torch.tensor(DRAFTED) - torch.arange(len(DRAFTED)),
    "t2d": torch.tensor([index in DRAFTED for index in range(V)]),
}
OWN = {"embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}


def zlab(nested=None, **config):
    options = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "num_target_layers": LAYERS}
    dflash = {"block_size": 5, "target_layer_ids": [1, 3, 5], "mask_token_id": MASK, **(nested or {})}
    return {**SIZES, **options, "dflash_config": dflash, **config}, _body(2, 3)


def with_keys(layout, **keys):
    config, tensors = layout
    return {**config, **keys}, tensors


def zlab_default():
    config, _ = zlab()
    config = {**config, "block_size": 5}
    config["dflash_config"] = {"mask_token_id": MASK}
    return config, _body(2, 2)


def zlab_sliding():
    return zlab(layer_types=["sliding_attention", "full_attention"], sliding_window=7, use_sliding_window=True)


def zlab_swa():
    return zlab({"use_swa": True, "swa_window_size": 7})


def zlab_causal():
    return zlab(is_causal=True)


def specforge_dspark():
    config, _ = zlab(
        {"projector_type": "dspark", "markov_rank": 4, "markov_head_type": "vanilla", "enable_confidence_head": False}
    )
    return {**config, "architectures": ["DFlashDraftModel"]}, _body(2, 3, _markov(4, "vanilla", prefix="logit_head").items())


def lfm2_dspark():
    """LiquidAI's: a DSpark by its name and heads, whose rotary embedding turns neighbours."""
    nested = {"target_layer_ids": [1, 3, 5], "mask_token_id": MASK, "num_target_layers": LAYERS, "block_size": None}
    config, _ = zlab(nested, architectures=["Lfm2DSparkDraftModel"], block_size=5, rope_is_neox_style=False, markov_rank=4)
    config |= {"num_target_layers": None, "markov_head_type": "vanilla", "enable_confidence_head": True}
    heads = _markov(4, "vanilla", confidence=True)
    return {**config, "confidence_head_with_markov": True, "has_lm_head": False}, _body(2, 3, heads.items())


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
    heads = _markov(rank, kind, confidence=confidence) if rank else {}
    return config, _body(2, 3, {**OWN, **heads}.items())


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
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
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
        extra |= _markov(4, options["markov_head_type"], guesses, confidence=True)
    return {**options, **config}, {**_body(2, 3, extra.items()), **(TABLES if trimmed else {})}


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
    tensors = _body(2, 3)
    tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
    tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
    return config, tensors


def _eagle(first, m=3, num_layers=1, norms=False, extra=()):
    shapes = {"fc.weight": (D, m * D), "norm.weight": (D,), f"{first}.hidden_norm.weight": (D,)}
    shapes |= _layer(first, 2 * D, norms)
    for index in range(1, num_layers):
        shapes |= _layer(f"layers.{index}", D, norms)
    return _fill({**shapes, **dict(extra)}, 1)


def safeai(trimmed=True, **config):
    options = {**SIZES, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    options["draft_vocab_size"] = len(DRAFTED) if trimmed else V
    tensors = _eagle("midlayer", extra={"lm_head.weight": (options["draft_vocab_size"], D)}.items())
    return {**options, **config}, {**tensors, **(TABLES if trimmed else {})}


def nvidia(ids):
    return safeai(eagle_config={"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True})


G4HEADS, G4KV, G4HD = 4, 1, 16  # of Gemma 4's full layers
G4 = {
    **{name: size for name, size in SIZES.items() if name not in ("rope_theta", "hidden_act")},
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "global_head_dim": G4HD,
    "num_global_key_value_heads": G4KV,
    "attention_k_eq_v": True,
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
    },
    "num_target_layers": LAYERS,
    "tie_word_embeddings": False,
}


def _gemma4_layer(prefix, width=D, shared=True):
    """Keys that are values too have no matrix of their own."""
    shapes = _layer(prefix, width)
    shapes |= {
        f"{prefix}.self_attn.q_proj.weight": (G4HEADS * G4HD, width),
        f"{prefix}.self_attn.o_proj.weight": (D, G4HEADS * G4HD),
    }
    kv = G4KV if shared else KV
    shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (kv * G4HD, width) for name in "kv"}
    if shared:
        del shapes[f"{prefix}.self_attn.v_proj.weight"]
    shapes |= {f"{prefix}.self_attn.{name}_norm.weight": (G4HD,) for name in "qk"}
    shapes |= {f"{prefix}.{name}_feedforward_layernorm.weight": (D,) for name in ("pre", "post")}
    return {**shapes, f"{prefix}.layer_scalar": (1,)}


def deepspec_gemma4(rank=4, shared=True, **config):
    options, _ = deepspec(rank)
    options = {**{name: value for name, value in options.items() if name not in SIZES}, **G4, "attention_k_eq_v": shared}
    shapes = {"fc.weight": (D, 3 * D), "hidden_norm.weight": (D,), "norm.weight": (D,), **OWN}
    for index in range(2):
        shapes |= _gemma4_layer(f"layers.{index}", shared=shared)
    tensors = _fill({**shapes, **(_markov(rank, "vanilla", confidence=True) if rank else {})}, 2)
    for index in range(2):
        tensors[f"layers.{index}.layer_scalar"] = torch.tensor([0.6 + 0.3 * index])
    options |= {"architectures": ["Gemma4DSparkModel"], "layer_types": ["full_attention"] * 2}
    return {**options, **({} if rank else {"enable_confidence_head": False}), **config}, tensors


def deepspec_gemma4_eagle():
    config, _ = deepspec_eagle()
    config = {
        **{name: value for name, value in config.items() if name not in SIZES},
        **G4,
        "architectures": ["Gemma4Eagle3Model"],
    }
    shapes = {"fc.weight": (D, 5 * D), "norm.weight": (D,), "layers.0.hidden_norm.weight": (D,), **OWN}
    tensors = _fill({**shapes, **_gemma4_layer("layers.0", 2 * D)}, 3)
    return config, {**tensors, "layers.0.layer_scalar": torch.tensor([0.7])}


def deepspec_eagle():
    options = {
        **SIZES,
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "num_hidden_layers": LAYERS,
        "draft_num_hidden_layers": 1,
        "num_target_layers": LAYERS,
        "target_layer_ids": [1, 2, 3, 5, 6],
        "layer_types": ["full_attention"] * LAYERS,
        "ttt_length": 7,
    }
    return options, _eagle("layers.0", 5, norms=True, extra=OWN.items())


def speculators_eagle(kind="eagle3", num_layers=1, norms=False, trimmed=True, sliding=False, **flags):
    options = {
        "speculators_model_type": kind,
        "architectures": ["PEagleSpeculator" if kind == "peagle" else "Eagle3Speculator"],
        "transformer_layer_config": {**SIZES, "model_type": "qwen3" if norms else "llama", "num_hidden_layers": num_layers},
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "draft_vocab_size": len(DRAFTED) if trimmed else V,
        "norm_before_residual": True,
        **flags,
    }
    if sliding:
        options["transformer_layer_config"] |= {"layer_types": ["sliding_attention"] * num_layers, "sliding_window": 5}
        options["transformer_layer_config"] |= {"use_sliding_window": True, "max_window_layers": 0} if norms else {}
    extra = {"lm_head.weight": (len(DRAFTED), D)} if trimmed else {}
    if kind == "peagle":
        options["mask_token_id"] = MASK
        extra |= {"mask_hidden": (1, 1, 3 * D), "embed_tokens.weight": (V, D)}
    if flags.get("norm_before_fc"):
        extra["input_norm.weight"] = (3 * D,)
    if flags.get("fc_norm"):
        extra |= {f"fc_norm.{index}.weight": (D,) for index in range(3)}
    return options, {**_eagle("layers.0", 3, num_layers, norms, extra.items()), **(TABLES if trimmed else {})}


def specforge_peagle():
    options = {**SIZES, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 2}
    options |= {"norm_before_residual": False, "pard_token": MASK, "draft_vocab_size": V, "target_layer_ids": [1, 3, 4]}
    extra = {"mask_hidden": (1, 3 * D), **OWN}
    return options, _eagle("midlayer", 3, 2, extra=extra.items())


LAYOUTS = {
    "z-lab": zlab,
    "z-lab, default layers": zlab_default,
    "z-lab, sliding": zlab_sliding,
    "z-lab, use_swa": zlab_swa,
    "z-lab, causal": zlab_causal,
    "SpecForge DSpark": specforge_dspark,
    "LFM2 DSpark": lfm2_dspark,
    "JetSpec": jetspec,
    "DeepSpec DFlash": lambda: deepspec(0, confidence=None),
    "DeepSpec DSpark": deepspec,
    "DeepSpec gated": lambda: deepspec(kind="gated", confidence=False),
    "DeepSpec rnn": lambda: deepspec(kind="rnn"),
    "DeepSpec Gemma 4 DSpark": deepspec_gemma4,
    "DeepSpec Gemma 4 DFlash": lambda: deepspec_gemma4(0, shared=False),
    "DeepSpec DSpark, behind the anchor": lambda: with_keys(deepspec(), sample_from_anchor=False, dflash_query_causal=True),
    "speculators DFlash": speculators,
    "speculators DFlash, whole": lambda: speculators(trimmed=False),
    "speculators DFlash, sliding": lambda: speculators(sliding=True),
    "speculators DFlash, not causal": lambda: speculators(sliding=True, sliding_window_non_causal=True),
    "speculators DSpark": lambda: speculators("dspark"),
    "speculators DSpark, fill-in": lambda: speculators("dspark", sample_from_anchor=False),
    "speculators DSpark, rnn": lambda: speculators("dspark", False, markov_head_type="rnn"),
    "speculators DSpark, rnn, fill-in": lambda: speculators("dspark", markov_head_type="rnn", sample_from_anchor=False),
    "speculators DSpark, gated": lambda: speculators("dspark", markov_head_type="gated"),
    "transformers": muse,
    "SafeAI": safeai,
    "SafeAI, interleaved": lambda: safeai(rope_interleaved=True),
    "SafeAI, whole": lambda: safeai(False),
    "NVIDIA": lambda: nvidia([1, 3, 4]),
    "NVIDIA, inputs": lambda: nvidia([2, 4, 5]),
    "DeepSpec EAGLE-3": deepspec_eagle,
    "DeepSpec Gemma 4 EAGLE-3": deepspec_gemma4_eagle,
    "speculators EAGLE-3": speculators_eagle,
    "speculators EAGLE-3, Qwen3": lambda: speculators_eagle(num_layers=2, norms=True, norm_before_residual=False),
    "speculators EAGLE-3, sliding": lambda: speculators_eagle(sliding=True),
    "speculators EAGLE-3, sliding Qwen3": lambda: speculators_eagle(num_layers=2, norms=True, sliding=True),
    "speculators EAGLE-3.1": lambda: speculators_eagle(fc_norm=True, norm_output=True),
    "speculators EAGLE-3, gpt-oss": lambda: speculators_eagle(norm_before_fc=True, trimmed=False),
    "speculators P-EAGLE": lambda: speculators_eagle("peagle", 2),
    "SpecForge P-EAGLE": specforge_peagle,
}


def write(folder, config, tensors, pickled=False):
    """The folder, as its publisher would write it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
