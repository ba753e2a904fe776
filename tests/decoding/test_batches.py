"""Rows of a batch decode as they would alone, each at its own pace."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless import assert_lossless
from tiny import ARCHITECTURES, EOS, near_copy, tiny_model, with_prompts
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

from hf_paradraft import NgramDrafter, ParallelSpecDrafter, PpdDrafter, SpeculationConfig
from hf_paradraft.decoding.verify import Verifier

MIXED = Gemma3TextConfig(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention",
    "sliding_attention"],
    initializer_range=0.3, eos_token_id=EOS, bos_token_id=None, pad_token_id=0,
    max_position_embeddings=256,
)  # fmt: skip
torch.manual_seed(0)
TARGETS = {name: tiny_model(name) for name in ARCHITECTURES} | {
    "mixed windows": AutoModelForCausalLM.from_config(MIXED).eval()
}
PAIRS = {name: (target, near_copy(target, 0.04)) for name, target in TARGETS.items()}


def left_padded(prompts):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def prompts_of(sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, EOS, (size,), generator=generator).tolist() for size in sizes]


@pytest.mark.slow
@settings(max_examples=48, deadline=None)
@given(
    st.sampled_from(list(PAIRS)),
    st.lists(st.lists(st.integers(1, EOS - 1), min_size=1, max_size=14), min_size=1, max_size=5),
    st.integers(1, 30),
    st.integers(0, 9),
    st.sampled_from([None, 1, 5, 20]),
    st.sampled_from([None, "static"]),
    st.sampled_from(
        [{}, {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 3}, {"min_new_tokens": 6}]
    ),
)
def test_every_sequence_gets_what_it_gets_alone(name, prompts, new, depth, size, cache, options):
    target, drafter = PAIRS[name]
    drafter.speculation_config.num_draft_tokens, drafter.speculation_config.tree_size = depth, size
    options = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 0, **options}
    together = target.generate(
        **left_padded(prompts), assistant_model=drafter, cache_implementation=cache, **options
    )
    width = max(map(len, prompts))
    # n-grams of padding count too, in plain batches as in ours
    if "no_repeat_ngram_size" in options:
        assert torch.equal(together, target.generate(**left_padded(prompts), **options))
        return
    for row, prompt in zip(together, prompts, strict=True):
        alone = target.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        answer = row[width:].tolist()
        assert answer[: len(alone)] == alone
        assert set(answer[len(alone) :]) <= {0}


@pytest.mark.parametrize("keeps_cache", [False, True])
@pytest.mark.parametrize("drafter", [PAIRS["llama"][1], NgramDrafter()])
def test_texts_that_ended_leave_the_forward(drafter, keeps_cache, monkeypatch):
    """They stay where the caller sees the cache, which is plain decoding's."""
    target, _ = PAIRS["llama"]
    ids = torch.tensor(prompts_of([5] * 4))
    options = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "max_new_tokens": 40,
        "pad_token_id": 0,
        "return_dict_in_generate": keeps_cache,
    }
    end = int(target.generate(ids, **options | {"return_dict_in_generate": False})[0, 9])
    plain = target.generate(ids, eos_token_id=end, **options)
    rows, verify = [], Verifier.verify

    def counted(self, sequences):
        rows.append(len(sequences))
        return verify(self, sequences)

    monkeypatch.setattr(Verifier, "verify", counted)
    drafted = target.generate(ids, eos_token_id=end, assistant_model=drafter, **options)
    if keeps_cache:
        assert rows[-1] == 4
        plain, drafted = plain.sequences, drafted.sequences
    else:
        assert rows[-1] < 4
    assert torch.equal(plain, drafted)


@pytest.mark.parametrize("context", [8, 512])
@pytest.mark.parametrize(
    "make", [near_copy, lambda target: ParallelSpecDrafter.from_target(target, "medusa", 4)]
)
def test_texts_leave_before_their_drafter_was_asked(make, context):
    """There are no positions left to draft for, or no tokens are wanted."""
    target = tiny_model(max_position_embeddings=context)
    ids = torch.randint(1, 29, (5, 9), generator=torch.Generator().manual_seed(0))
    options = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "max_new_tokens": 30,
        "pad_token_id": 0,
    }
    end = int(target.generate(ids, eos_token_id=None, **options)[0, 13])
    plain = target.generate(ids, eos_token_id=end, **options)
    drafted = target.generate(
        ids,
        eos_token_id=end,
        assistant_model=make(target),
        num_assistant_tokens=4 if context == 8 else 0,
        **options,
    )
    assert torch.equal(plain, drafted)


@pytest.mark.parametrize("seed", range(3))
def test_rows_stay_where_code_of_others_knows_them(seed):
    target = tiny_model("llama")
    steering = torch.randn(5, 1, 32, generator=torch.Generator().manual_seed(seed)).double()
    target.lm_head.register_forward_hook(
        lambda _, inputs, output: output + steering[: len(output)] * (len(output) == 5)
    )
    ids = torch.tensor(prompts_of([5] * 5, seed))
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    plain = target.generate(ids, max_new_tokens=30, eos_token_id=None, **options)
    options |= {"max_new_tokens": 30, "eos_token_id": int(plain[0, 12])}
    plain = target.generate(ids, **options)
    assert torch.equal(plain, target.generate(ids, **options, assistant_model=NgramDrafter()))


def test_rows_stay_where_other_inputs_are_by_row():
    config = GPT2Config(
        vocab_size=32, n_embd=32, n_layer=2, n_head=4, n_positions=128, add_cross_attention=True,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    target = GPT2LMHeadModel(config).eval().double()
    ids = torch.tensor(prompts_of([5] * 4))
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    options["encoder_hidden_states"] = torch.randn(4, 6, 32).double()
    plain = target.generate(ids, max_new_tokens=30, **options)
    options |= {"max_new_tokens": 30, "eos_token_id": int(plain[0, 12])}
    plain = target.generate(ids, **options)
    assert (plain[0] == 0).any()
    assert torch.equal(plain, target.generate(ids, **options, assistant_model=NgramDrafter()))


@pytest.mark.parametrize("batch_size", [1, 3, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tree_size", [None, 12])
def test_batches_of_any_size_are_lossless(batch_size, tree_size):
    target, drafter = PAIRS["llama"]
    drafter.speculation_config.num_draft_tokens, drafter.speculation_config.tree_size = 6, tree_size
    prompts = prompts_of([3 + row % 5 for row in range(batch_size)])
    options = {**left_padded(prompts), "do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}
    plain, drafted = target.generate(**options), target.generate(**options, assistant_model=drafter)
    assert torch.equal(plain, drafted)
    stats = drafter.last_stats
    alone = [
        target.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=40).shape[1] - len(ids)
        for ids in prompts
    ]
    assert stats.num_emitted == sum(alone)
    assert stats.num_rounds < max(alone) or max(alone) == 1
    if batch_size > 1:
        assert [row.num_emitted for row in stats.by_row] == alone
        assert max(row.num_rounds for row in stats.by_row) == stats.num_rounds


def test_several_samples_of_one_prompt(prompt):
    target, drafter = PAIRS["llama"]
    drafter.speculation_config.num_draft_tokens, drafter.speculation_config.tree_size = 4, None
    for rule in ("auto", "rejection"):
        drafter.speculation_config.acceptance = rule
        torch.manual_seed(0)
        samples = target.generate(
            prompt,
            do_sample=True,
            num_return_sequences=6,
            max_new_tokens=12,
            assistant_model=drafter,
            pad_token_id=0,
        )
        assert samples.shape[0] == 6
        assert len({tuple(row.tolist()) for row in samples}) > 3
    drafter.speculation_config.acceptance = "auto"


@pytest.mark.slow
def test_samples_of_a_batch_have_the_targets_distribution():
    """The first two tokens of 4,000 samples, drawn eight at a time, against the exact joint
    distribution.
    """
    target = tiny_model(vocab_size=32)
    drafter = near_copy(target, 0.05)
    drafter.speculation_config.num_draft_tokens, drafter.speculation_config.tree_size = 3, 6
    options = {
        "do_sample": True,
        "top_k": 3,
        "temperature": 1.3,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    ids = torch.tensor([[1, 2, 3]])
    torch.manual_seed(0)
    counts = torch.zeros(32, 32)
    for _ in range(10):
        samples = target.generate(
            ids, num_return_sequences=400, max_new_tokens=2, assistant_model=drafter, **options
        )
        counts.index_put_((samples[:, 3], samples[:, 4]), torch.ones(400), accumulate=True)

    def warped(logits):
        logits = logits / 1.3
        return logits.masked_fill(logits < logits.topk(3).values[..., -1:], -torch.inf).softmax(-1)

    expected = torch.zeros(32, 32)
    with torch.no_grad():
        first = warped(target(ids).logits[0, -1])
        for token in first.nonzero()[:, 0].tolist():
            expected[token] = first[token] * warped(
                target(torch.tensor([[1, 2, 3, token]])).logits[0, -1]
            )
    assert (counts[expected == 0] == 0).all()
    cells = expected > 0
    statistic = (
        ((counts[cells] - 4000 * expected[cells]) ** 2 / (4000 * expected[cells])).sum().item()
    )
    assert int(cells.sum()) == 9
    assert statistic < 26.1  # chi-square, 8 degrees of freedom, p = 0.001


def test_scores_of_a_batch():
    target, drafter = PAIRS["llama"]
    drafter.speculation_config.num_draft_tokens, drafter.speculation_config.tree_size = 5, 8
    options = {
        "do_sample": False,
        "max_new_tokens": 12,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    options |= {"eos_token_id": None, "pad_token_id": 0}
    batch = left_padded(prompts_of([4, 7, 2]))
    plain = target.generate(**batch, **options)
    drafted = target.generate(**batch, **options, assistant_model=drafter)
    torch.testing.assert_close(
        torch.stack(plain.logits), torch.stack(drafted.logits), rtol=1e-3, atol=1e-3
    )


def test_criteria_stop_each_sequence_as_plain_decoding_does():
    target, drafter = PAIRS["llama"]
    drafter.speculation_config.num_draft_tokens, drafter.speculation_config.tree_size = 5, None

    class Small(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] < 8

    prompts = prompts_of([5, 5, 5, 5])
    options = {
        "do_sample": False,
        "max_new_tokens": 25,
        "pad_token_id": 0,
        "stopping_criteria": [Small()],
    }
    together = target.generate(**left_padded(prompts), assistant_model=drafter, **options)
    for row, prompt in zip(together, prompts, strict=True):
        alone = target.generate(torch.tensor([prompt]), **options)[0].tolist()
        assert row[: len(alone)].tolist() == alone


class Silent(BaseStreamer):
    def put(self, value):
        pass

    def end(self):
        pass


def test_a_streamer_is_for_one_text():
    target, drafter = PAIRS["llama"]
    with pytest.raises(ValueError, match="streamer"):
        target.generate(
            **left_padded(prompts_of([3, 4])),
            do_sample=False,
            assistant_model=drafter,
            streamer=Silent(),
        )


@pytest.mark.parametrize("size", [None, 6, "auto"])
@pytest.mark.parametrize("new", [15, 16, 17])
def test_a_batch_fills_learned_positions(size, new):
    """Rows of a sequence that has ended stood behind the last position, for which there is no
    embedding.
    """
    target = tiny_model("gpt2", max_position_embeddings=32)
    ids = torch.randint(1, 30, (3, 16), generator=torch.Generator().manual_seed(0))
    for drafter in (near_copy(target, 0.01), NgramDrafter()):
        drafter.speculation_config = SpeculationConfig(5, size, never_slower=False)
        for ends in (None, 7):
            assert_lossless(
                target, drafter, ids, max_new_tokens=new, eos_token_id=ends, pad_token_id=0
            )


def test_prompt_rows_stand_within_learned_positions():
    """They guess for the round after, for which a text at its end has no positions."""
    target = with_prompts(tiny_model("gpt2", max_position_embeddings=32), 3)
    drafter = PpdDrafter.from_model(target)
    drafter.speculation_config.never_slower = False
    ids = torch.randint(1, 30, (2, 16), generator=torch.Generator().manual_seed(0))
    assert_lossless(target, drafter, ids, max_new_tokens=16, eos_token_id=None)


def test_right_padding_is_refused():
    target, drafter = PAIRS["llama"]
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    with pytest.raises(ValueError, match="padding_side"):
        target.generate(
            torch.tensor([[1, 2, 3], [1, 2, 0]]),
            attention_mask=mask,
            do_sample=False,
            assistant_model=drafter,
        )
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    with pytest.raises(ValueError, match="all 0"):
        target.generate(
            torch.tensor([[1, 2, 3], [0, 0, 0]]),
            attention_mask=mask,
            do_sample=False,
            assistant_model=drafter,
        )
