"""`regenerate --base-url`: a server that speaks OpenAI's protocol answers."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from hf_paradraft.cli import app
from hf_paradraft.training.answers import Server
from hf_paradraft.training.regenerate import regenerate


class OpenAi(ThreadingHTTPServer):
    """Says every prompt again, in capitals; a prompt with `fail` in it is refused as long as
    `fails`.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.open, self.most_open, self.fails = [], 0, 0, True
        self.reply, self.headers = None, []  # a status and a body instead of these
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.together = threading.Barrier(2)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.asked.append((self.path, self.headers.get("Authorization"), body))
            self.server.open += 1
            self.server.most_open = max(self.server.most_open, self.server.open)
        if "together" in text:
            self.server.together.wait(20)
        reason = "length" if "long" in text else "stop"
        said = None if "think" in text else text.upper()
        message = {"role": "assistant", "content": said}
        if "reason" in text:
            message["reasoning_content"] = "They ask."
        if "call" in text:
            calls = [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
            ]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
            reason = "tool_calls"
        if text.startswith("say "):
            message = json.loads(text.removeprefix("say "))
        answer = {"choices": [{"message": message, "finish_reason": reason}]}
        status = 404 if "fail" in text and self.server.fails else 400 if "refuse" in text else 200
        with self.server.lock:
            self.server.open -= 1
            self.server.headers.append({name.lower(): self.headers[name] for name in self.headers})
        content = json.dumps(answer if status == 200 else {"error": "no"}).encode()
        if self.server.reply is not None:
            status, content = self.server.reply
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server():
    openai = OpenAi()
    thread = threading.Thread(target=openai.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield openai
    openai.shutdown()
    openai.server_close()


def written(folder, *texts):
    file = folder / "prompts.jsonl"
    file.write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in texts
        )
    )
    return file


def rows_in(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_server_answers_several_prompts_at_a_time(server, tmp_path):
    prompts = written(tmp_path, "together one", "together two", "a long story")
    assert (
        regenerate(
            Server(server.url, "big", 7, 2, api_key="secret"), prompts, tmp_path / "out.jsonl"
        )
        == 3
    )
    assert server.most_open == 2
    rows = rows_in(tmp_path / "out.jsonl")
    assert [row["messages"][-1]["content"] for row in rows] == [
        "TOGETHER ONE",
        "TOGETHER TWO",
        "A LONG STORY",
    ]
    assert [row["finished"] for row in rows] == [True, True, False]
    path, key, body = server.asked[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("big", 7, 0.0)


def test_what_a_server_has_answered_is_not_asked_again(server, tmp_path):
    prompts, output = written(tmp_path, "one", "two", "fail", "four"), tmp_path / "out.jsonl"
    with pytest.raises(
        OSError, match=r"did not answer prompt 3 .*code: 404.*kept: the same call goes on"
    ):
        regenerate(Server(server.url, "big", 7, 1), prompts, output)
    server.fails, before = False, len(server.asked)
    regenerate(Server(server.url, "big", 7, 1), prompts, output)
    again = [body["messages"][-1]["content"] for _, _, body in server.asked[before:]]
    assert "one" not in again
    assert [row["messages"][-1]["content"] for row in rows_in(output)] == [
        "ONE",
        "TWO",
        "FAIL",
        "FOUR",
    ]
    with pytest.raises(ValueError, match="other settings"):
        regenerate(Server(server.url, "bigger", 7, 1), prompts, output)


def test_a_prompt_that_a_server_cannot_answer_holds_nothing_up(server, tmp_path):
    """One that is too long, and one whose tokens all went into thoughts: both are kept as
    unfinished.
    """
    prompts, output = written(tmp_path, "one", "refuse", "think", "four"), tmp_path / "out.jsonl"
    assert regenerate(Server(server.url, "big", 7, 1), prompts, output) == 4
    assert [row["messages"][-1]["content"] for row in rows_in(output)] == ["ONE", "", "", "FOUR"]
    assert [row["finished"] for row in rows_in(output)] == [True, False, False, True]


def test_the_command_asks_a_server_without_loading_a_model(server, tmp_path):
    prompts, output = written(tmp_path, "hello"), tmp_path / "out.jsonl"
    words = [
        "regenerate",
        "--target",
        "big",
        "--base-url",
        server.url,
        "--prompts",
        str(prompts),
        "--output",
        str(output),
    ]
    result = CliRunner().invoke(app, words, env={"OPENAI_API_KEY": "other"})
    assert result.exit_code == 0, result.output
    assert server.asked[0][1] == "Bearer other"
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "no conversation"}) + "\n")
    words[words.index(str(prompts))] = str(tmp_path / "texts.jsonl")
    result = CliRunner().invoke(app, [*words, "--overwrite"])
    assert result.exit_code != 0
    assert "a server answers conversations" in str(result.exception or result.output)


def test_a_server_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    prompts = written(tmp_path, "hello")
    with pytest.raises(
        OSError,
        match=r"127.0.0.1:9/v1/chat/completions did not answer prompt 1 .*ConnectError: .*refused",
    ):
        regenerate(Server("http://127.0.0.1:9/v1", "big", 7, 1), prompts, tmp_path / "out.jsonl")


def test_thoughts_and_calls_of_tools_are_kept(server, tmp_path):
    """They were left out, and the answer was no longer what the target writes."""
    tools = [{"type": "function", "function": {"name": "weather"}}]
    asked = ["reason and answer", "think, reason", "call it"]
    rows = [{"messages": [{"role": "user", "content": text}], "tools": tools} for text in asked]
    file, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    regenerate(Server(server.url, "m", 8, 1), file, output)
    answered, thought, called = (json.loads(line) for line in output.read_text().splitlines())
    assert answered["messages"][-1] == {
        "role": "assistant", "content": "REASON AND ANSWER", "reasoning_content": "They ask.",
    }  # fmt: skip
    assert (thought["messages"][-1]["reasoning_content"], thought["messages"][-1]["content"]) == (
        "They ask.",
        "",
    )
    assert called["messages"][-1]["tool_calls"][0]["function"]["name"] == "weather"
    assert [row["finished"] for row in (answered, thought, called)] == [True, False, True]
    assert all(body["tools"] == tools for _, _, body in server.asked)
    assert answered["tools"] == tools


def test_a_server_is_sent_what_the_protocol_knows(server, tmp_path):
    """Strict ones refuse a prompt for anything else, a column of somebody's set say."""
    turns = [
        {"role": "user", "content": "hi", "timestamp": 5},
        {"role": "assistant", "content": "yes", "reasoning": "They greet."},
        {"role": "user", "content": "and"},
    ]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    regenerate(Server(server.url, "m", 8, 1), tmp_path / "rows.jsonl", tmp_path / "out.jsonl")
    ((_, _, body),) = server.asked
    assert body["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes", "reasoning_content": "They greet."},
        {"role": "user", "content": "and"},
    ]


@pytest.mark.parametrize("word", ["fail", "refuse"])
def test_a_server_that_takes_no_prompt_is_said_and_leaves_nothing(word, server, tmp_path):
    """A wrong key or name: the command waited for ever, or wrote empty answers as finished work."""
    prompts = written(tmp_path, *[f"{word} {number}" for number in range(12)])
    output = tmp_path / "out.jsonl"
    with pytest.raises(OSError, match="code: 404" if word == "fail" else "refuses every prompt"):
        regenerate(Server(server.url, "big", 7, 3), prompts, output)
    assert rows_in(output) == []


DEEP = json.loads("[" * 100 + "]" * 100)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"content": "yes", "x": DEEP}, "64 levels deep"),
        ({"content": 5}, "A turn needs 'role' and 'content'"),
        ({"content": "\ud800"}, "half a character"),
        ({"tool_calls": [1]}, "not subscriptable"),
        ({"tool_calls": [{"function": {"arguments": "{}"}}]}, "name"),
        ({"tool_calls": [{"function": {"name": None}}]}, "a tool without a name"),
    ],
)
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_an_answer_that_no_training_reads_is_not_kept(message, why, server, tmp_path):
    prompts, output = written(tmp_path, f"say {json.dumps(message)}"), tmp_path / "out.jsonl"
    with pytest.raises(OSError, match=f"did not answer prompt 1 .*{why}"):
        regenerate(Server(server.url, "big", 7, 1), prompts, output)
    assert not output.exists() or not rows_in(output)


def choice(content="x", finish_reason="stop", **more):
    """A reply with one choice."""
    reason = {} if finish_reason is ... else {"finish_reason": finish_reason}
    return {"choices": [{"message": {"role": "assistant", "content": content, **more}, **reason}]}


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (choice(5), "A turn needs"),
        (choice({"a": 1}), "A turn needs"),
        (choice([{"type": "text", "text": "a"}]), "is not the protocol's"),
        (choice(0), "A turn needs"),
        (choice(None, tool_calls={"a": 1}), "is not the protocol's"),
        (choice(tool_calls="call"), "is not the protocol's"),
        (choice(finish_reason=["stop"]), "is not the protocol's"),
        (choice(finish_reason=...), "is no completion"),
        (choice(tool_calls=[{"id": "1"}]), "is no completion"),
        ({"choices": [{"message": "hello", "finish_reason": "stop"}]}, "is no completion"),
        ({"choices": []}, "is no completion"),
        ({"error": "boom"}, "is no completion"),
        ([1], "is no completion"),
    ],
)
def test_answers_that_are_none_of_the_protocols_are_refused(reply, message, server, tmp_path):
    """They were kept as finished, and an answer without a finish_reason as cut off."""
    server.reply = 200, json.dumps(reply).encode()
    prompts, output = written(tmp_path, "one"), tmp_path / "out.jsonl"
    with pytest.raises(OSError, match=f"did not answer prompt 1.*{message}"):
        regenerate(Server(server.url, "big", 7, 1), prompts, output)
    assert rows_in(output) == []


def test_an_answer_whose_finish_reason_is_null_is_unfinished(server, tmp_path):
    server.reply = 200, json.dumps(choice(finish_reason=None)).encode()
    prompts, output = written(tmp_path, "one"), tmp_path / "out.jsonl"
    regenerate(Server(server.url, "big", 7, 1), prompts, output)
    assert [row["finished"] for row in rows_in(output)] == [False]


@pytest.mark.parametrize("key", [None, "secret\n"])
def test_nothing_of_the_environment_is_sent(key, server, tmp_path, monkeypatch):
    """An organisation, a project and headers that were meant for another server."""
    for name in ("ORG_ID", "PROJECT_ID", "ADMIN_KEY", "API_KEY"):
        monkeypatch.setenv(f"OPENAI_{name}", "private")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Token: private\nAuthorization: private")
    writer = Server(server.url, "big", 7, 1, api_key=key)
    regenerate(writer, written(tmp_path, "one"), tmp_path / "out.jsonl")
    (headers,) = server.headers
    assert headers.get("authorization") == (key and "Bearer secret")
    assert "private" not in str(headers)


@pytest.mark.parametrize(
    ("url", "key", "message"),
    [
        ("localhost:8000/v1", None, "no http://"),
        ("http://[::1", None, "is none"),
        ("http://x/v1", "s\nx", "no header can have"),
    ],
)
def test_addresses_and_keys_that_cannot_be_sent(url, key, message):
    with pytest.raises(ValueError, match=message):
        Server(url, "big", 7, 1, api_key=key)


@pytest.mark.parametrize("body", [{"detail": "no such model"}, "no such model"])
def test_the_words_of_a_refusal_are_shown_but_not_all(body, server, tmp_path, caplog):
    for status in (404, 400):
        server.reply = status, f"{json.dumps(body)}{'x' * 600}".encode()
        with pytest.raises(OSError) as raised:  # noqa: PT011
            regenerate(
                Server(server.url, "m", 7, 1), written(tmp_path, "one"), tmp_path / f"{status}"
            )
        said = str(raised.value) if status == 404 else caplog.text
        assert "no such model" in said
        assert "x" * 200 not in said


def test_without_the_package_the_finished_file_stays(server, tmp_path, monkeypatch):
    prompts, output = written(tmp_path, "one"), tmp_path / "out.jsonl"
    regenerate(Server(server.url, "big", 7, 1), prompts, output)
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ImportError):
        regenerate(Server(server.url, "big", 7, 1), prompts, output, overwrite=True)
    assert [row["messages"][-1]["content"] for row in rows_in(output)] == ["ONE"]


@pytest.mark.parametrize("count", [7, 32])
def test_a_server_that_takes_no_prompt_any_more_is_said(count, server, tmp_path):
    """All later prompts were kept as empty answers; but some last ones may all be too long."""
    texts = ["fine"] * 32 + ["refuse"] * count
    prompts, output = written(tmp_path, *texts), tmp_path / "out.jsonl"
    if count == 7:
        assert regenerate(Server(server.url, "big", 7, 1), prompts, output) == 39
        return
    for _ in range(2):  # and again, where answers are there
        with pytest.raises(OSError, match="refuses every prompt"):
            regenerate(Server(server.url, "big", 7, 1), prompts, output)
    assert [row["messages"][-1]["content"] for row in rows_in(output)] == ["FINE"] * 32


def test_a_failure_keeps_refusals(server, tmp_path):
    """They were kept until all was answered, and asked again after a failure."""
    prompts, output = written(tmp_path, "refuse", "one", "refuse", "fail"), tmp_path / "out.jsonl"
    with pytest.raises(OSError, match="did not answer prompt 4"):
        regenerate(Server(server.url, "big", 7, 1), prompts, output)
    assert sorted((row["index"], row["finished"]) for row in rows_in(output)) == [
        (0, False),
        (1, True),
        (2, False),
    ]
