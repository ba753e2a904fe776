"""Tokens as text while they come."""

import pytest
from tiny import make_tokenizer
from transformers import AutoTokenizer

from hf_paradraft.chat import Detokeniser, encode_chat_prompt, render_chat
from hf_paradraft.demo import FAMILY

TEXTS = ["def f(x): return x", "Grüße, 世界 😀👩‍👩‍👧", "  two  blanks\n\n\ttab", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_whole(text):
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target")
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    detokeniser = Detokeniser(tokenizer)
    pieces = [detokeniser.push(token) for token in ids]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_template_that_iterates_over_parts_gets_parts():
    tokenizer = make_tokenizer()
    turns = [{"role": "user", "content": "b c"}]
    plain = render_chat(tokenizer, turns, True)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ ' ' + m['role'][0] }}{% for part in m['content'] %}{% if "
        "part['type'] == 'text' %}{{ ' ' + part['text'] }}{% endif %}{% endfor %}{% endfor %}{% if "
        "add_generation_prompt %}{{ ' a ' }}{% endif %}"
    )
    assert render_chat(tokenizer, turns, True) == plain
    assert (
        encode_chat_prompt(tokenizer, turns)
        == tokenizer(plain, add_special_tokens=False)["input_ids"]
    )
