"""What is learned is what the target wrote, whatever its chat template makes of answers."""

import codecs
import json
import subprocess
import sys

import pytest
import torch
from tiny import make_tokenizer, tiny_model
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.decoders import ByteLevel as Bytes
from tokenizers.models import BPE, Unigram
from tokenizers.pre_tokenizers import ByteLevel
from trained import regenerate
from transformers import PreTrainedTokenizerFast

from hf_paradraft.training.data import IGNORED, encode_rows, tokenizer_hash
from hf_paradraft.training.source import load_rows

# What Qwen3's template does with answers: a thought is shown behind the last question, an empty one
# where there is none.
QWEN3 = """
{%- set last = namespace(question=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set said, thought = m.content, '' %}
    {%- if '</think>' in said %}
        {%- set thought = said.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
        {%- set thought = thought.lstrip('\n') %}
        {%- set said = said.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {%- if m.role == 'assistant' and loop.index0 > last.question %}
        {%- set said = '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + said.lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\n' + said + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# DeepSeek-R1's: the turn is opened with a thought, and thoughts are left out of what was answered.
R1 = """
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<|User|>' + m.content }}
    {%- else %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"""
PLAIN = """
{%- for m in messages %}{{ m.role + ': ' + m.content | trim + '<end>' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
ENDS = {"qwen3": (QWEN3, "<|im_end|>\n"), "r1": (R1, "<|end|>"), "plain": (PLAIN, "<end>")}
THOUGHT = "<think>\nOkay, they greet.\n</think>\n\nHi!"
ANSWERS = (
    "Hi!",
    THOUGHT,
    "<think>\nOkay, they",
    "<think>\nOkay\n</think>",
    "",
    "end",
    "<end",
    " so ",
)


@pytest.fixture(params=ENDS)
def chat(request):
    """A tokenizer of bytes with a template, and what that puts behind an answer."""
    template, end = ENDS[request.param]
    alphabet = sorted(ByteLevel.alphabet())
    bytes_alone = Tokenizer(
        BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[])
    )
    bytes_alone.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_alone.decoder = Bytes()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_alone, pad_token=alphabet[0], eos_token=alphabet[1]
    )
    tokenizer.chat_template = template
    return tokenizer, end


def labelled(tokenizer, row):
    encoded = encode_rows([row, {"text": "a b c"}], tokenizer, 4096)
    if len(encoded) == 1:
        return ""
    return tokenizer.decode([label for label in encoded[0]["labels"] if label != IGNORED])


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_is_learned_as_it_stands(chat, answer, finished):
    """Cut-off answers got an empty thought in front, finished ones lost theirs, a cut-off "end"
    learned the end's beginning.
    """
    tokenizer, end = chat
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": answer}]
    assert labelled(tokenizer, {"messages": messages, "finished": finished}) == answer + (
        end if finished else ""
    )


def test_chats_whose_earlier_turns_are_rewritten_are_learned_from(chat):
    """One of them refused the whole run."""
    tokenizer, end = chat
    turns = [("user", "Hello"), ("assistant", THOUGHT), ("user", "And?"), ("assistant", "Bye.")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    learned = labelled(tokenizer, row)
    assert learned.endswith("Bye." + end)
    assert learned in ("Bye." + end, THOUGHT + end + "Bye." + end)


def test_the_tokens_that_were_written_are_learned(chat, tmp_path):
    """Text would be tokenised anew, and by another tokenizer it has to be."""
    tokenizer, _ = chat
    target = tiny_model(vocab_size=256, eos_token_id=7, max_position_embeddings=512)
    target.generation_config.eos_token_id = 7
    rows = [[("user", "Hello")], [("user", "a"), ("assistant", THOUGHT), ("user", "b")]]
    rows = [
        {"messages": [{"role": role, "content": content} for role, content in turns]}
        for turns in rows
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    regenerate(
        target,
        tokenizer,
        tmp_path / "prompts.jsonl",
        tmp_path / "answers.jsonl",
        max_new_tokens=9,
        batch_size=2,
    )
    answered = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    encoded = encode_rows(answered, tokenizer, 4096)
    for row, sample in zip(answered, encoded, strict=True):
        prompt = tokenizer.apply_chat_template(
            row["messages"][:-1], add_generation_prompt=True, return_dict=False
        )
        written = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=9)[
            0
        ].tolist()
        assert sample["input_ids"] == row["ids"] == written
        assert sample["labels"] == [IGNORED] * len(prompt) + written[len(prompt) :]
    other = make_tokenizer("Hello a b")
    assert tokenizer_hash(other) != tokenizer_hash(tokenizer)
    assert max(encode_rows(answered, other, 4096)[0]["input_ids"]) < len(other)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"text": "a", "finished": "false"},
            "Row 1: 'finished' must be true or false, but is 'false'",
        ),
        ({"text": "a \ud800 b"}, "Row 1: The text has half a character at place 2"),
        (
            {"messages": [{"role": "user", "content": "\udc00"}]},
            "Row 1: The text has half a character at place 0",
        ),
        ({"text": "a", "ids": [1, "x"]}, "Row 1: 'ids' must be a list of token ids"),
        (
            {"text": "a", "ids": [1, 2], "prompt_tokens": -1},
            "Row 1: 'ids' must be a list of token ids",
        ),
    ],
)
def test_malformed_rows_are_refused_by_number(row, message, tmp_path):
    tokenizer = make_tokenizer()
    with pytest.raises(ValueError, match=message):
        encode_rows([{**row, "tokenizer": tokenizer_hash(tokenizer)}], tokenizer, 20)
    if "ids" not in row and "finished" not in row:
        (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(ValueError, match=message.replace("Row", "prompts.jsonl, row")):
            regenerate(tiny_model(), tokenizer, tmp_path / "prompts.jsonl", tmp_path / "out.jsonl")


def test_answers_of_another_generation_config_are_not_gone_on_with(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"text": "a b c"}\n')
    paths = (tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl")
    regenerate(tiny_model(), make_tokenizer(), *paths, max_new_tokens=3)
    for name, value in (("repetition_penalty", 1.5), ("eos_token_id", 3)):
        target = tiny_model()
        setattr(target.generation_config, name, value)
        with pytest.raises(ValueError, match=f"generation_config: .*{name}.* now"):
            regenerate(target, make_tokenizer(), *paths, max_new_tokens=3)


HOLD = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("locked", flush=True)
    input()
"""


def test_two_processes_do_not_write_one_file(tmp_path):
    """Together they wrote every answer twice."""
    (tmp_path / "prompts.jsonl").write_text('{"text": "a b c"}\n')
    command = [sys.executable, "-c", HOLD, str(tmp_path / ".answers.jsonl.lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(OSError, match="Another process is writing"):
            regenerate(
                tiny_model(),
                make_tokenizer(),
                tmp_path / "prompts.jsonl",
                tmp_path / "answers.jsonl",
                max_new_tokens=3,
            )
        assert not (tmp_path / "answers.jsonl").exists()
        other.communicate("\n")


REASONS = """
{%- if tools %}{{ '<tools>' + (tools | map(attribute='name') | join(',')) + '</tools>' }}{% endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' and loop.last and m.reasoning_content %}
        {{- '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + opening }}{% endif %}"""


def with_template(chat, template, opening=""):
    tokenizer, _ = chat
    tokenizer.chat_template = template.replace("opening", repr(opening))
    return tokenizer


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("opening", ["", "<think>\n"])
def test_thoughts_next_to_an_answer_are_learned(chat, name, opening, finished):
    """They were left out, and the drafter learned texts that the target does not write."""
    tokenizer = with_template(chat, REASONS, opening)
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!", name: "They greet."},
    ]
    thought = "They greet.\n</think>\n\nHi!" if opening else "<think>\nThey greet.\n</think>\n\nHi!"
    expected = thought + ("<|im_end|>\n" if finished else "")
    assert labelled(tokenizer, {"messages": messages, "finished": finished}) == expected


def test_thoughts_that_a_template_does_not_know_stand_before_the_answer(chat):
    tokenizer, end = chat
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!", "reasoning_content": "They greet."},
    ]
    opened = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    opening = "" if opened.endswith("<think>\n") else "<think>\n"
    assert (
        labelled(tokenizer, {"messages": messages}) == f"{opening}They greet.\n</think>\n\nHi!{end}"
    )


def test_a_thought_that_is_opened_twice_is_said(chat, caplog):
    tokenizer = with_template(chat, R1)
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "<think>\nSo.\n</think>\nHi!"},
    ]
    labelled(tokenizer, {"messages": messages})
    assert "has opened already" in caplog.text


@pytest.mark.parametrize("packed", [False, True])
def test_tools_are_shown_as_the_target_saw_them(chat, packed):
    tokenizer = with_template(chat, REASONS)
    tools = [{"name": "weather"}, {"name": "time"}]
    row = {
        "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}],
        "tools": json.dumps(tools) if packed else tools,
    }
    encoded = encode_rows([row], tokenizer, 4096)[0]
    assert tokenizer.decode(encoded["input_ids"]).startswith(
        "<tools>weather,time</tools><|im_start|>user"
    )
    with pytest.raises(ValueError, match="Row 1: 'tools' must be a list of JSON schemas"):
        encode_rows([{**row, "tools": 3}], tokenizer, 4096)


def test_regenerate_asks_with_the_tools_of_a_row(chat, tmp_path):
    tokenizer = with_template(chat, REASONS)
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=512)
    file, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    row = {"messages": [{"role": "user", "content": "Hello"}], "tools": [{"name": "weather"}]}
    file.write_text(json.dumps(row) + "\n")
    regenerate(model, tokenizer, file, output, max_new_tokens=4)
    made = json.loads(output.read_text())
    assert made["tools"] == row["tools"]
    assert tokenizer.decode(made["ids"]).startswith("<tools>weather</tools>")


def test_a_chat_that_begins_with_an_assistants_turn(chat):
    tokenizer, end = chat
    messages = [{"role": "assistant", "content": "Welcome!"}, {"role": "user", "content": "Hello"}]
    assert labelled(
        tokenizer, {"messages": [*messages, {"role": "assistant", "content": "Hi!"}]}
    ).endswith(f"Hi!{end}")
    assert labelled(tokenizer, {"messages": messages[:1]}) == f"Welcome!{end}"


def test_sharegpt_is_read(chat, tmp_path):
    tokenizer, end = chat
    file = tmp_path / "rows.jsonl"
    turns = [
        {"from": "system", "value": "Be kind."},
        {"from": "human", "value": "Hello"},
        {"from": "gpt", "value": "Hi!"},
    ]
    # as some editors write it
    file.write_bytes(codecs.BOM_UTF8 + json.dumps({"conversations": turns}).encode() + b"\n")
    (row,) = load_rows(file)
    assert [turn["role"] for turn in row["messages"]] == ["system", "user", "assistant"]
    assert labelled(tokenizer, row) == f"Hi!{end}"
    # columns of other rows
    beside = [{"role": None, "content": None, **turn} for turn in turns[1:]]
    file.write_text(json.dumps({"system": "Be kind.", "conversations": beside}) + "\n")
    assert load_rows(file) == [row]
    file.write_text(json.dumps({"system": "Be kind.", "messages": row["messages"][1:]}) + "\n")
    assert load_rows(file)[0]["messages"] == row["messages"]
    file.write_text(json.dumps({"conversations": [{"from": ["a"], "value": "x"}]}) + "\n")
    with pytest.raises(ValueError, match="row 1: a turn of 'conversations' needs 'from'"):
        load_rows(file)
    file.write_text(
        json.dumps({"conversations": [{"from": "moderator", "value": "Order!"}]}) + "\n"
    )
    with pytest.raises(ValueError, match=r"row 1: a turn of 'conversations' needs 'from' \(human,"):
        load_rows(file)


def test_a_turn_is_no_beginning_of_a_text():
    """Metaspace puts a space before a text's first word, and each turn got one."""
    words = [
        "<unk>",
        "<|im_start|>",
        "<|im_end|>",
        "<|sep|>",
        "▁",
        "user",
        "▁Hi",
        "Hi",
        "▁there",
        "assistant",
    ]
    backend = Tokenizer(Unigram([(word, -1.0) for word in words], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<|im_end|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|sep|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|sep|>' + m.content + '<|im_end|>' "
        "}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|sep|>' }}{% endif "
        "%}"
    )
    alone, behind = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("Hi", "<|sep|>Hi")
    )
    assert alone != behind[1:]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi there"}]
    encoded = encode_rows([{"messages": messages}], tokenizer, 64)[0]
    whole = tokenizer(
        tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False
    )["input_ids"]
    assert encoded["input_ids"] == whole
