"""The endpoint without a network: what no client of OpenAI's library would send, and what no server should say."""

import json

import pytest
import torch
from fastapi.testclient import TestClient
from tiny import VOCAB, make_tokenizer, near_copy, tiny_model

from hf_paradraft.serve.answer import Service
from hf_paradraft.serve.app import make_app
from hf_paradraft.serve.scheduler import Scheduler
from hf_paradraft.serve.text import Writer

ASKED = {"model": "tiny", "prompt": "a b c", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def client():
    """Tests talk to the endpoint of a tiny target, whose tokenizer has a token more than it."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<extra>"]})
    assert len(tokenizer) == VOCAB + 1
    service = Service(Scheduler(tiny_model(dtype=torch.float32), None), tokenizer, "tiny", 64)
    with TestClient(make_app(service), raise_server_exceptions=False) as client:
        yield client


@pytest.mark.parametrize("more", [{"prompt": "a <extra>"}, {"prompt": [VOCAB]}])
def test_a_token_that_the_model_does_not_know_is_refused(more, client):
    answer = client.post("/v1/completions", json={**ASKED, **more})
    assert answer.status_code == 400
    assert f"the token {VOCAB}" in answer.json()["error"]["message"]
    chat = client.post("/v1/chat/completions", json={"model": "tiny", "messages": [{"role": "user", "content": "a <extra>"}]})
    assert chat.status_code == 400
    assert client.post("/v1/completions", json=ASKED).status_code == 200


def test_a_chat_without_a_token_is_refused(client, monkeypatch):
    monkeypatch.setattr("hf_paradraft.serve.requests.encode_chat_prompt", lambda *_: [])
    answer = client.post("/v1/chat/completions", json={"model": "tiny", "messages": [{"role": "user", "content": ""}]})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "messages: the text is empty.")


def test_thoughts_of_earlier_turns_reach_the_template(client, monkeypatch):
    """Under both names that templates ask for."""
    read = []
    monkeypatch.setattr("hf_paradraft.serve.requests.encode_chat_prompt", lambda _, turns: read.append(turns) or [1, 2])
    turns = [{"role": "assistant", "content": "a", "reasoning_content": "b"}, {"role": "user", "content": "c"}]
    answer = client.post("/v1/chat/completions", json={"model": "tiny", "messages": turns, "max_tokens": 1})
    assert answer.status_code == 200
    assert read[0] == [{"role": "assistant", "content": "a", "reasoning_content": "b", "thinking": "b"}, turns[1]]


@pytest.mark.parametrize("name", ["str", "int", "a[b"])
def test_an_unknown_field_is_refused_by_its_name(name, client):
    answer = client.post("/v1/completions", json={**ASKED, name: 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def events(client, **more):
    lines = client.post("/v1/completions", json={**ASKED, "stream": True, **more}).text.split("\n\n")
    return [line.removeprefix("data: ") for line in lines if line]


def test_what_fails_behind_the_first_chunk_is_said_in_the_stream(client, monkeypatch):
    """A stream that only ends would pass for a whole answer."""
    whole, counted = Writer.push, []

    def push(self, tokens):
        counted.append(tokens)
        if len(counted) > 2:
            raise RuntimeError("odd")
        return whole(self, tokens)

    monkeypatch.setattr(Writer, "push", push)
    last = json.loads(events(client)[-1])
    assert last["error"]["message"] == "The request failed; the server's log says why."


def test_every_chunk_speaks_of_usage_where_it_is_wanted(client):
    *chunks, last, done = events(client, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert all(json.loads(chunk)["usage"] is None for chunk in chunks)
    assert json.loads(last)["usage"]["completion_tokens"] == 8
    assert all("usage" not in json.loads(chunk) for chunk in events(client)[:-1])


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "top_p", "seed", "stream", "model", "n"])
@pytest.mark.parametrize("value", [[], {}])
def test_an_empty_list_is_no_number(name, value, client):
    answer = client.post("/v1/completions", json={**ASKED, name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("config", [{"use_cache": False}, {"output_attentions": True}, {"output_hidden_states": True}])
def test_a_saved_config_without_a_cache_fails_no_request(config):
    target = tiny_model(dtype=torch.float32)
    dicts = any(name.startswith("output") for name in config)  # as it is made where there is no generation_config.json
    target.generation_config.update(**config, return_dict_in_generate=dicts)
    service = Service(Scheduler(target, near_copy(target)), make_tokenizer(), "tiny", 64)
    with TestClient(make_app(service), raise_server_exceptions=False) as client:
        assert client.post("/v1/completions", json=ASKED).status_code == 200
