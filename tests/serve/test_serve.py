"""The real command, asked by OpenAI's own client."""

import json
import signal
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hf_paradraft.cli import app
from hf_paradraft.demo import FAMILY, PUBLIC

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("serve")]
QUESTION = (
    "1. Write 6 euros and 70 cents in cents.\n2. The exam is 2 days after 31 July. Which date is "
    "the exam?"
)
KEY = "sesame"


@pytest.fixture(scope="module")
def server():
    """The address of the command with the embedded family; behind it, SIGTERM ends it while it is
    busy.
    """
    command = [
        sys.executable,
        "-m",
        "hf_paradraft.cli",
        "serve",
        "--port",
        "0",
        "--dtype",
        "float32",
        "--threads",
        "1",
    ]
    command += ["--api-key", KEY, "--max-queue", "3", "--max-batch-size", "4"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    address = process.stdout.readline().strip()
    assert httpx.get(address.replace("/v1", "/health")).status_code == 200
    yield address
    client = openai.OpenAI(base_url=address, api_key=KEY, max_retries=0)
    stream = client.completions.create(
        model="paradraft-family", prompt="a b c", max_tokens=900, stream=True, temperature=1
    )
    next(iter(stream))
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.wait(10)
    assert time.monotonic() - begun < 10


@pytest.fixture
def client(server):
    """OpenAI's client, which tries once."""
    return openai.OpenAI(base_url=server, api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def written():
    """What `generate` writes, by whether it samples."""
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target")
    target = AutoModelForCausalLM.from_pretrained(FAMILY / "target", dtype=torch.float32)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    texts = {}
    for name, options in (
        ("greedy", {"do_sample": False}),
        ("seed 3", {"do_sample": True, "temperature": 0.8}),
    ):
        torch.manual_seed(3)
        out = target.generate(**ids, **options, max_new_tokens=60)
        texts[name] = tokenizer.decode(
            out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True
        )
    return texts


MESSAGES = [{"role": "user", "content": QUESTION}]
ASKED = {"model": "paradraft-family", "messages": MESSAGES, "max_tokens": 60}
SAMPLED = {"temperature": 0.8, "seed": 3}


def test_texts_are_those_of_generate(client, written):
    whole = client.chat.completions.create(**ASKED, temperature=0)
    assert whole.choices[0].message.content == written["greedy"]
    assert (
        client.chat.completions.create(**ASKED, **SAMPLED).choices[0].message.content
        == written["seed 3"]
    )
    usage = whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details.accepted_prediction_tokens > 0
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    assert (
        client.chat.completions.create(**{**ASKED, "messages": parts}, temperature=0).choices[0]
        == whole.choices[0]
    )
    off = client.chat.completions.create(
        **ASKED, temperature=0, extra_body={"speculation": {"enabled": False}}
    )
    assert off.choices[0] == whole.choices[0]
    assert off.usage.completion_tokens_details.rejected_prediction_tokens == 0


def test_streams_have_the_same_text(client, written):
    chunks = list(
        client.chat.completions.create(
            **ASKED, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == written["greedy"]
    )
    assert (
        chunks[-1].usage == client.chat.completions.create(**ASKED, temperature=0).usage
        or chunks[-1].usage.completion_tokens
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in (
        "stop",
        "length",
    )
    assert len(chunks) > 4


def test_many_at_once_have_their_own_texts(client, written):
    """More than there is place for; who is told to come back does."""
    answers: dict[int, str] = {}

    def ask(number):
        options = SAMPLED if number % 2 else {"temperature": 0}
        while True:
            try:
                answers[number] = (
                    client.chat.completions.create(**ASKED, **options).choices[0].message.content
                )
                return
            except openai.RateLimitError as error:
                time.sleep(0.1 * float(error.response.headers["retry-after"]))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[number] for number in range(12)] == [written["greedy"], written["seed 3"]] * 6


def test_completions_go_on_with_a_text(client):
    options = {
        "model": "paradraft-family",
        "prompt": "def total(",
        "max_tokens": 20,
        "temperature": 0,
    }
    whole = client.completions.create(**options)
    assert (
        "".join(part.choices[0].text for part in client.completions.create(**options, stream=True))
        == whole.choices[0].text
    )
    guided = client.completions.create(
        **options, extra_body={"prediction": {"type": "content", "content": whole.choices[0].text}}
    )
    assert guided.choices[0].text == whole.choices[0].text


def test_an_answer_ends_where_it_is_told_to(client, written):
    word = written["greedy"].split()[3]
    stopped = client.chat.completions.create(**ASKED, temperature=0, stop=word).choices[0]
    assert stopped.message.content == written["greedy"][: written["greedy"].index(word)]
    assert stopped.finish_reason == "stop"
    short = client.chat.completions.create(**{**ASKED, "max_tokens": 5}, temperature=0)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 5)


REFUSED = [
    ({"n": 2}, 400, "n"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
    ({"logprobs": True}, 400, "logprobs"),
    ({"temperature": 3}, 400, "temperature"),
    ({"temperature": 1e-9}, 400, "temperature"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"stop": [""]}, 400, "stop"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, 400, "messages"),
    ({"messages": [{"role": "king", "content": "a"}]}, 400, "messages.0.role"),
    ({"presence_penalty": 1}, 400, "presence_penalty"),
    ({"model": "another"}, 404, "model"),
    ({"unheard_of": 1}, 400, "unheard_of"),
    ({"repetition_penalty": 1e-300}, 400, "repetition_penalty"),
    ({"max_tokens": True}, 400, "max_tokens"),
    ({"max_tokens": "8"}, 400, "max_tokens"),
    ({"stream": "true"}, 400, "stream"),
    ({"stop": ["a"] * 17}, 400, "stop"),
    ({"prediction": {"type": "content", "content": "\udfff"}}, 400, "prediction"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages.0.content",
    ),
]


@pytest.mark.parametrize(("wrong", "status", "param"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_is_not_served_is_refused_by_name(server, wrong, status, param):
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    said = httpx.post(
        f"{server}/chat/completions", content=json.dumps({**ASKED, **wrong}), headers=headers
    )
    assert said.status_code == status
    assert said.json()["error"]["param"] == param
    assert set(said.json()["error"]) == {"message", "type", "param", "code"}


def test_other_errors_are_openais_too(server):
    key = {"Authorization": f"Bearer {KEY}"}

    def endless():
        for _ in range(100):
            yield b"x" * 100_000

    for said, status in (
        (httpx.get(f"{server}/nothing", headers=key), 404),
        (httpx.get(f"{server}/chat/completions", headers=key), 405),
        (httpx.get(f"{server}/models"), 401),
        (httpx.get(f"{server}/models", headers={"Authorization": f"Basic {KEY}"}), 401),
        (httpx.post(f"{server}/chat/completions", content=json.dumps(ASKED), headers=key), 400),
        (httpx.post(f"{server}/chat/completions", content="{", headers=key), 400),
        (httpx.post(f"{server}/chat/completions", content="x" * 10_000_000, headers=key), 413),
        (httpx.post(f"{server}/chat/completions", content=endless(), headers=key), 413),
        (
            httpx.post(
                f"{server}/completions", json={"prompt": ["a", "b"], "max_tokens": 1}, headers=key
            ),
            400,
        ),
        (
            httpx.post(
                f"{server}/completions", json={"prompt": [10**6], "max_tokens": 1}, headers=key
            ),
            400,
        ),
    ):
        assert said.status_code == status
        assert said.json()["error"]["message"]


def test_keys_come_as_clients_send_them(server):
    assert (
        httpx.head(f"{server}/models", headers={"Authorization": f"bearer {KEY}"}).status_code
        == 200
    )
    assert httpx.head(server.replace("/v1", "/health")).status_code == 200


def test_what_is_cut_off_by_the_end_is_told():
    """An event of its own ends the stream; and a key of any characters opens it."""
    key = "schlüssel"
    command = [
        sys.executable,
        "-m",
        "hf_paradraft.cli",
        "serve",
        "--port",
        "0",
        "--dtype",
        "float32",
        "--threads",
        "1",
    ]
    process = subprocess.Popen(
        [*command, "--grace", "0", "--api-key", key], stdout=subprocess.PIPE, text=True
    )
    address, lines = process.stdout.readline().strip(), []
    headers = {"Authorization": f"Bearer {key}".encode()}
    body = {"prompt": "a b c", "max_tokens": 900, "stream": True, "temperature": 1}
    with httpx.stream("POST", f"{address}/completions", json=body, headers=headers) as stream:
        for line in stream.iter_lines():
            if not lines:
                process.send_signal(signal.SIGTERM)
            lines.append(line)
    process.wait(20)
    last = [
        json.loads(line.removeprefix("data: "))
        for line in lines
        if line and not line.endswith("[DONE]")
    ][-1]
    assert "stopping" in last["error"]["message"]


def test_a_client_that_hangs_up_frees_its_place(client, server):
    stream = client.completions.create(
        model="paradraft-family", prompt="a b c", max_tokens=900, stream=True, temperature=1
    )
    next(iter(stream))
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(
            model="paradraft-family", prompt="a b", max_tokens=900, temperature=1
        )
    key = {"Authorization": f"Bearer {KEY}"}
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        lines = httpx.get(server.replace("/v1", "/metrics"), headers=key).text.splitlines()
        if "num_requests_running 0.0" in lines:
            break
        time.sleep(0.1)
    else:
        pytest.fail("\n".join(lines))
    counts = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(counts['spec_decode_num_accepted_tokens_per_pos_total{position="0"}']) > 0
    assert (
        float(counts["spec_decode_num_draft_tokens_total"])
        > float(counts["spec_decode_num_drafts_total"])
        > 0
    )
    assert float(counts["num_requests_waiting"]) == 0


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == ["paradraft-family"]
    assert client.models.retrieve("paradraft-family").id == "paradraft-family"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--host", "0.0.0.0"], "lets others in"),
        (["--host", "0.0.0.0", "--api-key", ""], "--api-key is empty"),
        (["--host", "127.0.0.2", "--drafter", str(FAMILY / "pard")], "goes with --target"),
        (["--drafter", str(FAMILY / "pard")], "goes with --target"),
        (["--target", str(FAMILY / "target"), "--drafter", "mtp"], "MTP"),
        (["--target", str(FAMILY / "target" / "config.json")], "is a file"),
        (
            ["--target", str(FAMILY / "target"), "--drafter", str(PUBLIC / "eagle3")],
            "made for another target",
        ),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_starts(line, message):
    said = CliRunner().invoke(app, ["serve", *line])
    assert said.exit_code != 0
    assert message in " ".join((said.output + str(said.exception)).replace("│", " ").split())


def test_bodies_are_plain_json(server):
    """As clients of other languages read them."""
    key = {"Authorization": f"Bearer {KEY}"}
    said = httpx.post(
        f"{server}/chat/completions", json={**ASKED, "max_tokens": 3, "stream": True}, headers=key
    )
    assert said.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in said.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert all(
        json.loads(line.removeprefix("data: "))["object"] == "chat.completion.chunk"
        for line in lines[:-1]
    )
