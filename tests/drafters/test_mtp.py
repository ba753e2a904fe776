"""MTP layers: logits against transformers' own and against the formula written out, and whatever a
target's files may bring.
"""

from functools import cache

import pytest
import torch
from checkpoints import config_of, with_mtp
from lossless import assert_lossless
from published import features_behind
from safetensors.torch import load_file
from tiny import make_tokenizer, tiny_model
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

import hf_paradraft
from hf_paradraft.drafters.mtp.model import MtpStep

if not hasattr(MtpModel, "forward_layer"):
    pytest.skip(
        "this transformers runs no layer by itself, which logits are compared with",
        allow_module_level=True,
    )

FAMILIES = [
    "deepseek",
    "glm",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "mellum",
    "mimo",
    "exaone",
    "ernie",
]
IDS = torch.tensor([[3, 5, 7, 11, 13, 17, 19, 23]])
brought = cache(with_mtp)


def target_of(family, count=1, dtype=torch.float32):
    folder, _ = brought(family, count)
    if family == "mimo":
        return Qwen2ForCausalLM.from_pretrained(
            folder, config=config_of(family), dtype=dtype
        ).eval()
    # the other kernel takes no float64
    options = {"experts_implementation": "eager"} if family != "qwen3_5" else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


def exact(family):
    """In which number format equality is tested; a recurrent state and ERNIE's router are float32
    whatever the weights are.
    """
    return torch.float32 if family.startswith(("qwen", "ernie")) else torch.float64


@torch.no_grad()
def recursion(layers, tokens, states, count):
    """One layer again and again, each time over everything: guesses of `count` tokens."""
    rows = []
    for _ in range(count):
        positions = torch.arange(1, tokens.shape[1] + 1)[None]
        behind = layers.forward_layer(
            0, states, positions, MtpCache(config=layers.config), input_ids=tokens
        )
        rows.append(layers._project_to_logits(behind[:, -1:]))
        states = torch.cat([states, behind[:, -1:]], 1)
        tokens = torch.cat([tokens, rows[-1].argmax(-1)], 1)
    return torch.cat(rows, 1)


def expected_logits(family, target, count=1, depth=3):
    """By transformers' `MtpModel`, beside the same target."""
    _, layers = brought(family, count)
    layers.tie_with_main_model(target)
    states = features_behind(hf_paradraft.MtpDrafter.from_target(target), target, IDS)["normed"]
    if count == 1:
        return recursion(layers, IDS[:, 1:], states, depth)
    positions = torch.arange(1, IDS.shape[1])[None]
    with torch.no_grad():
        return layers(IDS[:, 1:], states, None, positions, MtpCache(config=layers.config))[1]


def drafted_logits(target, drafter, depth=3):
    return drafter.draft_logits(IDS, features_behind(drafter, target, IDS), depth)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("depth", [1, 3])
def test_logits_are_those_of_transformers_own_layers(family, depth):
    target = target_of(family)
    logits = drafted_logits(target, hf_paradraft.MtpDrafter.from_target(target), depth)
    torch.testing.assert_close(
        logits, expected_logits(family, target, depth=depth), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("family", ["deepseek", "glm"])
@pytest.mark.parametrize("count", [2, 3])
def test_logits_of_several_layers_are_those_of_transformers_own(family, count):
    target = target_of(family, count)
    drafter = hf_paradraft.MtpDrafter.from_target(target)
    assert drafter.most_drafts == drafter.speculation_config.num_draft_tokens == count
    logits = drafted_logits(target, drafter, count)
    torch.testing.assert_close(logits, expected_logits(family, target, count), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_logits_are_those_of_the_formula_written_out():
    """MiMo's, of Qwen2's layers: norms, projection, attention with turned queries and keys, gated
    MLP, in float64.
    """
    target = target_of("mimo", dtype=torch.float64)
    tensors = {
        name: tensor.double()
        for name, tensor in load_file(brought("mimo")[0] / "model.safetensors").items()
    }
    layer = {
        name.removeprefix("model.mtp_layers.0."): tensor
        for name, tensor in tensors.items()
        if "mtp_layers" in name
    }
    heads, kv_heads, size = 4, 2, 8

    def norm(x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * layer[f"{name}.weight"]

    def turned(x, positions):
        angles = positions[:, None] / 10_000 ** (torch.arange(0, size, 2).double() / size)
        cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    def behind(tokens, states):
        embedded = tensors["model.embed_tokens.weight"][tokens]
        x = (
            torch.cat([norm(states, "hidden_layernorm"), norm(embedded, "token_layernorm")], -1)
            @ layer["input_proj.weight"].T
        )
        inner, count = norm(x, "input_layernorm"), len(tokens)
        q, k, v = (
            torch.nn.functional.linear(
                inner, layer[f"self_attn.{name}_proj.weight"], layer[f"self_attn.{name}_proj.bias"]
            )
            .view(count, -1, size)
            .transpose(0, 1)
            for name in "qkv"
        )
        positions = torch.arange(count).double()
        q, k = turned(q, positions), turned(k, positions)
        k, v = (tensor.repeat_interleave(heads // kv_heads, 0) for tensor in (k, v))
        scores = (q @ k.transpose(1, 2) / size**0.5).masked_fill(
            torch.ones(count, count).triu(1).bool(), -torch.inf
        )
        x = (
            x
            + (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1)
            @ layer["self_attn.o_proj.weight"].T
        )
        inner = norm(x, "post_attention_layernorm")
        gate, up = (inner @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return norm(
            x + (torch.nn.functional.silu(gate) * up) @ layer["mlp.down_proj.weight"].T,
            "final_layernorm",
        )

    drafter = hf_paradraft.MtpDrafter.from_target(target)
    states, tokens, rows = features_behind(drafter, target, IDS)["normed"][0], IDS[0, 1:], []
    for _ in range(3):
        made = behind(tokens, states)
        rows.append(made[-1] @ tensors["lm_head.weight"].T)
        states = torch.cat([states, made[-1:]])
        tokens = torch.cat([tokens, rows[-1].argmax()[None]])
    # its norms compute in float32
    torch.testing.assert_close(
        drafted_logits(target, drafter)[0], torch.stack(rows), rtol=1e-4, atol=1e-5
    )


WRONG = {
    "fed back before the norm": "states",
    "halves swapped": "halves",
    "no norm before the embedding": "enorm",
    "no norm behind the layer": "norm",
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("family", ["deepseek", "qwen3_5"])
def test_wrong_variants_have_other_logits(family, what, monkeypatch):
    """The comparison above would notice each of the usual mistakes."""
    target = target_of(family)
    drafter = hf_paradraft.MtpDrafter.from_target(target)
    layer = drafter.layers[0]
    match WRONG[what]:
        case "states":
            norm, raw = layer.stack.norm, []
            norm.register_forward_pre_hook(lambda _, inputs: raw.append(inputs[0]))
            forward = MtpStep.forward_rows
            monkeypatch.setattr(
                MtpStep, "forward_rows", lambda *inputs: (forward(*inputs)[0], raw[-1])
            )
        case "halves":
            halves = layer.eh_proj.weight.chunk(2, dim=1)
            layer.eh_proj.weight = torch.nn.Parameter(torch.cat(halves[::-1], dim=1))
        case "enorm":
            layer.enorm = torch.nn.Identity()
        case "norm":
            layer.stack.norm = torch.nn.Identity()
    logits, expected = drafted_logits(target, drafter), expected_logits(family, target)
    assert (logits - expected).abs().max() > 1e-2


def test_own_states_are_replaced_by_the_targets_once_they_are_verified():
    """What is guessed in a later round is what a fresh reading guesses: no entry of a guess stays
    in the cache.
    """
    target = target_of("deepseek", dtype=torch.float64)
    drafter = hf_paradraft.MtpDrafter.from_target(target)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(3, None, never_slower=False)
    from published import check_guesses, guesses_of_a_call

    answers = target.generate(
        IDS, do_sample=False, max_new_tokens=24, eos_token_id=None, pad_token_id=0
    )
    seen = guesses_of_a_call(drafter, target, IDS, answers, max_new_tokens=24)
    assert check_guesses(drafter, target, seen, 1e-6) > 5


@pytest.mark.parametrize("family", ["deepseek", "glm"])
def test_transformers_own_loop_drafts_the_same_tokens(family, monkeypatch):
    target = target_of(family, dtype=torch.float64)
    # its own name is that of the published size
    target._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*"]
    drafts, candidates = {}, MTPCandidateGenerator.get_candidates

    def watched(self, input_ids, *args, **kwargs):
        proposed = candidates(self, input_ids, *args, **kwargs)
        if proposed[1] is not None:
            drafts[input_ids.shape[1]] = proposed[0][0, -1].item()
        return proposed

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", watched)
    options = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
    theirs = target.generate(IDS, use_mtp=True, **options)
    drafter = hf_paradraft.MtpDrafter.from_target(target)
    compared = 0
    for length, token in drafts.items():
        ids = theirs[:, :length]
        compared += 1
        assert drafter.draft_logits(ids, features_behind(drafter, target, ids), 1).argmax() == token
    assert compared > 5


@pytest.mark.parametrize(
    ("family", "size"),
    [
        (family, size)
        for family in FAMILIES
        for size in (None, 9, "auto")
        if size is None or not family.startswith("qwen")  # a recurrent state takes no trees
    ],
)
def test_outputs_are_the_targets_own(family, size):
    target = target_of(family, dtype=exact(family))
    drafter = hf_paradraft.MtpDrafter.from_target(target)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(3, size, never_slower=False)
    assert_lossless(target, drafter, IDS, max_new_tokens=24, pad_token_id=0)
    torch.manual_seed(1)
    sampled = target.generate(IDS, do_sample=True, max_new_tokens=16, pad_token_id=0)
    torch.manual_seed(1)
    assert torch.equal(
        sampled,
        target.generate(
            IDS, do_sample=True, max_new_tokens=16, pad_token_id=0, assistant_model=drafter
        ),
    )


@pytest.mark.parametrize("size", [None, 9])
@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("deepseek", 1),
        ("deepseek", 3),
        ("mimo", 1),
        ("ernie", 1),
        ("qwen3_5", 1),
        ("qwen3_next", 1),
        ("qwen3_5_moe", 1),
    ],
)
def test_outputs_of_ragged_batches_are_the_targets_own(family, size, count):
    """Of recurrent targets too, where each sequence has a state of its own; these take chains."""
    target = target_of(family, count, exact(family))
    drafter = hf_paradraft.MtpDrafter.from_target(target)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(3, size, never_slower=False)
    ids = torch.tensor([[3, 5, 7, 11, 13, 17], [0, 0, 0, 9, 2, 4], [0, 0, 0, 0, 0, 1]])
    assert_lossless(
        target, drafter, ids, attention_mask=(ids != 0).long(), max_new_tokens=20, pad_token_id=0
    )
    assert drafter.last_stats.num_drafted > 0


@pytest.mark.parametrize("count", [2, 3])
def test_texts_shorter_than_the_layers_are_many(count):
    """A layer for each step has nothing to read of a text that is shorter."""
    target = target_of("deepseek", count, torch.float64)
    for length in (1, 2, 3):
        assert_lossless(
            target,
            hf_paradraft.MtpDrafter.from_target(target),
            IDS[:, :length],
            max_new_tokens=8,
            pad_token_id=0,
        )


def test_tokenizers_are_compared_as_for_any_drafter():
    target = tiny_model("qwen3")
    drafter = hf_paradraft.MtpDrafter.from_target(target, new=True)
    both = dict.fromkeys(("tokenizer", "assistant_tokenizer"), make_tokenizer())
    assert_lossless(target, drafter, IDS, do_sample=False, max_new_tokens=8, **both)
