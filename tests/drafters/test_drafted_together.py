"""Calls that join others: their drafters read all texts in one forward, and guess what they guess
behind each alone.
"""

from contextlib import contextmanager
from functools import cache

import pytest
import torch
from checkpoints import gemma4_assistant, gemma4_target, with_mtp
from layouts import LAYOUTS
from lossless import listen
from published import TARGET, check_guesses
from tiny import near_copy
from transformers import AutoModelForCausalLM

from hf_paradraft import (
    AutoregressiveDrafter,
    Gemma4Drafter,
    GuessedTokens,
    MtpDrafter,
    ParallelSpecDrafter,
    SpeculationConfig,
)
from hf_paradraft.continuous import begin, together
from hf_paradraft.decoding.group import Group
from hf_paradraft.decoding.joining import leave, read_together
from hf_paradraft.decoding.loop import step
from hf_paradraft.serve.prefixes import PrefixCache

SOME = ("z-lab, sliding", "DeepSpec rnn", "SafeAI", "speculators P-EAGLE", "speculators EAGLE-3")


def mtp(count):
    """A target that brings so many MTP layers, and their drafter."""
    target = AutoModelForCausalLM.from_pretrained(
        with_mtp("deepseek", count)[0], experts_implementation="eager"
    ).eval()
    return target, MtpDrafter.from_target(target)


KINDS = {
    "gemma4": lambda load: (gemma4_target(), Gemma4Drafter(gemma4_assistant())),
    "mtp, one layer": lambda load: mtp(1),
    "mtp, two layers": lambda load: mtp(2),
    "pard": lambda load: (TARGET, near_copy(TARGET, 0.2)),
    "autoregressive": lambda load: (TARGET, AutoregressiveDrafter(near_copy(TARGET, 0.2))),
    "parallelspec": lambda load: (TARGET, ParallelSpecDrafter.from_target(TARGET, "eagle", 3)),
    **{name: lambda load, name=name: (TARGET, load(name, attach=False)) for name in LAYOUTS},
}
# every other layout; the others at night
NAMES = [
    pytest.param(
        name,
        marks=()
        if name not in LAYOUTS or name in SOME
        else (pytest.mark.slow if number % 2 else pytest.mark.nightly),
    )
    for number, name in enumerate(KINDS)
]
# each layout in a chain or in a tree; in the other one at night
BOTH = [
    pytest.param(
        name,
        size,
        marks=()
        if name not in LAYOUTS or name in SOME
        else (pytest.mark.slow if number % 2 == (size is None) else pytest.mark.nightly),
    )
    for number, name in enumerate(KINDS)
    for size in (None, 7)
]
PROMPTS = [
    [3, 5, 7, 9, 2, 6],
    [11, 4],
    [8, 8, 1],
    [2, 9, 4, 7, 1, 3, 5],
    [6, 1],
    [5, 5, 2, 9],
    [1, 2, 3],
]
NEW = [12, 5, 9, 14, 3, 8, 11]


@contextmanager
def target_rows(target):
    """How many tokens of a text each forward reads."""
    rows = []
    handle = target.get_input_embeddings().register_forward_hook(
        lambda module, args, out: rows.append(out.shape[1])
    )
    yield rows
    handle.remove()


@contextmanager
def asked_of(drafting, seen):
    """Let `seen` get what a drafting is asked about a sequence, and what it guesses."""
    propose = drafting.propose

    def proposed(prefixes):
        guesses = propose(prefixes)
        seen.extend(
            (prefix.ids.clone(), prefix.room, guess)
            for prefix, guess in zip(prefixes, guesses, strict=True)
        )
        return guesses

    drafting.propose = proposed
    yield
    del drafting.propose


@cache
def texts_of(target):
    """What the target writes behind each prompt."""
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return [
        target.generate(torch.tensor([prompt]), max_new_tokens=new, **options)[0]
        for prompt, new in zip(PROMPTS, NEW, strict=True)
    ]


@pytest.mark.parametrize(("name", "size"), BOTH)
def test_joined_calls_are_guessed_for_as_alone(name, size, load, monkeypatch):
    """Every other round goes by the texts, a different way in each sequence, so that the rows are
    ragged.
    """
    target, drafter = KINDS[name](load)
    drafter.speculation_config = SpeculationConfig(
        min(3, drafter.most_drafts or 3), size, never_slower=False
    )
    texts, rounds, most = texts_of(target), [], []

    def answer(prefixes, guesses):
        rounds.append(len(prefixes))
        if len(rounds) % 2:
            return guesses
        true = []
        for prefix in prefixes:
            text = next(
                text for text in texts if torch.equal(text[: prefix.ids.shape[1]], prefix.ids[0])
            )
            count = min(prefix.room, prefix.ids.shape[1] % 4)
            true.append(GuessedTokens(text[prefix.ids.shape[1] :][:count]))
        return true

    draft = Group.draft
    monkeypatch.setattr(
        Group,
        "draft",
        lambda self, verifier: (most.append(len(self.calls)), draft(self, verifier))[1],
    )
    with listen(drafter, answer) as heard:
        made = written(target, drafter)
    assert made == [
        text[len(prompt) :].tolist() for prompt, text in zip(PROMPTS, texts, strict=True)
    ]
    assert max(most) > 1  # calls were drafted for together
    assert check_guesses(drafter, target, [(one.ids, one.room, one.guess) for one in heard]) > 10


@torch.no_grad()
def written(target, drafter):
    """What four places write behind the prompts. The first two prompts are read in one forward, and
    so are later ones where two places are free.
    """
    batch, calls = None, []
    while len(calls) < len(PROMPTS) or batch.sequences:
        free = min(2, len(PROMPTS) - len(calls), 4 - (0 if batch is None else len(batch.sequences)))
        if free:
            waiting = []
            for _ in range(free):
                ids = torch.tensor([PROMPTS[len(calls)]])
                options = {
                    "max_new_tokens": NEW[len(calls)],
                    "eos_token_id": None,
                    "pad_token_id": 0,
                    "do_sample": False,
                }
                waiting.append(
                    begin(target, ids, drafter, attention_mask=torch.ones_like(ids), **options)
                )
                calls += waiting[-1].calls
            if free == 1:
                [joining] = waiting
                step(joining)
            else:
                joining = read_together(waiting)
            batch = together(batch, joining)
        else:
            step(batch)
        leave(batch)
    return [
        call.sequences[0].ids[0, call.begin : call.sequences[0].length].tolist() for call in calls
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_beginning_that_was_read_is_guessed_behind_as_if_read_anew(name, load):
    """A next turn, another branch, a beginning alone: the target reads what is new, and guesses are
    those of the whole text.
    """
    target, drafter = KINDS[name](load)
    drafter.speculation_config = SpeculationConfig(
        min(3, drafter.most_drafts or 3), None, never_slower=False
    )
    prefixes = PrefixCache(1 << 30)
    options = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False, "max_new_tokens": 9}
    first = [3, 5, 7, 9, 2, 6, 4]
    text = target.generate(torch.tensor([first]), **options)[0].tolist()
    for prompt, most in (
        (first, 0),
        ([*text, 5, 8], len(text) - 1),
        ([*text[:11], 1, 2, 4], 10),
        ([*first[:5], 1], 4),
    ):
        ids = torch.tensor([prompt])
        plain = target.generate(ids, **options)[0].tolist()
        known = prefixes.find(prompt, True)
        assert known is None or (
            most - 1 <= known.read <= most
            and (known.drafting is None) == (name == "mtp, two layers")
        )
        assert (known is None) == (most == 0)
        batch = begin(
            target, ids, drafter, None, known, attention_mask=torch.ones_like(ids), **options
        )
        [group], [sequence], seen = batch.groups, batch.sequences, []
        with target_rows(target) as rows:
            step(batch)
        assert sum(rows) <= len(prompt) - (known.read if known else 0) + 3
        prefixes.keep(batch, 0)
        while not sequence.finished:
            with asked_of(group.drafting, seen):
                step(batch)
        prefixes.keep(batch, 0)
        batch.close()
        assert sequence.ids[0, : sequence.length].tolist() == plain
        if name != "mtp, two layers":
            assert check_guesses(drafter, target, seen) > 2
