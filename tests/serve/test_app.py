"""The endpoint without a network: what no client of OpenAI's library would send, and what no server
should say.
"""

import json
import time

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
    service = Service(Scheduler(tiny_model(dtype=torch.float32), None), tokenizer, "tiny")
    with TestClient(make_app(service), raise_server_exceptions=False) as client:
        yield client


@pytest.mark.parametrize("more", [{"prompt": "a <extra>"}, {"prompt": [VOCAB]}])
def test_a_token_that_the_model_does_not_know_is_refused(more, client):
    answer = client.post("/v1/completions", json={**ASKED, **more})
    assert answer.status_code == 400
    assert f"the token {VOCAB}" in answer.json()["error"]["message"]
    chat = client.post(
        "/v1/chat/completions",
        json={"model": "tiny", "messages": [{"role": "user", "content": "a <extra>"}]},
    )
    assert chat.status_code == 400
    assert client.post("/v1/completions", json=ASKED).status_code == 200


def test_a_chat_without_a_token_is_refused(client, monkeypatch):
    monkeypatch.setattr("hf_paradraft.serve.requests.encode_chat_prompt", lambda *_: [])
    answer = client.post(
        "/v1/chat/completions",
        json={"model": "tiny", "messages": [{"role": "user", "content": ""}]},
    )
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "messages: the text is empty.",
    )


def test_thoughts_of_earlier_turns_reach_the_template(client, monkeypatch):
    """Under both names that templates ask for."""
    read = []
    monkeypatch.setattr(
        "hf_paradraft.serve.requests.encode_chat_prompt",
        lambda _, turns, tools: read.append(turns) or [1, 2],
    )
    turns = [
        {"role": "assistant", "content": "a", "reasoning_content": "b"},
        {"role": "user", "content": "c"},
    ]
    answer = client.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": turns, "max_tokens": 1}
    )
    assert answer.status_code == 200
    assert read[0] == [
        {"role": "assistant", "content": "a", "reasoning_content": "b", "thinking": "b"},
        turns[1],
    ]


@pytest.mark.parametrize("name", ["str", "int", "a[b"])
def test_an_unknown_field_is_refused_by_its_name(name, client):
    answer = client.post("/v1/completions", json={**ASKED, name: 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def events(client, **more):
    lines = client.post("/v1/completions", json={**ASKED, "stream": True, **more}).text.split(
        "\n\n"
    )
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


@pytest.mark.parametrize(
    "name", ["max_tokens", "temperature", "top_p", "seed", "stream", "model", "n"]
)
@pytest.mark.parametrize("value", [[], {}])
def test_an_empty_list_is_no_number(name, value, client):
    answer = client.post("/v1/completions", json={**ASKED, name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    "config", [{"use_cache": False}, {"output_attentions": True}, {"output_hidden_states": True}]
)
def test_a_saved_config_without_a_cache_fails_no_request(config):
    target = tiny_model(dtype=torch.float32)
    # as it is made where there is no generation_config.json
    dicts = any(name.startswith("output") for name in config)
    target.generation_config.update(**config, return_dict_in_generate=dicts)
    service = Service(Scheduler(target, near_copy(target)), make_tokenizer(), "tiny")
    with TestClient(make_app(service), raise_server_exceptions=False) as client:
        assert client.post("/v1/completions", json=ASKED).status_code == 200


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"prompt": [{}] * 300_000}, "prompt"),
        ({"messages": [1] * 1_000_000, "prompt": None}, "messages.0"),
        (
            {"messages": [{"role": "user", "content": [{}] * 300_000}], "prompt": None},
            "messages.0.content",
        ),
        ({"messages": [{"role": "user", "content": "a"}] * 4097, "prompt": None}, "messages"),
        (
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 1025}],
                "prompt": None,
            },
            "messages.0.content",
        ),
        ({f"x{number}": 1 for number in range(200_000)}, None),
        ({"a" * 1_000_000: 1}, "a" * 80),
        ({"stop": "a" * 200_000}, "stop"),
        ({"stop": ["a"] * 100_000}, "stop"),
        ({"prompt": "a " * 1_000_000}, "prompt"),
        ({"n": True}, "n"),
        ({"prompt": [True, False]}, "prompt"),
        ({"prompt": [1] * 500_000}, "prompt"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_the_first_of_many_wrong_things_says_enough(client, wrong, param):
    """They took seconds and gigabytes, in which nobody else was answered."""
    body = json.dumps(
        {name: value for name, value in {**ASKED, **wrong}.items() if value is not None}
    )
    begun = time.monotonic()
    path = "/v1/chat/completions" if "messages" in wrong else "/v1/completions"
    said = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert time.monotonic() - begun < 2
    assert said.status_code == 400
    assert param in (None, said.json()["error"]["param"])
    assert len(said.text) < 600


def test_the_key_is_asked_for_first():
    service = Service(Scheduler(tiny_model(), None), make_tokenizer(), "tiny", "sesame")
    with TestClient(make_app(service)) as client:
        for path in (
            "/v1/completions",
            "/v1/models",
            "/metrics",
            "/docs",
            "/openapi.json",
            "/nothing",
        ):
            assert client.post(path, content="{").status_code == 401
        assert client.get("/health").status_code == 200
        key = {"Authorization": "Bearer sesame"}
        assert client.post("/v1/completions", content="{", headers=key).status_code == 400


def test_usage_counts_no_token_after_a_stop():
    """A round may bring more than what ended the text."""
    target = tiny_model(dtype=torch.float32)
    service = Service(Scheduler(target, near_copy(target)), make_tokenizer(), "tiny")
    with TestClient(make_app(service)) as client:
        text = client.post("/v1/completions", json={**ASKED, "max_tokens": 40}).json()["choices"][
            0
        ]["text"]
        asked = {**ASKED, "max_tokens": 40, "stop": text.split()[2]}
        usage = client.post("/v1/completions", json=asked).json()["usage"]
    assert usage["completion_tokens"] <= 4
    assert (
        usage["completion_tokens_details"]["accepted_prediction_tokens"]
        <= usage["completion_tokens"]
    )


def test_a_long_stop_text_costs_no_time():
    """Each of its beginnings was cut out in every round."""
    tokenizer = make_tokenizer()
    writer = Writer(tokenizer, ["a" * 100_000, "a " * 100_000])
    token = tokenizer("a")["input_ids"][-1]
    begun = time.monotonic()
    for _ in range(200):
        writer.push([token])
    assert writer.end()
    assert time.monotonic() - begun < 1


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function", "function": {"name": "\ud800"}}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f",
            "arguments": '{"a": "\\ud800"}'}}]}]},
    ],
)  # fmt: skip
def test_half_a_character_is_the_clients_fault(client, more):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **more}
    # in ASCII
    sent = {
        "content": json.dumps(body),
        "headers": {"Content-Type": "application/json"},
    }
    assert client.post("/v1/chat/completions", **sent).status_code < 500


ARGUMENTS = "[" * 600 + "]" * 600
DEEP = json.loads(ARGUMENTS)


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "x": DEEP}}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "x": DEEP}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}]}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "x": DEEP}}},
    ],
)  # fmt: skip
def test_a_body_nested_too_deeply_is_the_clients_fault(client, more):
    """The log had a traceback of 180 kB for each."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **more}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "The body is nested too deeply."
