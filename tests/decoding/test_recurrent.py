"""Targets whose state cannot drop its last tokens get chains, and their output stays as it is."""

import functools

import pytest
import torch
import transformers
from lossless import assert_lossless, left_padded
from tiny import CACHE, MASK, SHARED, near_copy, same_with_an_oracle, tiny_model
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BertConfig,
    DynamicCache,
    FalconH1Config,
    JambaConfig,
    Lfm2Config,
    LlamaForCausalLM,
    Mamba2Config,
    MambaConfig,
    OpenAIGPTConfig,
    Qwen3NextConfig,
    StoppingCriteria,
)

import hf_paradraft
from hf_paradraft.decoding import verify
from hf_paradraft.integration.look import check_reads

COMMON = {
    **SHARED,
    "initializer_range": 0.3,
    "num_hidden_layers": 4,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MAMBA = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8,
"initializer_range": 0.3,
         "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}  # fmt: skip
CONFIGS = {
    "lfm2": Lfm2Config(**COMMON, layer_types=["conv", "full_attention"] * 2),
    "qwen3_next": Qwen3NextConfig(
        **COMMON, head_dim=8, layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
    ),
    "falcon_h1": FalconH1Config(
        **COMMON, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1
    ),
    "jamba": JambaConfig(**COMMON, num_experts=2, attn_layer_period=2, attn_layer_offset=1),
    "bamba": BambaConfig(
        **COMMON, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1,
        attn_layer_indices=[1, 3]
    ),
    "mamba2": Mamba2Config(**MAMBA, num_heads=8, head_dim=8, n_groups=1),
    "mamba": MambaConfig(**MAMBA),
}  # fmt: skip


def target_of(name):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).eval()


CANNOT = {"jamba", "mamba"}  # their forwards forget the state when several tokens follow it


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - CANNOT))
def test_chains_over_a_recurrent_state(name):
    for seed in range(3):
        ids = torch.randint(1, 30, (1, 9), generator=torch.Generator().manual_seed(seed))
        same_with_an_oracle(target_of(name), input_ids=ids, max_new_tokens=40)


@pytest.mark.parametrize("name", ["bamba", "falcon_h1", "lfm2"])
def test_states_in_float32_of_a_float64_target(name):
    """It reads as exactly as they are; it was refused."""
    same_with_an_oracle(
        target_of(name).double(), input_ids=torch.tensor([[5, 9, 2, 7]]), max_new_tokens=20
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - CANNOT))
def test_prompts_in_pieces(name, monkeypatch):
    """The state goes on from piece to piece."""
    target, seen = target_of(name), []
    ids = torch.randint(1, 30, (1, 29), generator=torch.Generator().manual_seed(1))
    plain = target.generate(ids, do_sample=False, max_new_tokens=30)
    forward = target.forward

    @functools.wraps(forward)
    def watched(input_ids, *args, **kwargs):
        seen.append(input_ids.shape[1])
        return forward(input_ids, *args, **kwargs)

    monkeypatch.setattr(target, "forward", watched)
    check_reads(target, several=False)  # once for each target as it is called
    seen.clear()
    options = {"do_sample": False, "max_new_tokens": 30, "prefill_chunk_size": 6}
    assert_lossless(target, near_copy(tiny_model()), ids, plain=plain, **options)
    assert [size for size in seen if size > 4][:4] == [6] * 4


@pytest.mark.parametrize("name", sorted(CANNOT))
def test_targets_that_forget_their_state_are_refused(name, prompt):
    drafter = near_copy(tiny_model())
    with pytest.raises(ValueError, match="does not read drafts as it reads tokens one by one"):
        target_of(name).generate(prompt, do_sample=False, max_new_tokens=5, assistant_model=drafter)


def test_recurrent_targets_take_drafters_at_the_front_door(prompt):
    target = target_of("qwen3_next")
    drafter = near_copy(tiny_model())
    assert_lossless(target, drafter, prompt, max_new_tokens=20)


class SometimesRight(hf_paradraft.Drafter, hf_paradraft.Drafting):
    """Guesses up to five tokens; each is right with a chance of `rate`, and now and then it says
    nothing for a sequence.
    """

    def __init__(self, answers, padding, rate):
        self.speculation_config = hf_paradraft.SpeculationConfig(
            5, tree_size=None, never_slower=False
        )
        self.answers, self.padding, self.rate = answers, padding, rate
        self.random = torch.Generator().manual_seed(0)

    def start_drafting(self, target, max_length):
        return self

    def propose(self, prefixes):
        return [self.guess(index, prefix) for index, prefix in enumerate(prefixes)]

    def guess(self, index, prefix):
        length = prefix.ids.shape[1] + self.padding[index]
        count = min(prefix.room, int(torch.randint(0, 6, (), generator=self.random)))
        tokens = self.answers[index, length : length + count].clone()
        wrong = torch.rand(len(tokens), generator=self.random) >= self.rate
        return hf_paradraft.GuessedTokens(torch.where(wrong, tokens ^ 1, tokens))


RAGGED = [[3, 5, 7, 11, 13, 17, 19, 2, 4], [9, 2, 4], [1], [8, 6, 4, 2, 1]]


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        pytest.param(
            name, rate, marks=() if rate == 0.5 or name == "qwen3_next" else pytest.mark.nightly
        )
        for name in ("bamba", "falcon_h1", "lfm2", "qwen3_next")
        for rate in (0.0, 0.5, 1.0)
    ],
)
def test_chains_over_the_states_of_a_batch(name, rate):
    """Each sequence goes at its own pace, with its own state, whatever is rejected."""
    target = target_of(name)
    inputs = left_padded(RAGGED)
    for sampling in ({"do_sample": False}, {"do_sample": True}):
        torch.manual_seed(3)
        plain = target.generate(**inputs, **sampling, max_new_tokens=24)
        drafter = SometimesRight(plain, [0, 6, 8, 4], rate)
        torch.manual_seed(3)
        drafted = target.generate(**inputs, **sampling, max_new_tokens=24, assistant_model=drafter)
        assert torch.equal(plain, drafted)
        assert (drafter.last_stats.mean_emitted > 1.8) == (rate == 1)


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next"])
@pytest.mark.parametrize("unread", [0, 3, 32])
def test_the_cache_of_a_batch_is_plain_decodings(name, unread, monkeypatch):
    """Texts that end early stand before padding, as plain decoding reads it; the second turn over
    the cache is the same.
    """
    monkeypatch.setattr(verify, "MOST_UNREAD", unread)
    target, inputs = target_of(name), left_padded(RAGGED)
    options = {"do_sample": False, "return_dict_in_generate": True}
    free = target.generate(**inputs, do_sample=False, max_new_tokens=24)
    ends = free[1, 14].item()  # the second text ends behind six tokens, if no other does before
    plain = target.generate(**inputs, **options, max_new_tokens=24, eos_token_id=ends)
    drafter = SometimesRight(free, [0, 6, 8, 4], 0.7)
    drafted = target.generate(
        **inputs, **options, max_new_tokens=24, eos_token_id=ends, assistant_model=drafter
    )
    assert torch.equal(plain.sequences, drafted.sequences)
    length = plain.sequences.shape[1]
    more = {
        "input_ids": torch.cat([plain.sequences, torch.full((4, 2), 5)], 1),
        "attention_mask": torch.cat(
            [inputs["attention_mask"], torch.ones(4, length + 2 - 9, dtype=torch.long)], 1
        ),
    }
    second = [
        target.generate(**more, **{CACHE: result[CACHE]}, do_sample=False, max_new_tokens=12,
        output_logits=True,
                        return_dict_in_generate=True, pad_token_id=0)
        for result in (plain, drafted)
    ]  # fmt: skip
    assert torch.equal(second[0].sequences, second[1].sequences)
    torch.testing.assert_close(second[0].logits[0], second[1].logits[0], rtol=1e-3, atol=1e-3)


def test_compiled_calls_and_criteria_with_a_memory():
    """Neither has a static cache of recurrent layers; and a state cannot give tokens back that a
    criterion takes.
    """
    target, inputs = target_of("qwen3_next"), left_padded(RAGGED)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    drafter = SometimesRight(plain, [0, 6, 8, 4], 0.7)
    drafter.speculation_config.compile = True
    assert torch.equal(
        plain,
        target.generate(**inputs, do_sample=False, max_new_tokens=12, assistant_model=drafter),
    )
    drafter.speculation_config.compile = False

    class Counts(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 14)

    options = {**inputs, "do_sample": False, "max_new_tokens": 12, "stopping_criteria": [Counts()]}
    stopped = target.generate(**options)
    assert torch.equal(stopped, target.generate(**options, assistant_model=drafter))
    with pytest.raises(ValueError, match="call generate once per prompt"):
        target.generate(**options, assistant_model=drafter, return_dict_in_generate=True)


def test_batches_of_targets_whose_layers_take_no_masks_are_refused(prompt):
    with pytest.raises(ValueError, match="one prompt at a time"):
        target_of("mamba2").generate(
            prompt.repeat(2, 1),
            do_sample=False,
            max_new_tokens=5,
            assistant_model=near_copy(tiny_model()),
        )


def test_a_trial_that_ran_out_of_memory_decides_nothing(prompt, monkeypatch):
    target, drafter = target_of("qwen3_next"), near_copy(tiny_model())
    with monkeypatch.context() as patch:
        patch.setattr(
            target.model,
            "forward",
            lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError()),
        )
        with pytest.raises(torch.OutOfMemoryError):
            target.generate(prompt, do_sample=False, max_new_tokens=5, assistant_model=drafter)
    target.generate(prompt, do_sample=False, max_new_tokens=5, assistant_model=drafter)


def test_a_refused_batch_leaves_the_callers_cache_as_it_was():
    """Its windows would keep what they push out, and plain decoding reads other states then."""
    config_type = getattr(transformers, "ZayaConfig", None)
    if config_type is None:
        pytest.skip("this transformers has no target with windows next to recurrent states")
    config = config_type(
        **{
            **COMMON,
            "head_dim": 8,
            "layer_types": ["hybrid_sliding", "hybrid"] * 2,
            "sliding_window": 12,
        },
        moe_intermediate_size=16,
        num_experts=2,
    )
    target, drafter = AutoModelForCausalLM.from_config(config).eval(), hf_paradraft.NgramDrafter()
    ids, cache = torch.arange(20).view(2, 10), DynamicCache(config=config)
    with pytest.raises(
        ValueError, match="one prompt at a time with a drafter, for its layers' sake"
    ):
        target.generate(
            ids, do_sample=False, max_new_tokens=4, assistant_model=drafter, **{CACHE: cache}
        )
    assert not any(layer.record_past for layer in cache.layers)


OTHERS = {
    **CONFIGS,
    "openai-gpt": OpenAIGPTConfig(vocab_size=32, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "bert": BertConfig(**{**SHARED, "pad_token_id": 0}),
}


@pytest.mark.parametrize("name", sorted(OTHERS.keys() - {"bert"}))
def test_models_that_cannot_draft_are_refused(name, prompt):
    torch.manual_seed(0)
    drafter = hf_paradraft.PardDrafter.from_causal_lm(
        AutoModelForCausalLM.from_config(OTHERS[name]), mask_token_id=MASK
    )
    with pytest.raises(ValueError, match="takes no explicit masks"):
        tiny_model().generate(prompt, do_sample=False, max_new_tokens=5, assistant_model=drafter)


@pytest.mark.parametrize(
    ("name", "message"), [("openai-gpt", "cannot drop tokens"), ("bert", "is_decoder=True")]
)
def test_targets_that_cannot_verify_are_refused(name, message, prompt):
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(OTHERS[name])
    with pytest.raises(ValueError, match=message):
        target.generate(
            prompt, do_sample=False, max_new_tokens=5, assistant_model=near_copy(tiny_model())
        )


class Wrapped(LlamaForCausalLM):
    """Takes its cache without naming it."""

    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids, **kwargs)


def test_decoders_with_misleading_configs_are_served(prompt):
    """Old files of real decoders say `is_decoder: false`; and a derived class may not name its
    arguments.
    """
    gpt2 = tiny_model("gpt2")
    gpt2.config.is_decoder = False
    for target in (gpt2, Wrapped(tiny_model().config).eval()):
        same_with_an_oracle(target, input_ids=prompt)
