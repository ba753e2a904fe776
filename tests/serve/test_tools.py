"""Answers that keep to a schema, and calls of tools: they parse, in OpenAI's form, and are what the
target alone writes.
"""

import json

import openai
import pytest
import torch
from fastapi.testclient import TestClient
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer

from hf_paradraft import PardDrafter
from hf_paradraft.chat import encode_chat_prompt
from hf_paradraft.demo import FAMILY
from hf_paradraft.serve.answer import Service
from hf_paradraft.serve.app import make_app
from hf_paradraft.serve.grammar import Grammar, ToolForm, json_grammar
from hf_paradraft.serve.scheduler import Scheduler
from hf_paradraft.serve.text import ToolReader

OPEN = (
    "{% if tools %}<|user|>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>{% endif "
    "%}"
)
TURN = "{% for m in messages %}<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>"
END = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
CALL = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
TEMPLATES = {
    "framed": OPEN + TURN + "{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' }}" + CALL + "\n</tool_call>{% endfor %}" + END,
    "bare": OPEN + TURN + "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('one') }}{% endif %}{% set call = m.tool_calls[0] %}"
    + CALL.replace("arguments\"", "parameters\"") + "{% else %}{{ m.content }}{% endif %}" + END,
    "list": OPEN + TURN + "{{ m.content }}{% if m.tool_calls %}[CALLS]["
    "{% for call in m.tool_calls %}" + CALL + '{{ ", " if not loop.last }}'
    "{% endfor %}]{% endif %}" + END,
}  # fmt: skip
FORMS = {
    "framed": ToolForm(
        "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>", "name", "arguments"
    ),
    "bare": ToolForm("", None, "", "name", "parameters"),
    "list": ToolForm("[CALLS][", ", ", "]", "name", "arguments"),
}
CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["city"],
}
CITY["additionalProperties"] = False
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Tell the weather.", "parameters": CITY},
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "parameters": {"type": "object", "additionalProperties": False},
        },
    },
]
MESSAGES = [{"role": "user", "content": "Which date is the exam? It is 2 days after 31 July."}]
ASKED = {"model": "family", "messages": MESSAGES, "max_tokens": 80, "temperature": 0}


@pytest.fixture(scope="module")
def service():
    """What a server with the embedded family serves."""
    target = AutoModelForCausalLM.from_pretrained(FAMILY / "target", dtype=torch.float32)
    drafter = PardDrafter.from_pretrained(FAMILY / "pard", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target")
    return Service(Scheduler(target, drafter, prefix_bytes=1 << 28), tokenizer, "family")


@pytest.fixture(scope="module")
def client(service):
    """OpenAI's client."""
    with TestClient(make_app(service), base_url="http://testserver/v1") as http:
        yield openai.OpenAI(
            base_url="http://testserver/v1", api_key="none", http_client=http, max_retries=0
        )


@pytest.fixture
def template(request, service):
    """Give the tokenizer a template with tools."""
    service.tokenizer.chat_template, own = TEMPLATES[request.param], service.tokenizer.chat_template
    service.__dict__.pop("tool_form", None)
    yield request.param
    service.tokenizer.chat_template = own
    service.__dict__.pop("tool_form", None)


def alone(service, grammar, messages=MESSAGES, tools=None, seed=None):
    """What the target writes under a grammar without drafts."""
    ids = torch.tensor([encode_chat_prompt(service.tokenizer, messages, tools)])
    processor = Grammar(service.grammar_tokenizer, grammar)
    options = {"do_sample": False} if seed is None else {"do_sample": True, "temperature": 1.0}
    if seed is not None:
        torch.manual_seed(seed)
    out = service.scheduler.target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        logits_processor=[processor],
        max_new_tokens=80,
        **options,
    )
    return service.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_of_calls_is_read_from_the_template(name, service):
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target")
    tokenizer.chat_template = TEMPLATES[name]
    assert ToolForm.of_template(tokenizer) == FORMS[name]


@pytest.mark.parametrize("seed", [None, 5])
def test_answers_fit_their_schema(client, service, seed):
    schema = {
        "type": "object",
        "properties": {"a_long_name_of_a_field": {"enum": [1, 20]}, "more": CITY},
    }
    schema |= {"required": ["a_long_name_of_a_field", "more"], "additionalProperties": False}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }
    options = {"response_format": form, "temperature": 0 if seed is None else 1.0, "seed": seed}
    said = client.chat.completions.create(**{**ASKED, **options})
    assert said.choices[0].message.content == alone(service, json_grammar(schema), seed=seed)
    assert set(json.loads(said.choices[0].message.content)) == {"a_long_name_of_a_field", "more"}
    off = client.chat.completions.create(
        **{**ASKED, **options}, extra_body={"speculation": {"enabled": False}}
    )
    assert off.choices[0].message.content == said.choices[0].message.content
    counts = said.metrics["speculative_decoding"]
    assert counts["mean_acceptance_length"] > 2  # most of it is forced
    assert sum(counts["acceptance_histogram"]) == counts["num_spec_steps"]
    assert (
        sum(size * count for size, count in enumerate(counts["acceptance_histogram"]))
        == counts["num_accepted_draft_tokens"]
    )
    assert (
        said.usage.completion_tokens_details.accepted_prediction_tokens
        == counts["num_accepted_draft_tokens"]
    )
    assert off.metrics["speculative_decoding"]["num_draft_tokens"] == 0
    whole = client.chat.completions.create(
        **{**ASKED, "response_format": {"type": "json_object"}, "max_tokens": 200}
    )
    if whole.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(whole.choices[0].message.content), dict)


@pytest.mark.parametrize(
    "choice", ["required", "auto", "none", {"type": "function", "function": {"name": "weather"}}]
)
@pytest.mark.parametrize("template", TEMPLATES, indirect=True)
def test_calls_have_openais_form(client, service, template, choice):
    options = {**ASKED, "tools": TOOLS, "tool_choice": choice}
    if choice in ("none", "auto"):  # this model has learned no tools
        options["max_tokens"] = 24
    said = client.chat.completions.create(**options).choices[0]
    chunks = [
        chunk.choices[0]
        for chunk in client.chat.completions.create(**options, stream=True)
        if chunk.choices
    ]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == (said.message.content or "")
    streamed = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [call.function.arguments for call in streamed] == [
        call.function.arguments for call in said.message.tool_calls or []
    ]
    assert [call.index for call in streamed] == [*range(len(streamed))]
    assert chunks[-1].finish_reason == said.finish_reason
    if choice in ("none", "auto"):
        assert said.finish_reason in ("stop", "length")
        assert not said.message.tool_calls
        assert said.message.content
        return
    [call, *more] = said.message.tool_calls
    assert said.finish_reason == "tool_calls" or (more and said.finish_reason == "length")
    assert call.function.name in ("weather", "now")
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments["city"] in ("Rome", "Oslo")
    if choice != "required":
        assert (call.function.name, more) == ("weather", [])
    turn = said.message.model_dump(exclude_none=True)
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "sun"}
        for call in said.message.tool_calls
    ]
    if template != "bare" or not more:  # whose template writes one
        again = client.chat.completions.create(
            **{**options, "messages": [*MESSAGES, turn, *results], "tool_choice": "auto"}
        )
        assert again.usage.prompt_tokens_details.cached_tokens > 20
        assert again.choices[0].message.content is not None


@pytest.mark.parametrize("name", FORMS)
def test_calls_are_read_as_they_come(name):
    """However the text is cut; what may be the beginning of a call is not shown before it is
    known.
    """
    form = FORMS[name]
    written = [
        f'{{"{form.name}": "f", "{form.arguments}": {{"a": "{text}"}}}}'
        for text in ("x{y", '\\"}', "ä</tool_call>")
    ]
    written = written if form.between else written[:1]
    text = (
        ("Well <tool " if form.begin else "")
        + form.begin
        + (form.between or "").join(written)
        + form.end
    )
    for size in (1, 2, 3, 7, len(text)):
        reader = ToolReader(form)
        pieces = [text[place : place + size] for place in range(0, len(text), size)]
        deltas = [delta for piece in pieces for delta in reader.push(piece)] + [
            *reader.push("", True)
        ]
        assert "".join(delta.get("content", "") for delta in deltas) == (
            "Well <tool " if form.begin else ""
        )
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
        assert [json.loads(call["arguments"])["a"] for call in calls] == [
            "x{y",
            '"}',
            "ä</tool_call>",
        ][: len(written)]
    for plain in ("none <tool", "1 {", "") if form.begin else ("none {", ""):
        reader = ToolReader(form)
        assert (
            "".join(delta["content"] for delta in [*reader.push(plain), *reader.push("", True)])
            == plain
        )


@pytest.mark.parametrize(
    ("wrong", "param", "message"),
    [
        ({"tools": TOOLS}, "tools", "chat template has no tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a",
        "schema": {"type": "king"}}}},
         "response_format", "Invalid type: king"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {
            "allOf": [{"type": "string",
            "pattern": f".*a.{{{number}}}b.*"} for number in range(24)]}}}},
         "response_format", "not understood within 1 seconds"),
        ({"tool_choice": "required"}, "tools", "chat template has no tools"),
        ({"response_format": {"type": "xml"}}, "response_format", "'json_schema'"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]},
            "messages", "Expecting"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_to_is_refused(client, wrong, param, message, monkeypatch):
    monkeypatch.setattr("hf_paradraft.serve.grammar.PARSE_SECONDS", 1)
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{**ASKED, **wrong})
    assert error.value.param == param
    assert message in str(error.value)


@pytest.mark.parametrize("template", ["framed"], indirect=True)
def test_a_tool_that_is_not_offered_cannot_be_chosen(client, template):
    chosen = {"type": "function", "function": {"name": "other"}}
    with pytest.raises(openai.BadRequestError, match="none of tools"):
        client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=chosen)
    with pytest.raises(openai.BadRequestError, match="none of tools"):
        client.chat.completions.create(**ASKED, tool_choice="required")
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"type": "king"}}}
    with pytest.raises(openai.BadRequestError, match="cannot be followed"):
        client.chat.completions.create(**ASKED, tools=[wrong])


@pytest.mark.parametrize("template", TEMPLATES, indirect=True)
def test_schemas_and_tools_go_together(client, template):
    """As agents ask on every turn: calls, or an answer that fits."""
    form = {
        "type": "json_schema",
        "json_schema": {"name": "a", "description": None, "schema": CITY},
    }
    said = (
        client.chat.completions.create(**ASKED, tools=TOOLS, response_format=form)
        .choices[0]
        .message
    )
    assert said.tool_calls or json.loads(said.content)["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("template", ["framed"], indirect=True)
def test_messages_come_as_clients_send_them(client, template):
    """Null for what is not there, places in lists, and no arguments."""
    function = {"name": "now", "description": None, "parameters": None, "strict": None}
    call = {"id": "a", "type": "function", "index": 0, "function": {"name": "now", "arguments": ""}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "noon"}]},
    ]
    options = {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": None,
        "parallel_tool_calls": None,
    }
    assert (
        client.chat.completions.create(**{**ASKED, **options, "messages": [*MESSAGES, *turns]})
        .choices[0]
        .finish_reason
    )


def test_arguments_are_as_they_were_written():
    """Written anew they may be no JSON any more; and what never ends is waited for."""
    form = FORMS["framed"]
    reader = ToolReader(form)
    written = '{"a": 1e400, "b": 1.10, "c": "\\u00e4"}'
    [delta] = reader.push(f"{form.begin}{form.head('f')}{written}}}{form.end}")
    assert delta["tool_calls"][0]["function"] == {"name": "f", "arguments": written}
    reader = ToolReader(form)
    assert not [*reader.push(f'{form.begin}{form.head("f")}{{"a": ' + "[" * 5000)]
    reader = ToolReader(FORMS["bare"])
    assert [*reader.push('{"city": "Rome"}')] == [{"content": '{"city": "Rome"}'}]


def test_a_frame_that_no_text_shows_is_refused():
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target")
    tokenizer.chat_template = TEMPLATES["framed"]
    tokenizer.add_tokens([AddedToken("<tool_call>", special=True)])
    with pytest.raises(ValueError, match="in a form that is not known here"):
        ToolForm.of_template(tokenizer)
