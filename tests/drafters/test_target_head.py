"""What a drafter shares with its target gives what the target gives, wherever the target's weights
are.
"""

import copy

import pytest
import torch
from lossless import assert_lossless
from published import block_states
from tiny import MASK, tiny_model
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GemmaConfig,
    GraniteConfig,
    HyperCLOVAXConfig,
)

import hf_paradraft
from hf_paradraft.decoding.features import Features, decoder_of
from hf_paradraft.decoding.target_head import TargetHead
from hf_paradraft.drafters.layers import final_norm, final_scale

SIZES = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.4, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
SCALED = {
    "Cohere": lambda: CohereConfig(**SIZES, logit_scale=0.25),
    "Granite": lambda: GraniteConfig(**SIZES, logits_scaling=4.0),
    "HyperCLOVA X": lambda: HyperCLOVAXConfig(**SIZES, logits_scaling=4.0),
}
IDS = torch.tensor([[3, 1, 4, 1, 5]])


@torch.no_grad()
def logits_and_states(target):
    with Features(target, ("normed",)) as features:
        return target(IDS, use_cache=False).logits, features.rows["normed"]


@torch.no_grad()
@pytest.mark.parametrize("name", SCALED)
def test_logits_are_scaled_as_the_targets(name):
    target = AutoModelForCausalLM.from_config(SCALED[name]()).eval()
    expected, states = logits_and_states(target)
    torch.testing.assert_close(TargetHead(target).logits(states), expected)
    vocabulary = torch.tensor([1, 4, 9])
    torch.testing.assert_close(
        TargetHead(target, vocabulary).logits(states), expected[..., vocabulary]
    )


def test_a_scale_that_is_not_known_is_refused():
    target = tiny_model(dtype=torch.float32)
    head = target.lm_head.forward
    target.lm_head.forward = lambda states: head(states)
    TargetHead(target)
    other, forward = tiny_model(dtype=torch.float32), type(target).forward

    def scaled(*args, **kwargs):
        out = forward(other, *args, **kwargs)
        out.logits = out.logits * 3
        return out

    other.forward = scaled
    with pytest.raises(ValueError, match="not known here"):
        TargetHead(other)


@torch.no_grad()
def test_gathered_rows_follow_the_target():
    target, vocabulary = tiny_model(dtype=torch.float32), torch.tensor([1, 4, 9])
    target_head = TargetHead(target, vocabulary)
    target_head.logits(torch.ones(1, 32))
    target.to(torch.bfloat16)
    assert target_head.logits(torch.ones(1, 32)).dtype == torch.bfloat16
    target.float().lm_head.weight = torch.nn.Parameter(torch.ones(32, 32))
    assert target_head.logits(torch.ones(1, 32)).tolist() == [[32.0] * 3]


class Packed(torch.nn.Module):
    """A head whose weight has another name."""

    def __init__(self, head):
        super().__init__()
        self.register_buffer("packed", head.weight.detach().clone())

    def forward(self, states):
        return states @ self.packed.T


@torch.no_grad()
def test_a_packed_head_gives_all_logits():
    target = tiny_model(dtype=torch.float32)
    target.set_output_embeddings(Packed(target.lm_head))
    expected, states = logits_and_states(target)
    torch.testing.assert_close(TargetHead(target).logits(states), expected)
    torch.testing.assert_close(
        TargetHead(target, torch.tensor([1, 9])).logits(states), expected[..., [1, 9]]
    )


@pytest.mark.parametrize("vocabulary", [None, torch.tensor([1, 4, 9])])
def test_an_offloaded_target_is_drafted_for(vocabulary):
    from accelerate import cpu_offload

    target = tiny_model("llama", num_hidden_layers=4, dtype=torch.float32)
    drafter = hf_paradraft.DFlashDrafter.from_target(target, MASK, 1, 4, 2)
    drafter.vocabulary = vocabulary
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
    assert_lossless(target, drafter, IDS, **options)
    offloaded = cpu_offload(copy.deepcopy(target))
    assert offloaded.lm_head.weight.is_meta
    assert_lossless(offloaded, drafter, IDS, **options)
    assert drafter.last_stats.num_drafted > 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_drafter_is_made_for_an_offloaded_target(tied):
    from accelerate import cpu_offload

    target = tiny_model("llama", tie_word_embeddings=tied, dtype=torch.float32)
    torch.manual_seed(0)
    expected = hf_paradraft.ParallelSpecDrafter.from_target(target, "eagle", 2)
    offloaded = cpu_offload(copy.deepcopy(target))
    torch.manual_seed(0)
    drafter = hf_paradraft.ParallelSpecDrafter.from_target(offloaded, "eagle", 2)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor, drafter.state_dict()[name])
    assert_lossless(offloaded, drafter, IDS, max_new_tokens=12)


def test_a_drafters_own_scale_and_cap():
    """Instead of the target's: scaled first, then capped."""
    logits = TargetHead(tiny_model("llama", dtype=torch.float32)).finished(
        torch.tensor([2.0]), 3.0, 4.0
    )
    torch.testing.assert_close(logits, 3.0 * torch.tanh(torch.tensor([8.0 / 3.0])))


@torch.no_grad()
def test_an_untrained_drafter_begins_with_the_scale_of_the_targets_final_norm():
    for architecture in ("llama", "gpt2"):
        target = tiny_model(architecture, dtype=torch.float32)
        norm = final_norm(decoder_of(target))
        for parameter in norm.parameters():
            parameter.uniform_(0.5, 2.0)
        torch.testing.assert_close(final_scale(target), norm.weight)
    gemma = AutoModelForCausalLM.from_config(GemmaConfig(**SIZES, head_dim=8)).eval()
    gemma.model.norm.weight.uniform_(0.5, 2.0)
    # it counts from one
    torch.testing.assert_close(final_scale(gemma), 1 + gemma.model.norm.weight)
    deep = tiny_model("llama", num_hidden_layers=8, dtype=torch.float32)
    deep.model.norm.weight.uniform_(0.5, 2.0)
    for drafter in (
        hf_paradraft.DSparkDrafter.from_target(deep, MASK),
        hf_paradraft.Eagle3Drafter.from_target(deep),
    ):
        torch.testing.assert_close(drafter.stack.norm.weight, deep.model.norm.weight)
    ids, features = torch.tensor([[1, 2, 3, 4]]), {}
    blocks = hf_paradraft.DSparkDrafter.from_target(deep, MASK)
    features = {key: torch.randn(1, 3, 32) for key in blocks.features}
    base = blocks.base_logits(blocks.guesses(block_states(blocks, ids, features)))
    # the head on the token before says nothing yet
    torch.testing.assert_close(blocks.draft_logits(ids, features), base)


@torch.no_grad()
def test_a_batchs_newest_states_are_multiplied_by_one_head():
    """They are a slice of all states, and torch multiplies each part of a slice by a copy of the
    matrix.
    """
    head = TargetHead(tiny_model(), torch.arange(20))
    states = torch.randn(6, 3, head.embedding.weight.shape[1], dtype=head.embedding.weight.dtype)
    with torch.profiler.profile() as profile:
        sliced = head.logits(states[:, -1:])
    assert "aten::bmm" not in {event.key for event in profile.key_averages()}
    torch.testing.assert_close(sliced, head.logits(states)[:, -1:])
