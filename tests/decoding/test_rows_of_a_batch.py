"""Logits processors that know the rows of a batch see it as plain decoding shows it, call for
call.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless import left_padded
from tiny import near_copy, tiny_model
from transformers import (
    Lfm2Config,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hf_paradraft import NgramDrafter, SpeculationConfig

PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 8, 9, 8, 9, 8]]
SHAPES = {"chain": (5, None), "tree": (5, 9), "automatic": (12, "auto")}


class Banned(LogitsProcessor):
    """Each row has its own words that it may not write, and one more with each call; every call is
    kept.
    """

    def __init__(self, rows):
        self.rows, self.calls = rows, []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.clone())
        for row, words in enumerate(self.rows):
            scores[row, [*words, (3 * row + len(self.calls)) % 29]] = -torch.inf
        return scores


def both(target, drafter, processors, seed=0, prompts=PROMPTS, **options):
    """Ids, scores and the generator's state with new processors, plain and drafted."""
    results = []
    for assistant in (None, drafter):
        torch.manual_seed(seed)
        processor = processors()
        out = target.generate(
            **left_padded(prompts), logits_processor=LogitsProcessorList([processor]),
            assistant_model=assistant,
            return_dict_in_generate=True, output_scores=True, **{"max_new_tokens": 30,
            "do_sample": False, **options},
        )  # fmt: skip
        results.append(
            (out.sequences, out.scores, torch.get_rng_state(), getattr(processor, "calls", []))
        )
    return results


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("do_sample", [False, True])
def test_every_row_has_its_own_rule(shape, do_sample):
    target = tiny_model()
    drafter = near_copy(target, 0.01)
    drafter.speculation_config = SpeculationConfig(*SHAPES[shape], never_slower=False)
    drafted = 0
    for seed in range(3):
        options = {
            "do_sample": do_sample,
            **({"temperature": 1.3, "top_k": 20} if do_sample else {}),
        }
        plain, ours = both(
            target, drafter, lambda: Banned([[1, 2], [3], [4, 5, 6]]), seed, **options
        )
        assert torch.equal(plain[0], ours[0])
        assert torch.equal(plain[2], ours[2])
        assert len(plain[3]) == len(ours[3])
        assert all(map(torch.equal, plain[3], ours[3]))
        unfinished = (plain[0][:, 7:] != 0).T
        for step, (expected, scores) in enumerate(zip(plain[1], ours[1], strict=True)):
            torch.testing.assert_close(scores[unfinished[step]], expected[unfinished[step]])
        drafted += drafter.last_stats.mean_emitted > 1
    assert drafted


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(0, 8), st.booleans())
def test_any_batch(seed, rows, ends, do_sample):
    target = tiny_model()
    drafter = near_copy(target, 0.02)
    drafter.speculation_config = SpeculationConfig(4, [None, 7][seed % 2], never_slower=False)
    draw = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(1, 30, (1 + row,), generator=draw).tolist() for row in range(rows)]
    words = [torch.randint(0, 30, (3,), generator=draw).tolist() for _ in prompts]
    options = {"eos_token_id": [*range(ends)] or None, "do_sample": do_sample, "max_new_tokens": 14}
    plain, ours = both(target, drafter, lambda: Banned(words), seed, prompts, **options)
    assert torch.equal(plain[0], ours[0])
    assert all(map(torch.equal, plain[3], ours[3]))
    assert len(plain[3]) == len(ours[3])


class Stops(StoppingCriteria):
    """Stops a row behind a small token, and remembers how often it was asked."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] < 6


def test_a_row_that_a_criterion_stops_is_padding_from_there_on():
    target = tiny_model()
    drafter = near_copy(target, 0.01)
    for ends in (30, None):
        plain, ours = both(
            target,
            drafter,
            lambda: Banned([[1], [2], [3]]),
            stopping_criteria=[Stops()],
            eos_token_id=ends,
        )
        assert torch.equal(plain[0], ours[0])
        assert all(map(torch.equal, plain[3], ours[3]))


def test_transformers_own_processors_of_rows():
    target = tiny_model()
    drafter = near_copy(target, 0.01)
    allowed = [[*range(0, 20)], [*range(10, 30)], [*range(5, 25)]]
    watermark = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 5, 7], context_history_size=32)
    for options in (
        {"prefix_allowed_tokens_fn": lambda row, ids: allowed[row]},
        {"encoder_repetition_penalty": 1.4},
        {"encoder_no_repeat_ngram_size": 2},
        {"guidance_scale": 1.5},
        {"watermarking_config": watermark, "do_sample": True},
    ):
        plain, ours = both(target, drafter, lambda: Banned([[], [], []]), **options)
        assert torch.equal(plain[0], ours[0]), options


def test_a_recurrent_batch():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32,
    }
    config = Lfm2Config(
        **sizes, num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2,
        initializer_range=0.3, eos_token_id=30,
        pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    target = MODEL_FOR_CAUSAL_LM_MAPPING[Lfm2Config](config).double().eval()
    drafter = NgramDrafter(speculation_config=SpeculationConfig(6, None, never_slower=False))
    prompts = [[3, 4, 5, 3, 4, 5], [7, 8, 7, 8, 7, 8], [9, 1, 2, 9, 1, 2]]
    plain, ours = both(target, drafter, lambda: Banned([[1], [2], [3]]), prompts=prompts)
    assert torch.equal(plain[0], ours[0])


@pytest.mark.parametrize("rule", ["rejection", "typical"])
def test_rules_that_look_at_other_texts_are_refused(rule):
    target = tiny_model()
    drafter = near_copy(target)
    drafter.speculation_config = SpeculationConfig(4, None, acceptance=rule)
    with pytest.raises(ValueError, match="may know its rows"):
        both(target, drafter, lambda: Banned([[1], [2], [3]]), do_sample=True)
    target.generate(
        torch.tensor([[1, 2]]),
        assistant_model=drafter,
        do_sample=True,
        logits_processor=[Banned([[1]])],
    )


class Contrast(LogitsProcessor):
    """The first row's scores depend on the second one's, which may have ended."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[0] += 2 * (scores[0] - scores[1])
        return scores


class Finer(LogitsProcessor):
    """Scores in another dtype, which draw other noise."""

    def __call__(self, input_ids, scores):
        return scores.double()


class Noisy(LogitsProcessor):
    """Draws for all rows at once, in the middle of a call's draws."""

    def __call__(self, input_ids, scores):
        return scores + torch.rand_like(scores)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(2, 4),
    st.sampled_from([Contrast, Finer, Noisy]),
    st.booleans(),
    st.booleans(),
)
def test_rows_that_have_ended_go_on_with_padding(seed, rows, kind, do_sample, ends):
    """Then a processor sees of them what plain decoding shows it, and the others' texts are plain
    decoding's.
    """
    target = tiny_model()
    drafter = near_copy(target, 0.02)
    drafter.speculation_config = SpeculationConfig(4, [None, 7][seed % 2], never_slower=False)
    prompts = torch.randint(
        1, 30, (rows, 5), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    options = {
        "do_sample": do_sample,
        "eos_token_id": [*range(3, 10)] if ends else None,
        "max_new_tokens": 20,
    }
    plain, ours = both(target, drafter, kind, seed, prompts, **options)
    assert torch.equal(plain[0], ours[0])
    assert torch.equal(plain[2], ours[2])
    for expected, scores in zip(plain[1], ours[1], strict=True):
        torch.testing.assert_close(scores, expected, check_dtype=False)
    new = (plain[0][:, 5:] != 0).sum() if ends else None
    assert new is None or drafter.last_stats.num_emitted >= int(new)
    assert drafter.last_stats.num_emitted <= rows * 20


class OwnEnd(StoppingCriteria):
    """Ends texts as `EosTokenCriteria` does: plain decoding pads behind it, for it has that
    attribute.
    """

    eos_token_id = torch.tensor([3, 7, 9])

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.eos_token_id)


def test_an_end_of_the_callers_own_pads():
    target = tiny_model()
    options = {
        "max_new_tokens": 20,
        "do_sample": False,
        "eos_token_id": None,
        "stopping_criteria": [OwnEnd()],
    }
    plain = target.generate(**left_padded(PROMPTS), **options)
    assert torch.equal(
        plain,
        target.generate(**left_padded(PROMPTS), **options, assistant_model=near_copy(target, 0.02)),
    )
    assert (plain[:, -1] == 0).any()


def test_statistics_forget_what_a_criterion_took_back():
    class Short(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 12)

    target = tiny_model()
    drafter = near_copy(target, 0.001)
    drafter.speculation_config = SpeculationConfig(4, None, never_slower=False)
    options = {
        "max_new_tokens": 30,
        "do_sample": False,
        "eos_token_id": None,
        "stopping_criteria": [Short()],
    }
    out = target.generate(**left_padded(PROMPTS), **options, assistant_model=drafter)
    assert out.shape[1] == 12
    assert [row.num_emitted for row in drafter.last_stats.by_row] == [5, 5, 5]
    assert drafter.last_stats.num_emitted == 15


def test_statistics_count_no_padding():
    """A row that has ended goes on with padding, which is none of its tokens."""
    target = tiny_model()
    drafter = near_copy(target, 0.001)
    for end in (4, 7, 11):
        drafter.speculation_config = SpeculationConfig(4, None, never_slower=False)
        plain, _ = both(target, drafter, lambda: Banned([[1], [2], [4]]), end - 3, eos_token_id=end)
        texts = plain[0][:, 7:].tolist()
        lengths = [[*text, end].index(end) + 1 for text in texts]
        assert [row.num_emitted for row in drafter.last_stats.by_row] == [
            min(length, 30) for length in lengths
        ]
