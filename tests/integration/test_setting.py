"""A drafter that is set: whoever calls `generate` gets the target's own text, and no call breaks
that works without it.
"""

import copy
import pickle
import threading

import pytest
import torch
from lossless import left_padded
from peft import LoraConfig, get_peft_model
from tiny import make_tokenizer, near_copy, tiny_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    Lfm2Config,
    Lfm2ForCausalLM,
    StoppingCriteria,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

import hf_paradraft
from hf_paradraft import set_drafter
from hf_paradraft.integration.setting import drafter_on

PROMPTS = {
    "input_ids": torch.tensor([[1, 2, 3, 4, 5]]),
    "attention_mask": torch.ones(1, 5, dtype=torch.long),
}


@pytest.fixture
def pair():
    target = tiny_model()
    return target, near_copy(target, 0.01)


def text(model, **options):
    torch.manual_seed(3)
    return model.generate(
        **{**PROMPTS, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **options}
    )


def drafted(drafter, call):
    """What a call gives, and whether the drafter had a part in it."""
    drafter.last_stats = None
    result = call()
    return result, drafter.last_stats is not None and drafter.last_stats.num_drafted > 0


def test_it_stays_until_it_is_taken_away(pair):
    target, drafter = pair
    plain, sampled = text(target), text(target, do_sample=True)
    set_drafter(target, drafter)
    for expected, options in ((plain, {}), (sampled, {"do_sample": True})):
        got, took_part = drafted(drafter, lambda options=options: text(target, **options))
        assert torch.equal(got, expected)
        assert took_part
    set_drafter(target, None)
    assert not drafted(drafter, lambda: text(target))[1]


def test_for_a_while_and_one_in_the_place_of_another(pair):
    target, first = pair
    second = hf_paradraft.NgramDrafter()
    with set_drafter(target, first) as entered:
        assert entered is first
        with set_drafter(target, second):
            assert not drafted(first, lambda: text(target))[1]
            assert second.last_stats is not None
        assert drafted(first, lambda: text(target))[1]
        with set_drafter(target, None):
            assert not drafted(first, lambda: text(target))[1]
    assert not drafted(first, lambda: text(target))[1]
    set_drafter(target, first)
    set_drafter(target, second)
    assert not drafted(first, lambda: text(target))[1]
    set_drafter(target, None)


def test_an_assistant_of_the_call_wins(pair):
    target, drafter = pair
    other = near_copy(target, 0.02)
    with set_drafter(target, drafter):
        assert not drafted(drafter, lambda: text(target, assistant_model=other))[1]
        assert other.last_stats.num_drafted
        assert not drafted(drafter, lambda: text(target, prompt_lookup_num_tokens=3))[1]
        stock = tiny_model(seed=5)
        assert torch.equal(
            text(target, assistant_model=stock), text(target, assistant_model=drafter)
        )
        with pytest.raises(ValueError, match="num_beams"):
            text(target, assistant_model=other, num_beams=2)


class Heard(BaseStreamer):
    def __init__(self):
        self.ids = []

    def put(self, value):
        self.ids.append(value.flatten().tolist())

    def end(self):
        self.ids.append("end")


SERVED_PLAINLY = {
    "beams": (lambda: {"num_beams": 2}, "num_beams is 2"),
    "sampled beams": (lambda: {"num_beams": 2, "do_sample": True}, "num_beams is 2"),
    "no cache": (lambda: {"use_cache": False}, "needs the target's key-value cache"),
    "hidden states": (
        lambda: {"output_hidden_states": True, "return_dict_in_generate": True},
        "does not collect attentions",
    ),
    "right padding": (
        lambda: left_padded([[1, 2, 3]]) | {"attention_mask": torch.tensor([[1, 1, 0]])},
        "padded on the right",
    ),
}


@pytest.mark.parametrize("name", SERVED_PLAINLY)
def test_what_the_loop_cannot_serve_is_decoded_plainly(name, pair, caplog):
    target, drafter = pair
    make, said = SERVED_PLAINLY[name]
    results = []
    for assistant in (None, drafter):
        set_drafter(target, assistant)
        streamer = None if "beams" in name else Heard()
        out = text(target, **make(), **({} if streamer is None else {"streamer": streamer}))
        results.append((getattr(out, "sequences", out), None if streamer is None else streamer.ids))
    set_drafter(target, None)
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]  # the prompt is streamed once
    assert said in caplog.text
    assert caplog.text.count("Decoding plainly") == 1


def test_a_processor_and_a_criterion_are_asked_once_where_a_call_is_decoded_plainly(pair):
    target, drafter = pair
    calls = []

    def processor(ids, scores):
        calls.append(ids.shape[1])
        return scores

    with set_drafter(target, drafter):
        text(target, logits_processor=[processor], use_cache=False)
    assert calls == [*range(5, 5 + len(calls))]


def test_an_encoder_decoder_goes_on_as_it_is(caplog):
    config = T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=4,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    target = T5ForConditionalGeneration(config).eval()
    plain = text(target, max_new_tokens=6)
    with set_drafter(target, hf_paradraft.NgramDrafter()):
        assert torch.equal(text(target, max_new_tokens=6), plain)
    assert "Decoding plainly" in caplog.text


def test_what_is_wrapped_around_the_target(pair):
    target, drafter = pair
    adapted = get_peft_model(
        target, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    ).double()
    plain = text(adapted)

    class Parallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    for wrapped in (adapted, Parallel(adapted), target):
        with set_drafter(wrapped, drafter):
            got, took_part = drafted(drafter, lambda: text(adapted))
        assert torch.equal(got, plain)
        assert took_part
    with pytest.raises(ValueError, match="Linear holds none"):
        set_drafter(nn.Linear(1, 1), drafter)


def test_copies_pickles_and_folders_have_none_of_it(pair, tmp_path):
    target, drafter = pair
    with set_drafter(target, drafter):
        target.save_pretrained(tmp_path)
        others = (
            copy.deepcopy(target),
            pickle.loads(pickle.dumps(target)),
            AutoModelForCausalLM.from_pretrained(tmp_path),
        )
        for other in others:
            assert not drafted(drafter, lambda other=other: text(other))[1]
        assert drafted(drafter, lambda: text(target))[1]


def test_wrong_drafters_are_refused_where_they_are_set(pair):
    target, _ = pair
    with pytest.raises(ValueError, match="is no drafter"):
        set_drafter(target, tiny_model())
    other = hf_paradraft.Eagle3Drafter.from_target(tiny_model(num_hidden_layers=8, hidden_size=64))
    with pytest.raises(ValueError, match="made for another target"):
        set_drafter(target, other)
    assert torch.equal(text(target), text(target))


def test_pipelines_draft_with_it(pair):
    target, drafter = pair
    pipe = pipeline("text-generation", model=target, tokenizer=make_tokenizer())
    plain = pipe("a b c", max_new_tokens=12, do_sample=False)
    with set_drafter(target, drafter):
        got, took_part = drafted(drafter, lambda: pipe("a b c", max_new_tokens=12, do_sample=False))
    assert got == plain
    assert took_part


def test_a_cache_that_goes_on(pair):
    target, drafter = pair
    turns = []
    for assistant in (None, drafter):
        set_drafter(target, assistant)
        cache = DynamicCache(config=target.config)
        first = text(target, **{hf_paradraft.names.OUTPUT_CACHE: cache})
        more = torch.cat([first, torch.tensor([[4, 5]])], 1)
        options = {"input_ids": more, "attention_mask": torch.ones_like(more)}
        turns.append(text(target, **options, **{hf_paradraft.names.OUTPUT_CACHE: cache}))
    set_drafter(target, None)
    assert torch.equal(*turns)


def test_threads_share_it(pair):
    target, drafter = pair
    plain, got = text(target), []
    with set_drafter(target, drafter):
        threads = [threading.Thread(target=lambda: got.append(text(target))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(got) == 4
    assert all(torch.equal(plain, other) for other in got)


def test_rows_of_a_trimmed_head_follow_the_target():
    """A target that is trained on changes in place."""
    target = tiny_model(num_hidden_layers=8)
    drafter = hf_paradraft.Eagle3Drafter.from_target(
        target, vocabulary=torch.arange(3, 20)
    ).double()
    drafter.attach(target)
    states = torch.randn(2, 32, dtype=torch.float64)
    drafter.logits(states)
    with torch.no_grad():
        target.get_output_embeddings().weight.mul_(0.5).add_(0.1)
    expected = states @ target.get_output_embeddings().weight[3:20].T
    torch.testing.assert_close(drafter.logits(states), expected)


def test_a_call_that_is_decoded_plainly_has_no_statistics(pair):
    target, drafter = pair
    with set_drafter(target, drafter):
        assert drafted(drafter, lambda: text(target))[1]
        text(target, use_cache=False)
        assert drafter.last_stats is None


def test_other_ways_of_a_call_are_its_own(pair):
    """Continuous batching takes no assistant; DoLa, whatever it says today, is not greedy decoding;
    arguments come by place.
    """
    target, drafter = pair
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    # It takes nine tenths of the machine's memory unless it is told how much.
    room = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    on_pages = {"cache_implementation": "paged", "continuous_batching_config": room, **options}
    paged = target.generate(PROMPTS["input_ids"], **on_pages)
    plain = text(target, max_new_tokens=8)
    with set_drafter(target, drafter):
        assert torch.equal(paged, target.generate(PROMPTS["input_ids"], **on_pages))
        with pytest.raises(ValueError, match="Dola"):
            text(target, dola_layers="low")
        places = (PROMPTS["input_ids"], None, None, None, None, None, None, None)
        assert torch.equal(target.generate(*places, **options), plain)
    with pytest.raises(ValueError, match="dola_layers is low"):
        text(target, dola_layers="low", assistant_model=drafter)


def test_an_overlapped_drafter_breaks_no_call(pair):
    drafter = pair[1]
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        4, None, overlap=True, never_slower=False
    )
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 32,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
    }
    other = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    for target, options in ((pair[0], {"use_cache": False}), (other, {"max_new_tokens": 4})):
        plain = text(target, **options)
        with set_drafter(target, drafter):
            assert torch.equal(text(target, **options), plain)


def test_a_refusal_inside_a_call_is_not_its_own(pair):
    target, drafter = pair
    asked = []

    class Nested(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            asked.append(input_ids.shape[1])
            target.generate(
                PROMPTS["input_ids"], num_beams=2, max_new_tokens=2, assistant_model=drafter
            )
            return torch.zeros(len(input_ids), dtype=torch.bool)

    with set_drafter(target, drafter), pytest.raises(ValueError, match="num_beams is 2"):
        text(target, stopping_criteria=[Nested()])
    assert len(asked) == 1


def test_a_drafter_of_one_text_at_a_time(caplog):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = Lfm2Config(
        **sizes, num_key_value_heads=2, layer_types=["conv", "full_attention"], pad_token_id=0
    )
    target = Lfm2ForCausalLM(config).double().eval()
    batch = left_padded([[1, 2, 3], [4, 5]])
    plain = target.generate(**batch, max_new_tokens=6, do_sample=False)
    with set_drafter(target, near_copy(target, 0.01)):
        assert torch.equal(target.generate(**batch, max_new_tokens=6, do_sample=False), plain)


def test_blocks_put_back_what_is_set_when_they_begin(pair):
    target, first = pair
    second, third = near_copy(tiny_model(), seed=5), near_copy(tiny_model(), seed=6)
    with set_drafter(target, first):
        late = set_drafter(target, second)
    with late:
        assert drafter_on(target) is second
    assert drafter_on(target) is None
    block = set_drafter(target, first)
    set_drafter(target, second)
    with block:
        assert drafter_on(target) is first
        with block:
            assert drafter_on(target) is first
        assert drafter_on(target) is first
    assert drafter_on(target) is second
    with set_drafter(target, third):
        assert drafter_on(target) is third
    assert drafter_on(target) is second
    set_drafter(target, None)
