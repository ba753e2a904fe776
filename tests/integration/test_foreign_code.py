"""Code of others around a call: processors, criteria, drafters that draw, hooks, caches and
attention of their own.
"""

import copy
import gc
import pickle
import time

import pytest
import torch
from tiny import ARCHITECTURES, CACHE, near_copy, tiny_model
from transformers import (
    AttentionInterface,
    DynamicCache,
    GenerationMixin,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    StoppingCriteria,
    TemperatureLogitsWarper,
)

import hf_paradraft
from hf_paradraft.integration.setting import drafter_on

IDS = torch.tensor([[1, 2, 3, 4, 1, 2, 3]])
WITHOUT_A_REST = hf_paradraft.SpeculationConfig(6, None, never_slower=False)


def texts(target, drafter, seed=None, ids=IDS, **options):
    """Plain, and with the drafter; options that are functions are called for each."""
    made = []
    for assistant in (None, drafter):
        torch.manual_seed(seed or 0)
        own = {name: value() if callable(value) else value for name, value in options.items()}
        own = {
            "max_new_tokens": 24,
            "eos_token_id": None,
            "pad_token_id": 0,
            "do_sample": seed is not None,
            **own,
        }
        made.append(target.generate(ids, assistant_model=assistant, **own))
    return made


def same(*args, **options):
    return torch.equal(*texts(*args, **options))


class Cooling(TemperatureLogitsWarper):
    """Colder with each token that it is asked about."""

    def __init__(self):
        super().__init__(1.0)
        self.count = 0

    def __call__(self, ids, scores):
        self.count += 1
        return scores / (1 + 2 * self.count / ids.shape[1])


@pytest.mark.parametrize("size", [None, 9])
def test_what_is_derived_from_a_temperature_may_remember(size):
    target, drafter = tiny_model(), near_copy(tiny_model(), 0.3)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, size, never_slower=False)
    for seed in range(1, 4):
        assert same(target, drafter, seed, logits_processor=lambda: [Cooling()])


class Draws(hf_paradraft.NgramDrafter):
    """A drafter that draws random numbers of torch's own generator."""

    def start_drafting(self, target, max_length):
        drafting = super().start_drafting(target, max_length)
        propose = drafting.propose
        drafting.propose = lambda prefixes: [torch.rand(3), propose(prefixes)][1]
        return drafting


def with_dropout(target):
    drafter = hf_paradraft.AutoregressiveDrafter(
        GPT2LMHeadModel(ARCHITECTURES["gpt2"]()).double().train()
    )
    drafter.speculation_config = WITHOUT_A_REST
    return drafter


@pytest.mark.parametrize(
    "drafter_of", [with_dropout, lambda target: Draws(speculation_config=WITHOUT_A_REST)]
)
@pytest.mark.parametrize("rows", [1, 2])
def test_what_a_drafter_draws_is_none_of_the_targets(drafter_of, rows):
    target = tiny_model("gpt2")
    drafter = drafter_of(target)
    for seed in range(1, 4):
        states = []
        for assistant in (None, drafter):
            torch.manual_seed(seed)
            text = target.generate(
                IDS.repeat(rows, 1),
                assistant_model=assistant,
                do_sample=True,
                max_new_tokens=20,
                eos_token_id=None,
                pad_token_id=0,
            )
            states.append((text.tolist(), torch.get_rng_state().tolist()))
        assert states[0] == states[1]


class Maybe(StoppingCriteria):
    """Stops a text now and then."""

    def __call__(self, ids, scores, **kwargs):
        return torch.rand(len(ids)) < 0.05


def test_a_criterion_that_draws_in_a_batch():
    drafter = hf_paradraft.NgramDrafter(speculation_config=WITHOUT_A_REST)
    for seed in range(1, 5):
        assert same(
            tiny_model(), drafter, seed, ids=IDS.repeat(2, 1), stopping_criteria=lambda: [Maybe()]
        )


def misreads(target):
    with pytest.raises(ValueError, match="as it reads tokens one by one"):
        texts(target, near_copy(tiny_model()))


def test_attention_of_ones_own_under_a_known_name(monkeypatch):
    usual = AttentionInterface()["sdpa"]
    target = tiny_model()
    assert same(target, near_copy(target))

    def sharpened(*args, **kwargs):
        output, weights = usual(*args, **kwargs)
        output = output.clone()
        output[:, -1] *= 3
        return output, weights

    AttentionInterface.register("sdpa", sharpened)
    try:
        misreads(target)
    finally:
        AttentionInterface.register("sdpa", usual)


def test_code_that_was_edited_and_kept_its_name():
    def made(edited):
        class MyLlama(LlamaForCausalLM):
            def forward(self, *args, **kwargs):
                output = super().forward(*args, **kwargs)
                if edited:
                    output.logits = torch.cat(
                        [output.logits[:, :-1], output.logits[:, -1:].flip(-1)], 1
                    )
                return output

        return MyLlama(tiny_model().config).double().eval()

    target = made(False)
    assert same(target, near_copy(tiny_model()))
    misreads(made(True))


def test_a_loop_that_was_replaced(monkeypatch):
    target, usual = tiny_model(), GenerationMixin._sample
    assert same(target, near_copy(target))

    def other(self, input_ids, logits_processor, **kwargs):
        logits_processor.append(lambda ids, scores: scores.roll(1, -1))
        return usual(self, input_ids, logits_processor, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_sample", other)
    plain = target.generate(IDS, max_new_tokens=8, do_sample=False)
    with hf_paradraft.set_drafter(target, near_copy(target)):
        assert torch.equal(target.generate(IDS, max_new_tokens=8, do_sample=False), plain)


class Sink(DynamicCache):
    """Keeps the first four tokens and the last eight."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        read = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        if key_states.shape[2] == 1 and layer.keys.shape[2] > 12:
            layer.keys, layer.values = (
                torch.cat([part[:, :, :4], part[:, :, -8:]], 2)
                for part in (layer.keys, layer.values)
            )
        return read


def test_a_cache_that_evicts_is_refused():
    target = tiny_model()
    with pytest.raises(ValueError, match="does not know how to roll back a Sink"):
        texts(target, near_copy(target), **{CACHE: lambda: Sink(config=target.config)})
    plain, _ = texts(target, None, **{CACHE: lambda: Sink(config=target.config)})
    with hf_paradraft.set_drafter(target, near_copy(target)):
        assert torch.equal(
            texts(target, None, **{CACHE: lambda: Sink(config=target.config)})[0], plain
        )


def test_hooks_that_press_long_prompts():
    """As KV cache compression does it: the look's prompt is too short for them."""
    target, prompt = tiny_model(), (torch.arange(60)[None] * 7) % 29

    def press(module, args, kwargs, output):
        if kwargs["hidden_states"].shape[1] > 32:
            layer = kwargs[CACHE].layers[module.layer_idx]
            layer.keys, layer.values = layer.keys[:, :, -32:], layer.values[:, :, -32:]

    drafter = near_copy(tiny_model())
    for layer in target.model.layers:
        layer.self_attn.register_forward_hook(press, with_kwargs=True)
    plain = target.generate(prompt, max_new_tokens=8, do_sample=False)
    with pytest.raises(ValueError, match="drops keys from the target's cache"):
        target.generate(prompt, max_new_tokens=8, do_sample=False, assistant_model=drafter)
    with hf_paradraft.set_drafter(target, drafter):
        assert torch.equal(target.generate(prompt, max_new_tokens=8, do_sample=False), plain)


def test_hooks_of_others_are_told_of(caplog):
    target = tiny_model()
    target.model.layers[1].register_forward_hook(lambda module, args, output: None)
    assert same(target, near_copy(tiny_model()))
    assert "they see a short text too" in caplog.text


def test_the_time_of_a_look_is_not_the_texts(monkeypatch):
    """The first call on a machine had a token, for the time was up."""
    monkeypatch.setattr(
        "hf_paradraft.integration.hook.check_reads", lambda *args, **kwargs: time.sleep(1.0)
    )
    target = tiny_model()
    text = target.generate(
        IDS,
        assistant_model=hf_paradraft.NgramDrafter(),
        max_time=0.9,
        max_new_tokens=5,
        do_sample=False,
    )
    assert text.shape[1] == IDS.shape[1] + 5


@pytest.mark.parametrize("stand_in", [-200, 1000])
@pytest.mark.parametrize("kind", ["pard", "ngram", "memory"])
def test_ids_that_stand_for_images(kind, stand_in):
    """Beside `inputs_embeds`, as LLaVA's first code has them."""
    target = tiny_model()
    ids = torch.tensor([[1, stand_in, stand_in, 4, 1, stand_in, stand_in]])
    embeds = target.get_input_embeddings()(ids.clamp(0, 9))
    memory = hf_paradraft.Memory(100, remember=True) if kind == "memory" else None
    drafter = near_copy(target) if kind == "pard" else hf_paradraft.NgramDrafter(memory=memory)
    drafter.speculation_config = WITHOUT_A_REST
    assert same(target, drafter, ids=ids, inputs_embeds=embeds)
    assert memory is None or len(memory) == 0


def test_a_drafter_with_a_memory_is_copied_and_pickled():
    memory = hf_paradraft.Memory(1000)
    memory.add([1, 2, 3, 4, 5, 6])
    drafter = hf_paradraft.NgramDrafter(memory=memory)
    for again in (copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert again.memory.following([1, 2, 3], 3) == memory.following([1, 2, 3], 3)
        again.memory.add([1, 2, 3, 9])
        assert len(again.memory) == len(memory) + 5
        assert same(tiny_model(), again)


def test_blocks_that_overlap_leave_nothing_set():
    target, first, second = tiny_model(), near_copy(tiny_model()), near_copy(tiny_model())
    one = hf_paradraft.set_drafter(target, first)
    one.__enter__()
    two = hf_paradraft.set_drafter(target, second)
    two.__enter__()
    one.__exit__()
    assert drafter_on(target) is second
    two.__exit__()
    assert drafter_on(target) is None
    gc.collect()


def test_a_compiled_target_holds_its_model():
    target, drafter = tiny_model(), near_copy(tiny_model())
    with hf_paradraft.set_drafter(torch.compile(target, backend="eager"), drafter):
        assert drafter_on(target) is drafter


def test_a_wrapper_that_cannot_be_hashed():
    class Timed:
        __hash__ = None

        def __init__(self, call):
            self.call = call

        def __call__(self, *args, **kwargs):
            return self.call(*args, **kwargs)

    target = tiny_model()
    target.model.layers[0].forward = Timed(target.model.layers[0].forward)
    assert same(target, near_copy(tiny_model()))


def test_a_head_is_trained_with_behind_a_call_in_inference_mode():
    target = tiny_model("llama", num_hidden_layers=7, dtype=torch.float32)
    drafter = hf_paradraft.Eagle3Drafter.from_target(target, vocabulary=torch.arange(20))
    with torch.inference_mode():
        target.generate(IDS, assistant_model=drafter, max_new_tokens=8, do_sample=False)
    states = torch.randn(2, drafter.hidden_size, requires_grad=True)
    drafter.logits(states).sum().backward()
    assert states.grad is not None
