"""Tokens as text while they come."""

import pytest
from transformers import AutoTokenizer

from hf_paradraft.chat import Detokeniser
from hf_paradraft.demo import FAMILY

TEXTS = ["def f(x): return x", "Grüße, 世界 😀👩‍👩‍👧", "  two  blanks\n\n\ttab", ""]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_whole(text, fast):
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target")
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    detokeniser = Detokeniser(tokenizer)
    if not fast:
        detokeniser.stream = None
    pieces = [detokeniser.push(token) for token in ids]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert not any("\ufffd" in piece for piece in pieces)
