"""Tiny targets whose files bring MTP layers, in the layouts of their publishers, and those layers
by transformers' own class.
"""

import copy
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Exaone4Config,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Glm4MoeConfig,
    MellumConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from transformers.modeling_layers import MtpModel

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256, "initializer_range": 0.2, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LINEAR = {
    "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


def config_of(family, count=1):
    """The config of a tiny target."""
    match family:
        case "deepseek":
            heads = {
                "kv_lora_rank": 8,
                "q_lora_rank": 8,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
            }
            experts = {
                "n_routed_experts": 4,
                "n_group": 1,
                "topk_group": 1,
                **EXPERTS,
                "first_k_dense_replace": 1,
            }
            return DeepseekV3Config(
                **SIZES, **heads, **experts, num_key_value_heads=4, num_nextn_predict_layers=count
            )
        case "glm":
            experts = {"n_routed_experts": 4, **EXPERTS, "first_k_dense_replace": 1, "head_dim": 8}
            return Glm4MoeConfig(
                **SIZES, **experts, num_key_value_heads=2, num_nextn_predict_layers=count
            )
        case "qwen3_5":
            return Qwen3_5TextConfig(
                **{**SIZES, "num_hidden_layers": 4}, **LINEAR, num_key_value_heads=2
            )
        case "qwen3_next":
            experts = {"num_experts": 4, **EXPERTS, "shared_expert_intermediate_size": 16}
            return Qwen3NextConfig(
                **{**SIZES, "num_hidden_layers": 4}, **LINEAR, **experts, num_key_value_heads=2
            )
        case "qwen3_5_moe":
            experts = {"num_experts": 4, **EXPERTS, "shared_expert_intermediate_size": 16}
            return Qwen3_5MoeTextConfig(
                **{**SIZES, "num_hidden_layers": 4}, **LINEAR, **experts, num_key_value_heads=2
            )
        # whose MTP layer has a window, and turns by other angles than its full layers
        case "mellum":
            kinds = {
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 4,
                "num_mtp_layers": count,
            }
            return MellumConfig(
                **SIZES, **EXPERTS, **kinds, num_experts=4, head_dim=8, num_key_value_heads=2
            )
        case "mimo":
            return Qwen2Config(**SIZES, num_key_value_heads=2)
        case "exaone":  # norms behind each part
            return Exaone4Config(
                **SIZES,
                num_key_value_heads=2,
                layer_types=["full_attention"] * 2,
                sliding_window=None,
            )
        case "ernie":  # a layer without experts, and no norm behind it
            experts = {
                "moe_num_experts": 4,
                "moe_k": 2,
                "moe_intermediate_size": 16,
                "moe_layer_end_index": 1,
            }
            return Ernie4_5_MoeConfig(**SIZES, **experts, num_key_value_heads=2)


def published_names(family, number, num_layers):
    """What stands before the layer's own tensors, and the names of the others, by transformers'."""
    if family in ("deepseek", "glm"):
        prefix = f"model.layers.{num_layers + number}."
        names = {
            "enorm": "enorm",
            "hnorm": "hnorm",
            "eh_proj": "eh_proj",
            "post_norm": "shared_head.norm",
        }
        return prefix, {ours: prefix + theirs for ours, theirs in names.items()}
    if family == "ernie":
        names = {"enorm": "emb_norm", "hnorm": "hidden_norm", "eh_proj": "linear_proj"}
        return f"model.mtp_block.{number}.", {
            ours: f"model.mtp_{theirs}.{number}" for ours, theirs in names.items()
        }
    if family == "mimo":
        prefix = f"model.mtp_layers.{number}."
        names = {
            "enorm": "token_layernorm",
            "hnorm": "hidden_layernorm",
            "eh_proj": "input_proj",
            "post_norm": "final_layernorm",
        }
        return prefix, {ours: prefix + theirs for ours, theirs in names.items()}
    names = {
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc",
        "post_norm": "mtp.norm",
    }
    return f"mtp.layers.{number}.", names


@torch.no_grad()
def with_mtp(family, count=1):
    """A folder with a target whose files bring MTP layers, and these layers as transformers'
    `MtpModel`.
    """
    torch.manual_seed(0)
    config = config_of(family, count)
    target = AutoModelForCausalLM.from_config(config).float().eval()
    described = copy.deepcopy(target)
    described.config.num_mtp_layers = count
    if family == "ernie":
        described.config.moe_layer_start_index = config.num_hidden_layers + count
    if getattr(config, "layer_types", None):
        described.config.mtp_layer_types = (
            getattr(config, "mtp_layer_types", None) or ["full_attention"] * count
        )
    layers = MtpModel(described, count).float().eval()
    if family == "ernie":
        for layer in layers.layers:
            layer.post_norm = torch.nn.Identity()
    centred = family.startswith("qwen3")  # norms that count from one
    for name, weight in layers.layers.named_parameters():
        if "norm" in name:
            weight.uniform_(-0.4, 0.4) if centred else weight.uniform_(0.6, 1.4)
        elif weight.ndim > 1:
            weight.normal_(std=0.2)
    folder = Path(tempfile.mkdtemp()) / family
    target.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    host_layer = (
        max(index for index, kind in enumerate(kinds) if kind == "full_attention")
        if family != "ernie"
        else 0
    )
    for number, layer in enumerate(layers.layers):
        prefix, names = published_names(family, number, config.num_hidden_layers)
        tensors |= {
            f"{theirs}.weight": getattr(layer, ours).weight.clone()
            for ours, theirs in names.items()
        }
        # saves the layer's own tensors by the names that checkpoints have
        host = copy.deepcopy(target)
        host.model.layers[host_layer].load_state_dict(layer.mtp_block.state_dict())
        host.save_pretrained(folder.parent / "host")
        before = f"model.layers.{host_layer}."
        tensors |= {
            prefix + name.removeprefix(before): tensor
            for name, tensor in load_file(folder.parent / "host" / "model.safetensors").items()
            if name.startswith(before)
        }
    if family == "mimo":  # reads the state first, and transformers knows no such config
        name = published_names(family, 0, 0)[1]["eh_proj"] + ".weight"
        tensors[name] = torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1)
        file = folder / "config.json"
        file.write_text(
            json.dumps(
                json.loads(file.read_text())
                | {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
            )
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, layers


GEMMA4_ASSISTANT = {
    "num_kv_shared_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "hidden_size": 16,
}


def gemma4_target(window=64, shared=2):
    """A tiny Gemma 4."""
    return tiny_model("gemma4", sliding_window=window, num_kv_shared_layers=shared)


def gemma4_assistant(centroids=False, window=64):
    """An assistant for it, as transformers makes one, with random weights."""
    torch.manual_seed(3)
    described = gemma4_target(window).config.to_dict() | GEMMA4_ASSISTANT
    for name in (
        "architectures",
        "dtype",
        "per_layer_config",
        "vocab_size_per_layer_input",
        "hidden_size_per_layer_input",
    ):
        described.pop(name, None)
    described |= {
        "vocab_size_per_layer_input": 0,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 16,
        "head_dim": 8,
    }
    described |= {"num_key_value_heads": 2, "num_global_key_value_heads": 1}
    config = Gemma4AssistantConfig(
        text_config=described,
        backbone_hidden_size=32,
        use_ordered_embeddings=centroids,
        num_centroids=8,
        centroid_intermediate_top_k=3,
    )
    model = Gemma4AssistantForCausalLM(config).to(torch.float64).eval()
    if centroids:
        model.masked_embedding.token_ordering.copy_(torch.randperm(32))
    return model
