"""Compiled drafters: rounds behind the prompt run in the same shapes, and give what whole prefixes
give.
"""

import functools
from collections import defaultdict

import pytest
import torch
from lossless import assert_lossless
from published import TARGET, check_guesses, guesses_of_a_call
from test_pard_variants import pard2
from tiny import near_copy

import hf_paradraft
from hf_paradraft.decoding import cache, compiled, verify
from hf_paradraft.drafters.reading import network, reader

PROMPTS = torch.tensor([[1, 2, 3, 4, 5], [0, 0, 0, 8, 9]])
SEEN = (PROMPTS != 0).long()
OPTIONS = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}
PUBLISHED = [
    "z-lab, sliding",
    "z-lab, use_swa",
    "DeepSpec rnn",
    "speculators EAGLE-3",
    "speculators EAGLE-3, sliding Qwen3",
]
KINDS = ["PARD", "PARD-2", "ParallelSpec", "ParallelSpec, eagle", *PUBLISHED, "speculators P-EAGLE"]
K = 3
FAST = {"ParallelSpec", "z-lab, sliding", "speculators EAGLE-3", "speculators P-EAGLE"}
SOME = [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in KINDS]


@pytest.fixture
def make(load, tmp_path):
    """A drafter that is used compiled."""

    def made(kind, size=None):
        if kind == "PARD":
            drafter = near_copy(TARGET, 0.05)
        elif kind == "PARD-2":
            pard2(tmp_path)
            drafter = hf_paradraft.AutoDrafter.from_pretrained(tmp_path)
        elif kind.startswith("ParallelSpec"):
            drafter = hf_paradraft.ParallelSpecDrafter.from_target(
                TARGET, "eagle" if "eagle" in kind else "medusa", K
            )
        else:
            drafter = load(kind, attach=False)
        drafter.speculation_config = hf_paradraft.SpeculationConfig(
            K, size, never_slower=False, compile=True
        )
        return drafter

    return made


@pytest.fixture
def calls(monkeypatch):
    """By function, how often each shape ran of what would be compiled; nothing is, and the target
    is left alone.
    """
    shapes = defaultdict(lambda: defaultdict(int))

    def watched(function, mode):
        def run(owner, *inputs, **named):
            given = [*inputs, *named.values()]
            given += [
                tensor for mask in given if isinstance(mask, dict) for tensor in mask.values()
            ]
            shapes[function.__name__][
                tuple(tensor.shape for tensor in given if isinstance(tensor, torch.Tensor))
            ] += 1
            return function(owner, *inputs, **named)

        return run

    monkeypatch.setattr(compiled, "_compiled", watched)
    monkeypatch.setattr(verify, "compiled_forward", lambda model, features: model)
    return shapes


def rounds(drafter, ids, mask, **more):
    """Every other round all drafts are accepted; how many guesses were right as a whole prefix
    says.
    """
    options = {**OPTIONS, "attention_mask": mask, **more}
    plain = TARGET.generate(ids, **options)
    answers = [row[len(seen) - int(seen.sum()) :] for row, seen in zip(plain, mask, strict=True)]
    checked = check_guesses(
        drafter, TARGET, guesses_of_a_call(drafter, TARGET, ids, answers, **options)
    )
    assert_lossless(TARGET, drafter, ids, plain=plain, **options)
    return checked


@pytest.mark.parametrize("size", [None, pytest.param(9, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", SOME)
def test_rounds_have_one_shape(kind, size, make, calls):
    drafter = make(kind, size)
    ids, mask = (PROMPTS[:1], SEEN[:1]) if size else (PROMPTS, SEEN)
    assert rounds(drafter, ids, mask) > 3
    extends = "EAGLE-3" in kind
    for shapes in calls.values():
        # of the text and, one or several at a time, of nodes
        assert len(shapes) == (2 if extends else 1)
        assert sum(shapes.values()) > 5
    parts = {"inject", "forward_block"} if kind in PUBLISHED[:3] else {"forward_rows"}
    assert calls.keys() == parts


@pytest.mark.parametrize("kind", SOME)
def test_a_cache_that_is_too_short_grows(kind, make, calls, monkeypatch):
    """It grows; long prompts in pieces, of ragged rows."""
    monkeypatch.setattr(cache, "SLOTS", 4)
    monkeypatch.setattr(network, "SLOTS", 4)
    monkeypatch.setattr(reader, "PIECE", 4)
    static_cache = cache.static_cache
    monkeypatch.setattr(network, "static_cache", lambda model, num_slots: static_cache(model, 20))
    drafter = make(kind, 9)
    ids = torch.tensor([[0] * 9 + [1, 2, 3, 4], list(range(3, 16))])
    assert rounds(drafter, ids, (ids != 0).long(), max_new_tokens=16) > 6
    assert len(max(calls.values(), key=len)) > 2  # longer and longer


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=pytest.mark.nightly if kind not in FAST or "EAGLE-3" in kind else ()
        )
        for kind in KINDS[1:]
    ],
)
def test_nothing_is_compiled_again(kind, make, monkeypatch):
    """Each shape once, in one piece; calls of other lengths share what there is."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    backend = "inductor" if kind == "speculators EAGLE-3" else "eager"
    once = functools.cache(
        lambda function, mode: torch.compile(function, dynamic=False, backend=backend)
    )
    monkeypatch.setattr(compiled, "_compiled", once)
    monkeypatch.setattr(verify, "compiled_forward", lambda model, features: model)
    drafter = make(kind)
    rounds(drafter, PROMPTS, SEEN)
    assert counters["stats"]["unique_graphs"] == (
        2 if "EAGLE-3" in kind or kind in PUBLISHED else 1
    )
    assert not counters["graph_break"]
    with torch.compiler.set_stance("fail_on_recompile"):
        rounds(make(kind), PROMPTS[:, 1:].flip(0), SEEN[:, 1:].flip(0), max_new_tokens=24)
