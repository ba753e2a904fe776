"""Texts that stop an answer, wherever tokens cut them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_paradraft.chat import text_after
from hf_paradraft.demo import FAMILY
from hf_paradraft.serve.text import Writer

TOKENIZER = AutoTokenizer.from_pretrained(FAMILY / "target")


@given(
    st.text("abcn\n é", max_size=40),
    st.lists(st.text("abcn\n ", min_size=1, max_size=4), max_size=3),
    st.integers(1, 5),
)
def test_a_text_ends_before_the_first_stop(text, stops, size):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    writer, shown = Writer(TOKENIZER, stops), ""
    for begin in range(0, len(ids), size):
        shown += writer.push(ids[begin : begin + size])
        assert not any(stop in shown for stop in stops)
        if writer.stopped:
            break
    whole = TOKENIZER.decode(ids)
    if writer.stopped:
        assert whole.startswith(shown)
        assert any(whole[len(shown) :].startswith(stop) for stop in stops)
    else:
        shown += writer.rest()
        assert shown == whole


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=12))
def test_a_text_that_ends_in_half_a_character_is_decodes(ids):
    writer = Writer(TOKENIZER, [])
    assert writer.push(ids) + writer.end() == TOKENIZER.decode(ids, skip_special_tokens=True)


def by_bytes():
    """A tokenizer with byte fallback, as Llama 2's: a run of bytes that is no text has as many
    stray characters.
    """
    vocabulary = ["</s>", "<0x0A>", "<0xF0>", "▁a", "<0xC3>", "<0xA9>", "b", "<unk>"]
    backend = Tokenizer(
        models.BPE(
            dict(zip(vocabulary, range(8), strict=True)), [], unk_token="<unk>", byte_fallback=True
        )
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


@given(st.lists(st.integers(1, 6), max_size=12))
def test_stray_bytes_behind_whole_characters_cost_no_other_text(ids):
    tokenizer = by_bytes()
    writer = Writer(tokenizer, [])
    shown = writer.push(ids) + writer.end()
    whole = tokenizer.decode(ids)
    # What was a character when it was shown is a stray one in the whole text; everything else is
    # the same.
    assert [part for part in re.split("[\n�é𩩩]+", shown) if part] == [
        part for part in re.split("[\n�é𩩩]+", whole) if part
    ]
    if "�" not in whole:
        assert shown == whole


@pytest.mark.parametrize(
    ("stops", "shown"),
    [(["days"], "The exam is 2 "), (["2", "exam"], "The "), (["never"], "The exam is 2 days")],
)
def test_tokens_are_counted_up_to_the_stop(stops, shown):
    ids = TOKENIZER("The exam is 2 days", add_special_tokens=False)["input_ids"]
    writer = Writer(TOKENIZER, stops)
    assert writer.push(ids) + writer.rest() == shown
    assert (writer.count < len(ids)) == (shown == "The ")


def llamas():
    """A tokenizer of Llama 2's kind: a word begins with a mark, and the first space of a text is
    none of it.
    """
    vocabulary = ["<s>", "</s>", "<|user|>", "▁the", "▁cat", "▁sat", "s", "<unk>"]
    backend = Tokenizer(
        models.BPE({word: index for index, word in enumerate(vocabulary)}, [], unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|user|>"],
    )


@pytest.mark.parametrize(
    ("prompt", "shown"), [([0, 3, 4], " sat the"), ([0], "sat the"), ([], "sat the")]
)
def test_a_text_is_what_the_whole_decodes_to_less_what_the_prompt_does(prompt, shown):
    tokenizer = llamas()
    assert text_after(tokenizer, prompt, [5, 3]) == shown
    writer = Writer(tokenizer, [], prompt)
    assert writer.push([5]) + writer.push([3]) + writer.end() == shown


def test_a_prompt_that_ends_in_half_a_character_is_not_shown():
    tokenizer = by_bytes()
    writer = Writer(tokenizer, [], [3, 6, 4])
    assert writer.push([6, 3]) + writer.end() == "b a"


def test_a_special_token_stops_an_answer():
    writer = Writer(llamas(), ["<|user|>"], [0, 3])
    assert writer.push([4, 5, 2, 3]) == " cat sat"
    assert writer.stopped
    assert writer.count == 3
