"""What is refused, with a sentence, and what a call that failed leaves behind."""

import pytest
import torch
from lossless import assert_lossless
from tiny import CACHE, generate, near_copy, tiny_model
from transformers import (
    DynamicCache,
    LogitsProcessor,
    StoppingCriteria,
)

import hf_paradraft
from hf_paradraft.integration.look import check_reads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams is 2"),
        (
            {"output_attentions": True, "return_dict_in_generate": True},
            "attentions or hidden states",
        ),
        (
            {"output_hidden_states": True, "return_dict_in_generate": True},
            "attentions or hidden states",
        ),
    ],
)
def test_unsupported_options_are_refused_before_any_forward(
    target, drafter, prompt, options, message
):
    check_reads(target, several=False)  # once for each target
    calls = []
    target.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match=message):
        generate(target, drafter, prompt, **options)
    assert not calls


ROPE = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


@pytest.mark.parametrize("more", [{}, {"rope_parameters": ROPE}])
def test_positions_ahead_of_the_tokens_are_refused_where_they_may_pass_the_context(more, prompt):
    """Tokens alone would not: drafts counted on that. Within the context they are served."""
    target = tiny_model(max_position_embeddings=40, **more)
    drafter = near_copy(target)
    positions = torch.arange(prompt.shape[1])[None]
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 12}
    for shift in (0, 3):
        given = {"position_ids": positions + shift, **options}
        plain = target.generate(prompt, **given)
        assert torch.equal(plain, target.generate(prompt, assistant_model=drafter, **given))
    with pytest.raises(ValueError, match="run ahead of its tokens"):
        target.generate(prompt, assistant_model=drafter, position_ids=positions + 30, **options)


def test_a_criterion_that_raises_spoils_no_later_call(target, drafter, prompt):
    class Broken(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            raise RuntimeError("mine")

    first = generate(target, drafter, prompt)
    with pytest.raises(RuntimeError, match="mine"):
        generate(target, drafter, prompt, stopping_criteria=[Broken()])
    assert torch.equal(first, generate(target, drafter, prompt))


def test_a_criterion_that_raises_leaves_nothing_behind(target, drafter, prompt):
    class Broken(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] > 9:
                raise RuntimeError("stop here")
            return torch.tensor([False])

    with pytest.raises(RuntimeError, match="stop here"):
        generate(target, drafter, prompt, stopping_criteria=[Broken()])
    assert_lossless(target, drafter, prompt)


def test_a_drafter_of_nans_drafts_nothing(target, prompt):
    drafter = near_copy(target)
    with torch.no_grad():
        drafter.lm_head.weight.fill_(torch.nan)
    for tree_size in (None, 8, "auto"):
        drafter.speculation_config.tree_size = tree_size
        assert_lossless(target, drafter, prompt, max_new_tokens=10)
        assert drafter.last_stats.num_drafted == 0


def test_a_target_of_nans_fails_as_plain_generate_does(drafter, prompt):
    target = tiny_model()
    with torch.no_grad():
        target.lm_head.weight.fill_(torch.nan)
    assert_lossless(target, drafter, prompt, max_new_tokens=5)
    with pytest.raises(RuntimeError, match="probability tensor"):
        generate(target, drafter, prompt, do_sample=True)


def test_embeddings_alone_and_a_missing_drafter_are_refused(target, drafter, prompt):
    with pytest.raises(ValueError, match="reads token ids"):
        generate(target, drafter, None, inputs_embeds=target.get_input_embeddings()(prompt))
    with pytest.raises(ValueError, match="needs a drafter"):
        target.generate(prompt, custom_generate=hf_paradraft.speculative_decoding, max_new_tokens=3)


@pytest.mark.parametrize(
    "options", [{"num_draft_tokens": -1}, {"num_draft_tokens": 1.5}, {"acceptance": "hopeful"}]
)
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match="must be"):
        hf_paradraft.SpeculationConfig(**options)


def test_rules_that_do_not_fit_sampling_are_refused(target, drafter, prompt):
    drafter.speculation_config.acceptance = "rejection"
    with pytest.raises(ValueError, match="does not fit do_sample=False"):
        generate(target, drafter, prompt)
    drafter.speculation_config.acceptance = "greedy"
    with pytest.raises(ValueError, match="does not fit do_sample=True"):
        generate(target, drafter, prompt, do_sample=True)


def test_inputs_that_do_not_fit_together_are_refused(target, drafter):
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(ids[:, :5], **{CACHE: cache})
    with pytest.raises(ValueError, match="pass the whole input_ids"):
        generate(target, drafter, ids[:, 5:], **{CACHE: cache}, attention_mask=torch.ones_like(ids))
    with pytest.raises(ValueError, match="whole input_ids"):
        generate(target, drafter, ids[:, :5], **{CACHE: cache})
    with pytest.raises(ValueError, match="4 positions and input_ids 8"):
        generate(target, drafter, ids, inputs_embeds=target.get_input_embeddings()(ids[:, :4]))


def test_texts_beyond_the_scale_of_positions_are_refused(drafter, prompt):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    target = tiny_model(rope_parameters=rope, max_position_embeddings=24)
    assert_lossless(target, drafter, prompt, max_new_tokens=19)
    with pytest.raises(ValueError, match="beyond 24 tokens"):
        generate(target, drafter, prompt, max_new_tokens=40)


def test_drafts_end_where_the_context_ends(prompt):
    """Drafts never stand on positions that a target with learned positions does not have."""
    target = tiny_model("gpt2", max_position_embeddings=24)
    drafter = near_copy(target)
    assert_lossless(target, drafter, prompt, max_new_tokens=19)


@pytest.mark.parametrize("length", [28, 40])
@pytest.mark.parametrize("size", [None, 8, "auto"])
def test_rotary_targets_go_on_beyond_their_context(length, size):
    """As plain decoding does, on the positions that follow."""
    target = tiny_model(max_position_embeddings=32)
    drafter = near_copy(target, 0.05)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, size)
    ids = torch.randint(0, 30, (2, length), generator=torch.Generator().manual_seed(length))
    options = {
        "do_sample": False,
        "max_new_tokens": 16,
        "eos_token_id": None,
        "attention_mask": torch.ones_like(ids),
    }
    assert_lossless(target, drafter, ids, **options)


def test_rejection_leaves_processors_with_a_memory_alone(target, drafter, prompt):
    class Lengths(LogitsProcessor):
        def __init__(self):
            self.seen = []

        def __call__(self, input_ids, scores):
            self.seen.append(input_ids.shape[1])
            return scores

    processor = Lengths()
    drafter.speculation_config.acceptance = "rejection"
    output = generate(
        target, drafter, prompt, do_sample=True, temperature=0.7, logits_processor=[processor]
    )
    assert processor.seen == list(range(5, output.shape[1]))
