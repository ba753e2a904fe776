"""A call leaves the caller's things as plain decoding leaves them: criteria, processors, texts."""

import threading
from contextlib import nullcontext

import pytest
import torch
from lossless import assert_lossless, left_padded
from tiny import EOS, letters, near_copy, tiny_model
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    Phi3Config,
    StoppingCriteria,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

import hf_paradraft

PROMPTS = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]


class AnyRowSoFar(StoppingCriteria):
    """Remembers by place in the batch which texts held a token, and stops when all have, as
    lm-evaluation-harness does.
    """

    def __init__(self, batch_size, token):
        self.done, self.token = [False] * batch_size, token

    def __call__(self, input_ids, scores, **kwargs):
        for row, done in enumerate(self.done):
            self.done[row] = done or self.token in input_ids[row, -3:].tolist()
        return all(self.done)


class EveryTokenOnce(StoppingCriteria):
    """Stops a text at a token that it has met three times in the whole batch: a memory that all
    texts share.
    """

    def __init__(self):
        self.seen = {}

    def __call__(self, input_ids, scores, **kwargs):
        stops = []
        for token in input_ids[:, -1].tolist():
            self.seen[token] = self.seen.get(token, 0) + 1
            stops.append(self.seen[token] > 3)
        return torch.tensor(stops)


@pytest.mark.parametrize("make", [lambda: AnyRowSoFar(3, 3), EveryTokenOnce])
def test_criteria_with_a_memory_stop_batches_where_plain_decoding_stops(target, make):
    drafter = near_copy(target, 0.05)
    inputs = left_padded(PROMPTS)
    options = {"max_new_tokens": 24, "eos_token_id": None}
    plain = target.generate(**inputs, **options, do_sample=False, stopping_criteria=[make()])
    assert plain.shape[1] < inputs["input_ids"].shape[1] + 24
    assert_lossless(target, drafter, PROMPTS, plain=plain, **options, stopping_criteria=[make()])


@pytest.mark.parametrize("tree_size", [None, 8])
def test_prompts_beyond_a_phi3s_first_context(tree_size):
    """Its class drops an empty cache for such prompts, and plain decoding takes the one that comes
    back.
    """
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    }
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, original_max_position_embeddings=24, initializer_range=0.4,
        eos_token_id=None,
        pad_token_id=0, rope_parameters={**rope, "original_max_position_embeddings": 24,
        "factor": 8.0},
    )  # fmt: skip
    target = AutoModelForCausalLM.from_config(config).double().eval()
    drafter = hf_paradraft.NgramDrafter(
        speculation_config=hf_paradraft.SpeculationConfig(5, tree_size, never_slower=False)
    )
    assert_lossless(target, drafter, torch.arange(45)[None] % 9 + 1, max_new_tokens=20)


class Reader(hf_paradraft.NgramDrafter):
    """Copies, and reads a layer of the target."""

    def needs(self, target):
        return (0,)


def test_prompts_in_pieces_have_one_rotary_scale(monkeypatch):
    """A longrope target that reads a long prompt whole turns all of it by the long factors."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "factor": 8.0,
    }
    target = tiny_model(
        rope_parameters={**rope, "original_max_position_embeddings": 24},
        max_position_embeddings=256,
    )
    monkeypatch.setattr("hf_paradraft.decoding.batch.PIECE", 16)
    ids = torch.randint(1, 30, (1, 40), generator=torch.Generator().manual_seed(3))
    drafter = Reader(speculation_config=hf_paradraft.SpeculationConfig(5, None, never_slower=False))
    assert_lossless(target, drafter, ids, max_new_tokens=12)


def test_a_processor_that_runs_the_target_does_not_change_what_drafters_read(target, prompt):
    """Classifier-free guidance reads another text in between."""
    shown = {}
    for scale in (1.5, None):
        drafter = Reader(
            speculation_config=hf_paradraft.SpeculationConfig(5, None, never_slower=False)
        )
        start = drafter.start_drafting

        def started(*args, scale=scale, start=start):
            drafting = start(*args)
            drafting.observe = lambda seen: shown.setdefault(scale, []).extend(
                part.features[0] for part in seen if part
            )
            return drafting

        drafter.start_drafting = started
        if scale is not None:
            drafted = assert_lossless(
                target, drafter, prompt, max_new_tokens=12, guidance_scale=scale
            )
    states = target(drafted[:, :-1], output_hidden_states=True).hidden_states[1][0]
    torch.testing.assert_close(torch.cat(shown[1.5]), states[: sum(map(len, shown[1.5]))])


def test_a_processor_need_not_be_copied(target, drafter):
    class Locked(LogitsProcessor):
        def __init__(self):
            self.lock = threading.Lock()

        def __call__(self, input_ids, scores):
            return scores

    for prompts in ([[1, 2, 3]], PROMPTS):
        assert_lossless(target, drafter, prompts, logits_processor=[Locked()])


def test_rejection_trees_with_a_penalty_that_leaves_padding_out(target, drafter):
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        4, 6, acceptance="rejection", never_slower=False
    )
    inputs = left_padded(PROMPTS)
    options = {"do_sample": True, "repetition_penalty": 1.3, "max_new_tokens": 10}
    out = target.generate(**inputs, **options, assistant_model=drafter)
    assert out.shape[0] == 3
    assert drafter.last_stats.num_drafted > 0


def test_stop_strings_hold_under_custom_generate(target, drafter):
    tokenizer = letters()
    ids = torch.tensor([[1, 3, 4]])
    text = tokenizer.decode(target.generate(ids, do_sample=False, max_new_tokens=20)[0, 6:8])
    options = {"do_sample": False, "max_new_tokens": 20}
    plain = target.generate(ids, **options, stop_strings=text, tokenizer=tokenizer)
    assert plain.shape[1] < 23
    # transformers (5.23) takes the tokenizer away from calls with a callable: such calls pass the
    # criterion itself.
    options["stopping_criteria"] = [StopStringCriteria(tokenizer, text)]
    assert torch.equal(
        plain,
        target.generate(
            ids, **options, custom_generate=hf_paradraft.speculative_decoding, drafter=drafter
        ),
    )


def test_texts_that_end_at_different_lengths_are_padded_as_plain_decoding_pads_them(target):
    drafter = near_copy(target, 0.02)
    assert_lossless(target, drafter, PROMPTS, eos_token_id=[EOS, 3], max_new_tokens=30)


def test_a_full_context_is_said_once(caplog):
    target = tiny_model(max_position_embeddings=16)
    for _ in range(2):
        assert_lossless(
            target, near_copy(target), [[1, 2, 3]], max_new_tokens=20, eos_token_id=None
        )
    assert caplog.text.count("has positions for 16: beyond them nothing is drafted") == 1
    short = near_copy(tiny_model(max_position_embeddings=24))
    assert_lossless(tiny_model(), short, [[1, 2, 3]], max_new_tokens=40, eos_token_id=None)
    assert "longer than the 24 tokens that the drafter has positions for" in caplog.text


def test_a_criterion_that_counts_what_was_streamed(target, prompt):
    """Tokens are streamed one by one, behind the criteria, as in plain decoding; also where one
    raises.
    """

    class Counted(BaseStreamer):
        def __init__(self):
            self.values = []

        def put(self, value):
            self.values += value.flatten().tolist()

        def end(self):
            self.values.append("end")

    def stop_at(streamer, error):
        class Enough(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                if error is not None and len(streamer.values) >= prompt.shape[1] + 6:
                    raise error
                return torch.full((1,), len(streamer.values) >= prompt.shape[1] + 7)

        return [Enough()]

    for error in (None, ZeroDivisionError()):
        seen = []
        for drafter in (None, near_copy(target, 0.001)):
            streamer = Counted()
            options = {
                "streamer": streamer,
                "stopping_criteria": stop_at(streamer, error),
                "max_new_tokens": 20,
            }
            with nullcontext() if error is None else pytest.raises(ZeroDivisionError):
                target.generate(
                    prompt, do_sample=False, eos_token_id=None, assistant_model=drafter, **options
                )
            seen.append(streamer.values)
        assert seen[0] == seen[1]
