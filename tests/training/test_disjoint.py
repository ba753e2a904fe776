"""What is trained on shares no run of 13 words with what is measured on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paradraft.training.regenerate import SHORT, WORDS, disjoint, runs_in

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen"


@pytest.mark.parametrize(
    ("text", "stays"),
    [
        (LONG, False),
        (f"before this, {LONG.upper()}! And behind it", False),
        (LONG.replace(" ", ",\n"), False),
        (LONG.removesuffix(" thirteen"), True),
        (LONG.replace("seven", "7"), True),
    ],
)
def test_runs_are_found_whatever_their_case_and_punctuation(text, stays):
    rows = [{"messages": [{"role": "user", "content": text}]}, {"text": "something else"}]
    rest = disjoint(rows, [{"category": "x", "turns": ["short", LONG]}])
    assert rest == (rows if stays else rows[1:])


@given(st.lists(st.sampled_from("ab"), max_size=30), st.lists(st.sampled_from("ab"), max_size=30))
def test_exactly_what_shares_a_run_is_left_out(first, second):
    places = range(len(second) - WORDS + 1)
    shares = (SHORT <= len(first) < WORDS and first == second) or any(
        first[i : i + WORDS] == second[j : j + WORDS]
        for i in range(len(first) - WORDS + 1)
        for j in places
    )
    assert disjoint([" ".join(first)], [[" ".join(second)]]) == (
        [] if shares else [" ".join(first)]
    )


def test_runs_do_not_cross_texts():
    half = LONG.split()
    assert {*map(len, runs_in({"a": " ".join(half[:7]), "b": " ".join(half[7:])}))} == {6, 7}


def asked(text, **more):
    return {
        "messages": [
            {"role": "system", "content": f"Answer {LONG}."},
            {"role": "user", "content": text},
        ],
        **more,
    }


@pytest.mark.parametrize(
    ("text", "measured", "stays"),
    [
        (
            "Name a prime number, larger than a hundred!",
            "name a prime number larger than a hundred",
            False,
        ),
        (
            "Name a prime number larger than a hundred and ten.",
            "Name a prime number larger than a hundred.",
            True,
        ),
        ("Who is she?", "Who is she?", True),  # four words and fewer are everywhere
        (
            "请列出三种常见的编程语言，并说明它们的用途。",
            "请列出三种常见的编程语言，并说明它们的不同之处。",
            False,
        ),
        ("请列出三种语言。", "请列出三种语言。", False),
        ("请列出三种语言。", "请列出四种语言。", True),
    ],
)
def test_short_texts_and_those_without_spaces(text, measured, stays):
    row = asked(text)
    assert disjoint([row], [asked(measured), {"turns": [measured], "category": "x"}]) == (
        [row] if stays else []
    )
