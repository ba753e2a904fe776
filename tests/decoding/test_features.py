"""Whatever a drafter reads of the target is what a plain forward over the final text gives, token
by token, row by row.
"""

import copy
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless import assert_lossless
from tiny import ARCHITECTURES, CACHE, EOS, Oracle, tiny_model
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, Qwen3NextConfig

import hf_paradraft
from hf_paradraft.decoding.features import Features
from hf_paradraft.drafters.reading.reader import Reader as RaggedReader

TARGETS = {name: tiny_model(name) for name in ARCHITECTURES}
KEYS = (-1, 0, 1, "normed")


def reference(target, ids, mask=None):
    """All hidden states of a text by a forward of its own, by key; the raw last layer by a hook
    before the norm.
    """
    seen = {}
    layers = target.model.layers if hasattr(target, "model") else target.transformer.h
    hook = layers[-1].register_forward_hook(
        lambda module, args, out: seen.update(raw=out if torch.is_tensor(out) else out[0])
    )
    with torch.no_grad():
        states = target(ids[None], output_hidden_states=True, use_cache=False).hidden_states
    hook.remove()
    between = {layer: states[layer + 1][0] for layer in range(len(layers) - 1)}
    return {-1: states[0][0], **between, len(layers) - 1: seen["raw"][0], "normed": states[-1][0]}


class Reader(Oracle):
    """Guesses well, and keeps what it is shown."""

    def __init__(self, answers, padding=None, keys=KEYS, tree_size=7):
        super().__init__(answers, padding)
        self.keys, self.shown = keys, [{} for _ in answers]
        self.speculation_config.tree_size = tree_size

    def needs(self, target):
        return self.keys

    def observe(self, observations):
        for shown, seen in zip(self.shown, observations, strict=True):
            if seen is None:
                continue
            assert set(seen.features) == set(self.keys)
            for key, rows in seen.features.items():
                for position, row in enumerate(rows, seen.begin):
                    assert (key, position) not in shown  # each once, in order
                    shown[key, position] = row.clone()


def check(target, reader, sequences, lengths, begins=None, atol=1e-4):
    """All but the newest token have been read."""
    for row, (shown, length) in enumerate(zip(reader.shown, lengths, strict=True)):
        text = sequences[row, reader.padding[row] : length]
        expected = reference(target, text)
        first = 0 if begins is None else begins[row]
        for key in reader.keys:
            positions = sorted(position for other, position in shown if other == key)
            assert positions == list(range(first, first + len(positions)))
            assert positions[-1] == len(text) - 2
            for position in positions:
                torch.testing.assert_close(
                    shown[key, position], expected[key][position], rtol=1e-3, atol=atol
                )


def generate(target, ids, mask, **options):
    return target.generate(
        ids, attention_mask=mask, do_sample=False, eos_token_id=None, pad_token_id=0, **options
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(list(ARCHITECTURES)),
    st.lists(st.lists(st.integers(1, EOS - 1), min_size=1, max_size=14), min_size=1, max_size=3),
    st.integers(2, 24),
    st.sampled_from([None, 7]),
    st.sampled_from([None, "static"]),
    st.sampled_from([None, 3]),
)
def test_features_are_those_of_the_final_text(name, prompts, new, tree_size, cache, piece):
    target, width = TARGETS[name], max(map(len, prompts))
    padding = [width - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
    mask = torch.tensor(
        [[0] * pad + [1] * len(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
    )
    plain = generate(target, ids, mask, max_new_tokens=new)
    reader = Reader(plain, padding, tree_size=tree_size)
    options = {"max_new_tokens": new, "cache_implementation": cache, "prefill_chunk_size": piece}
    out = generate(target, ids, mask, assistant_model=reader, **options)
    assert torch.equal(plain, out)
    check(target, reader, out, [out.shape[1]] * len(prompts))


def test_sequences_that_ended_bring_no_more_features():
    target = TARGETS["llama"]
    ids = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    plain = target.generate(
        ids, do_sample=False, max_new_tokens=24, attention_mask=torch.ones_like(ids), pad_token_id=0
    )
    end = int(plain[1, 8])  # some token that ends a row
    options = {
        "do_sample": False,
        "max_new_tokens": 24,
        "attention_mask": torch.ones_like(ids),
        "pad_token_id": 0,
        "eos_token_id": end,
    }
    plain = target.generate(ids, **options)
    reader = Reader(plain)
    assert_lossless(target, reader, ids, plain=plain, **options)
    lengths = [
        3 + int((row[3:] == end).nonzero()[0]) + 1 if (row[3:] == end).any() else plain.shape[1]
        for row in plain
    ]
    assert min(lengths) < max(lengths)
    check(target, reader, plain, lengths)


def test_a_filled_cache_has_no_features(caplog):
    from transformers import DynamicCache

    target, ids = TARGETS["qwen3"], torch.arange(1, 11)[None]
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(ids[:, :6], **{CACHE: cache})
    plain = generate(target, ids, torch.ones_like(ids), max_new_tokens=16)
    reader = Reader(plain)
    out = generate(
        target,
        ids,
        torch.ones_like(ids),
        max_new_tokens=16,
        **{CACHE: cache},
        assistant_model=reader,
    )
    assert torch.equal(plain, out)
    check(target, reader, out, [out.shape[1]], begins=[6])
    assert "cache came with are not known" in caplog.text


@pytest.mark.parametrize("piece", [None, 3])
def test_features_of_a_recurrent_target_are_its_own(piece):
    """Accepted tokens are read again behind the state that was put back, and shown once; prompts in
    pieces too.
    """
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16, initializer_range=0.3, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    target = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(1, 9)[None]
    plain = generate(target, ids, torch.ones_like(ids), max_new_tokens=30)
    reader = Reader(plain, keys=(-1, 0, 3, "normed"))
    options = {"max_new_tokens": 30, "prefill_chunk_size": piece}
    out = generate(target, ids, torch.ones_like(ids), assistant_model=reader, **options)
    assert torch.equal(plain, out)
    check(target, reader, out, [out.shape[1]], atol=1e-3)


def test_features_of_scaled_embeddings_and_windows_are_the_targets():
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.3,
    )  # fmt: skip
    target = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(1, 15)[None]
    plain = generate(target, ids, torch.ones_like(ids), max_new_tokens=20)
    reader = Reader(plain)
    out = generate(target, ids, torch.ones_like(ids), max_new_tokens=20, assistant_model=reader)
    assert torch.equal(plain, out)
    check(target, reader, out, [out.shape[1]])


@pytest.mark.slow
@pytest.mark.parametrize("tree_size", [pytest.param(None, marks=pytest.mark.nightly), 7])
def test_features_of_compiled_rounds_are_the_targets(tree_size):
    torch._dynamo.reset()
    target = tiny_model(num_hidden_layers=2)
    ids = torch.arange(1, 6)[None]
    plain = generate(target, ids, torch.ones_like(ids), max_new_tokens=30)
    reader = Reader(plain, tree_size=tree_size)
    reader.speculation_config.compile = True
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(3):
        reader.shown = [{}]
        out = generate(target, ids, torch.ones_like(ids), max_new_tokens=30, assistant_model=reader)
        assert torch.equal(plain, out)
        check(target, reader, out, [out.shape[1]])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 2
    # And one that reads nothing is none the wiser.
    reader.keys = ()
    reader.shown = [{}]
    assert torch.equal(
        plain,
        generate(target, ids, torch.ones_like(ids), max_new_tokens=30, assistant_model=reader),
    )


def test_features_of_an_offloaded_target_are_its_own():
    from accelerate import cpu_offload

    target = copy.deepcopy(TARGETS["llama"])
    ids = torch.arange(1, 6)[None]
    plain = generate(target, ids, torch.ones_like(ids), max_new_tokens=16)
    reader = Reader(plain)
    offloaded = cpu_offload(copy.deepcopy(target))
    out = generate(offloaded, ids, torch.ones_like(ids), max_new_tokens=16, assistant_model=reader)
    assert torch.equal(plain, out)
    check(target, reader, out, [out.shape[1]])


def test_calls_in_two_threads_read_their_own():
    target = TARGETS["llama"]
    prompts = [torch.arange(1, 5)[None], torch.arange(3, 14)[None]]
    plain = [generate(target, ids, torch.ones_like(ids), max_new_tokens=40) for ids in prompts]
    readers, outs, begin = [Reader(text) for text in plain], {}, threading.Barrier(2)

    def call(index):
        begin.wait()
        ids = prompts[index]
        outs[index] = generate(
            target, ids, torch.ones_like(ids), max_new_tokens=40, assistant_model=readers[index]
        )

    threads = [threading.Thread(target=call, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, reader in enumerate(readers):
        assert torch.equal(plain[index], outs[index])
        check(target, reader, outs[index], [outs[index].shape[1]])


def test_nothing_is_hooked_where_nobody_asks():
    target = tiny_model()
    with Features(target, ()):
        assert not any(
            module._forward_hooks or module._forward_pre_hooks for module in target.modules()
        )
    with Features(target, KEYS) as features:
        assert len(features.handles) == len(KEYS)
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in target.modules()
    )


def test_hooks_go_with_a_call_that_fails():
    target, ids = tiny_model(), torch.tensor([[1, 2, 3]])
    reader = Reader(torch.zeros(1, 40, dtype=torch.long))
    reader.observe = lambda observations: 1 / 0
    with pytest.raises(ZeroDivisionError):
        target.generate(ids, do_sample=False, max_new_tokens=8, assistant_model=reader)
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in target.modules()
    )


@pytest.mark.parametrize("key", [2, -2, "last", True])
def test_missing_layers_are_refused(key, prompt):
    reader = Reader(torch.zeros(1, 40, dtype=torch.long), keys=(0, key))
    with pytest.raises(ValueError, match="has layers 0 … 1"):
        tiny_model().generate(prompt, do_sample=False, max_new_tokens=8, assistant_model=reader)
    assert hf_paradraft.SpeculationConfig() is not None


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "parallelspec"])
def test_a_window_leaves_out_the_beginnings_of_long_prompts(kind, monkeypatch):
    """Also where prompts are read in pieces, and next to a prompt that is shorter than it."""
    target = tiny_model("llama", num_hidden_layers=7)
    drafter = {
        "eagle3": lambda: hf_paradraft.Eagle3Drafter.from_target(target),
        "dflash": lambda: hf_paradraft.DFlashDrafter.from_target(target, 0, 1, 7, 2),
        "parallelspec": lambda: hf_paradraft.ParallelSpecDrafter.from_target(
            target, "eagle", num_masks=3
        ),
    }[kind]()
    drafter.speculation_config.draft_window = 7
    shown, start = [], type(drafter).start_drafting

    def started(self, *args):
        drafting = start(self, *args)
        observe = drafting.observe

        def note(observations):
            shown.append(
                [(part.begin, len(next(iter(part.features.values())))) for part in observations]
            )
            observe(observations)

        drafting.observe = note
        return drafting

    monkeypatch.setattr(type(drafter), "start_drafting", started)
    ids = torch.randint(3, 30, (2, 21), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :17] = 0
    for piece, rounds in (None, 1), (5, 5):
        shown.clear()
        assert_lossless(
            target, drafter, ids, attention_mask=mask, max_new_tokens=12, prefill_chunk_size=piece
        )
        read = [part for round_ in shown[:rounds] for part in round_]
        assert min(begin for begin, _ in read[::2]) == 14
        assert [sum(count for _, count in rows) for rows in (read[::2], read[1::2])] == [7, 4]


def test_a_window_leaves_out_what_a_callers_cache_does_not_hold(monkeypatch):
    target = tiny_model("llama", num_hidden_layers=7)
    drafter = hf_paradraft.Eagle3Drafter.from_target(target)
    drafter.speculation_config.draft_window = 5
    begins, begin = [], RaggedReader.begin

    def note(self, rows):
        begins.append(rows)
        begin(self, rows)

    monkeypatch.setattr(RaggedReader, "begin", note)
    ids = torch.randint(3, 30, (1, 40), generator=torch.Generator().manual_seed(0))
    for held, first in (2, 35), (38, 38):
        cache = DynamicCache()
        target(ids[:, :held], **{CACHE: cache})
        begins.clear()
        target.generate(
            ids, assistant_model=drafter, max_new_tokens=4, do_sample=False, **{CACHE: cache}
        )
        assert begins == [[first]]
