"""Tensors by the names and shapes that publishers write, and sizes: what all tiny drafters are made
of.
"""

import torch

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


def layer(prefix, width=D, norms=True):
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


def fill(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        found[name] = (
            1 + 0.2 * noise
            if len(shape) == 1 and "norm" in name
            else noise * (0.35 if len(shape) > 1 else 0.1)
        )
    return found


def body(num_layers, m, extra=(), seed=0):
    shapes = {"fc.weight": (D, m * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for index in range(num_layers):
        shapes |= layer(f"layers.{index}")
    return fill({**shapes, **dict(extra)}, seed)


def markov(rank, kind, guesses=V, prefix="markov_head", confidence=None):
    shapes = {
        f"{prefix}.markov_w1.weight": (V, rank),
        f"{prefix}.markov_w2.weight": (guesses, rank),
    }
    if kind == "gated":
        shapes |= {
            f"{prefix}.gate_proj.weight": (rank, D + rank),
            f"{prefix}.gate_proj.bias": (rank,),
        }
    if kind == "rnn":
        shapes |= {
            f"{prefix}.joint_proj.weight": (3 * rank, 2 * rank + D),
            f"{prefix}.joint_proj.bias": (3 * rank,),
        }
    if confidence is not None:
        shapes |= {
            "confidence_head.proj.weight": (1, D + (rank if confidence else 0)),
            "confidence_head.proj.bias": (1,),
        }
    return shapes


DRAFTED = [index for index in range(V) if index % 3 != 1]  # of a trimmed vocabulary
TABLES = {
    "d2t": torch.tensor(DRAFTED) - torch.arange(len(DRAFTED)),
    "t2d": torch.tensor([index in DRAFTED for index in range(V)]),
}
OWN = {"embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}


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
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000.0,
        },
    },
    "num_target_layers": LAYERS,
    "tie_word_embeddings": False,
}


def gemma4_layer(prefix, width=D, shared=True):
    """Keys that are values too have no matrix of their own."""
    shapes = layer(prefix, width)
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
