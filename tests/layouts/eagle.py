"""Tiny random EAGLE-3 and P-EAGLE drafters in every published layout."""

import torch

from .parts import DRAFTED, G4, LAYERS, MASK, OWN, SIZES, TABLES, D, V, fill, gemma4_layer, layer


def eagle(first, m=3, num_layers=1, norms=False, extra=()):
    shapes = {"fc.weight": (D, m * D), "norm.weight": (D,), f"{first}.hidden_norm.weight": (D,)}
    shapes |= layer(first, 2 * D, norms)
    for index in range(1, num_layers):
        shapes |= layer(f"layers.{index}", D, norms)
    return fill({**shapes, **dict(extra)}, 1)


def safeai(trimmed=True, **config):
    options = {
        **SIZES,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
    }
    options["draft_vocab_size"] = len(DRAFTED) if trimmed else V
    tensors = eagle("midlayer", extra={"lm_head.weight": (options["draft_vocab_size"], D)}.items())
    return {**options, **config}, {**tensors, **(TABLES if trimmed else {})}


def nvidia(ids):
    return safeai(
        eagle_config={"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    )


def deepspec_gemma4_eagle():
    config, _ = deepspec_eagle()
    config = {
        **{name: value for name, value in config.items() if name not in SIZES},
        **G4,
        "architectures": ["Gemma4Eagle3Model"],
    }
    shapes = {
        "fc.weight": (D, 5 * D),
        "norm.weight": (D,),
        "layers.0.hidden_norm.weight": (D,),
        **OWN,
    }
    tensors = fill({**shapes, **gemma4_layer("layers.0", 2 * D)}, 3)
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
    return options, eagle("layers.0", 5, norms=True, extra=OWN.items())


def speculators_eagle(
    kind="eagle3", num_layers=1, norms=False, trimmed=True, sliding=False, **flags
):
    options = {
        "speculators_model_type": kind,
        "architectures": ["PEagleSpeculator" if kind == "peagle" else "Eagle3Speculator"],
        "transformer_layer_config": {
            **SIZES,
            "model_type": "qwen3" if norms else "llama",
            "num_hidden_layers": num_layers,
        },
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "draft_vocab_size": len(DRAFTED) if trimmed else V,
        "norm_before_residual": True,
        **flags,
    }
    if sliding:
        options["transformer_layer_config"] |= {
            "layer_types": ["sliding_attention"] * num_layers,
            "sliding_window": 5,
        }
        options["transformer_layer_config"] |= (
            {"use_sliding_window": True, "max_window_layers": 0} if norms else {}
        )
    extra = {"lm_head.weight": (len(DRAFTED), D)} if trimmed else {}
    if kind == "peagle":
        options["mask_token_id"] = MASK
        extra |= {"mask_hidden": (1, 1, 3 * D), "embed_tokens.weight": (V, D)}
    if flags.get("norm_before_fc"):
        extra["input_norm.weight"] = (3 * D,)
    if flags.get("fc_norm"):
        extra |= {f"fc_norm.{index}.weight": (D,) for index in range(3)}
    return options, {
        **eagle("layers.0", 3, num_layers, norms, extra.items()),
        **(TABLES if trimmed else {}),
    }


def specforge_peagle():
    options = {
        **SIZES,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 2,
    }
    options |= {
        "norm_before_residual": False,
        "pard_token": MASK,
        "draft_vocab_size": V,
        "target_layer_ids": [1, 3, 4],
    }
    extra = {"mask_hidden": (1, 3 * D), **OWN}
    return options, eagle("midlayer", 3, 2, extra=extra.items())
