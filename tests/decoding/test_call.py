"""A call leaves the caller's things as plain decoding leaves them: criteria, processors, caches."""

import threading
from contextlib import nullcontext

import pytest
import torch
from lossless import assert_lossless, left_padded
from tiny import CACHE, EOS, generate, letters, near_copy, tiny_model
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Lfm2Config,
    LogitsProcessor,
    MistralConfig,
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


@pytest.mark.parametrize("size", [None, 9])
def test_the_second_turn_of_a_batch_continues_the_first(size):
    """A text that ends early leaves its end token, and what plain decoding reads behind it, in the
    cache.
    """
    target = tiny_model()
    drafter = near_copy(target, 0.05)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, size, never_slower=False)
    inputs = left_padded(PROMPTS)
    ends = target.generate(**inputs, do_sample=False, max_new_tokens=20, eos_token_id=None)[
        1, 8
    ].item()
    turns = []
    for assistant in (None, drafter):
        cache = DynamicCache(config=target.config)
        options = {"do_sample": False, "eos_token_id": ends, CACHE: cache}
        first = target.generate(**inputs, max_new_tokens=20, assistant_model=assistant, **options)
        more = torch.cat([first, torch.tensor([[4, 5], [6, 7], [8, 9]])], dim=1)
        mask = torch.cat(
            [inputs["attention_mask"], torch.ones(3, more.shape[1] - 4, dtype=torch.long)], dim=1
        )
        assert cache.get_seq_length() == first.shape[1] - 1
        turns.append(
            target.generate(more, attention_mask=mask, max_new_tokens=12, pad_token_id=0, **options)
        )
    assert torch.equal(*turns)


def test_the_second_turn_of_a_recurrent_target_continues_the_first():
    """Its cache holds what was accepted in the last round too."""
    torch.manual_seed(0)
    layers = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32,
    }
    config = Lfm2Config(
        **sizes,
        **layers,
        initializer_range=0.3,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=None,
    )
    target = AutoModelForCausalLM.from_config(config).double().eval()
    drafter = hf_paradraft.NgramDrafter(
        speculation_config=hf_paradraft.SpeculationConfig(6, None, never_slower=False)
    )
    ids = torch.tensor([[3, 4, 5, 3, 4, 5, 3]])
    for new in range(8, 20):
        turns = []
        for assistant in (None, drafter):
            cache = DynamicCache(config=config)
            options = {"do_sample": False, CACHE: cache}
            first = target.generate(ids, max_new_tokens=new, assistant_model=assistant, **options)
            more = torch.cat([first, torch.tensor([[4, 5]])], dim=1)
            with torch.no_grad():
                turns.append(target(more[:, first.shape[1] - 1 :], **{CACHE: cache}).logits[:, -1])
        torch.testing.assert_close(*turns, rtol=1e-6, atol=1e-6)


class Raises(LogitsProcessor):
    def __init__(self, after):
        self.left = after

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("mine")
        return scores


class RaisesToo(StoppingCriteria):
    def __init__(self, after):
        self.left = after

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("mine")
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("size", [None, 9])
@pytest.mark.parametrize("where", ["processor", "criterion"])
def test_a_call_that_raises_leaves_what_was_accepted_in_the_cache(target, where, size, prompt):
    drafter = near_copy(target, 0.02)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, size, never_slower=False)
    for after in range(3, 12):
        lengths = []
        for assistant in (None, drafter):
            cache = DynamicCache(config=target.config)
            given = (
                {"logits_processor": [Raises(after)]}
                if where == "processor"
                else {"stopping_criteria": [RaisesToo(after)]}
            )
            with pytest.raises(RuntimeError, match="mine"):
                generate(target, assistant, prompt, **{CACHE: cache}, eos_token_id=None, **given)
            lengths.append(cache.get_seq_length())
        assert lengths[0] == lengths[1]


def test_a_batch_that_raises_leaves_an_even_cache(target, prompt):
    """Rows go at their own pace, and the one behind had stale entries."""
    drafter = near_copy(target, 0.05)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, 9, never_slower=False)
    prompts = torch.cat([prompt, prompt.flip(1)])
    options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
    text = target.generate(prompts, **options)
    for after in range(1, 12):
        caches = []
        for assistant in (None, drafter):
            caches.append(DynamicCache(config=target.config))
            given = {
                CACHE: caches[-1],
                "stopping_criteria": [RaisesToo(after)],
                "assistant_model": assistant,
            }
            with pytest.raises(RuntimeError, match="mine"):
                target.generate(prompts, **options, **given)
        plain, drafted = caches
        assert plain.get_seq_length() == drafted.get_seq_length() == prompts.shape[1] + after
        with torch.no_grad():
            target(
                text[:, : plain.get_seq_length()],
                **{CACHE: (read := DynamicCache(config=target.config))},
            )
        for ours, theirs in zip(drafted.layers, read.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys)
            torch.testing.assert_close(ours.values, theirs.values)


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
    monkeypatch.setattr("hf_paradraft.decoding.group.PIECE", 16)
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


def test_a_callers_sliding_cache_goes_on_sliding():
    """It keeps no more tokens than plain decoding leaves in it."""
    config = tiny_model("mistral-sliding").config
    assert isinstance(config, MistralConfig)
    target = tiny_model("mistral-sliding")
    drafter = near_copy(target, 0.02)
    slots = []
    for assistant in (None, drafter):
        cache = DynamicCache(config=config)
        with torch.no_grad():
            target(torch.arange(1, 6)[None], **{CACHE: cache})
        generate(
            target,
            assistant,
            torch.arange(1, 9)[None],
            **{CACHE: cache},
            max_new_tokens=40,
            eos_token_id=None,
        )
        with torch.no_grad():
            target(torch.tensor([[3]]), **{CACHE: cache})
        slots.append(max(layer.keys.shape[-2] for layer in cache.layers))
    assert slots[0] == slots[1]


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
