"""Which tokens carry labels."""

import json

import pytest
from huggingface_hub import HfApi
from tiny import EOS, make_tokenizer, tiny_model
from trained import regenerate

from hf_paradraft.chat import encode_question
from hf_paradraft.training.data import encode_chat, encode_rows, encode_text
from hf_paradraft.training.source import load_rows, turns_of

DEPTHS = (100, 900, 100_000)  # of JSON that can be written again, only read, or not even that


@pytest.fixture
def tokenizer():
    return make_tokenizer("a u b c d e")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_text_is_labelled_throughout_and_ends(tokenizer):
    encoded = encode_text(tokenizer, "b c d")
    # the padding token is the end token too: it stays a label
    assert encoded["input_ids"] == [
        2,
        3,
        4,
        EOS,
    ]
    assert encoded["labels"] == encoded["input_ids"]
    assert encode_text(tokenizer, "b c d", finished=False)["input_ids"] == [2, 3, 4]


def test_only_assistant_turns_are_labelled(tokenizer):
    messages = [
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c d"},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": "d"},
    ]
    encoded = encode_chat(tokenizer, messages)
    #        u  b  a  c  d  eos u  e  a  d  eos
    assert encoded["input_ids"] == [1, 2, 0, 3, 4, EOS, 1, 5, 0, 4, EOS]
    i = -100
    assert encoded["labels"] == [i, i, i, 3, 4, EOS, i, i, i, 4, EOS]
    cut = encode_chat(tokenizer, messages, finished=False)
    assert cut["input_ids"] == [1, 2, 0, 3, 4, EOS, 1, 5, 0, 4]


def test_rows_are_finished_unless_they_say_otherwise(tokenizer, tmp_path):
    rows = load_rows(
        write(tmp_path / "rows.jsonl", [{"text": "b c", "finished": False}, {"text": "b c"}])
    )
    assert [row["input_ids"] for row in encode_rows(rows, tokenizer, 9)] == [[2, 3], [2, 3, EOS]]


def test_rows_come_from_either_column(tokenizer, tmp_path):
    texts = write(tmp_path / "texts.jsonl", [{"text": "b c"}, {"text": "b c d e b c d e"}])
    encoded = encode_rows(load_rows(texts), tokenizer, max_length=4)
    assert [row["length"] for row in encoded] == [3, 4]
    chats = write(
        tmp_path / "chats.jsonl",
        [{"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]}],
    )
    assert len(encode_rows(load_rows(chats), tokenizer, max_length=9)) == 1


def test_conversations_keep_thoughts_and_calls(tmp_path):
    """They are learned as `messages`, whatever names a set has for the rest."""
    call = [{"type": "function", "function": {"name": "weather", "arguments": "{}"}}]
    turns = [
        {"from": "human", "value": "Hi?"},
        {"from": "gpt", "value": "Yes.", "reasoning_content": "They greet."},
        {"role": "assistant", "content": None, "tool_calls": call},
    ]
    (row,) = load_rows(write(tmp_path / "rows.jsonl", [{"conversations": turns}]))
    hi, yes, calls = turns_of(row["messages"])
    assert (hi["role"], yes["content"], yes["reasoning_content"]) == ("user", "Yes.", "They greet.")
    assert (calls["content"], calls["tool_calls"]) == (None, call)


def test_rows_without_labels_are_left_out(tokenizer, tmp_path):
    question = {
        "messages": [{"role": "user", "content": "b c d"}, {"role": "assistant", "content": "c"}]
    }
    unanswered = {"messages": [{"role": "user", "content": "b"}]}
    file = write(tmp_path / "rows.jsonl", [question, unanswered])
    assert len(encode_rows(load_rows(file), tokenizer, max_length=20)) == 1
    with pytest.raises(ValueError, match="None of the 2 rows"):
        encode_rows(load_rows(file), tokenizer, max_length=3)


def test_missing_empty_and_broken_files_are_refused(tmp_path):
    with pytest.raises(OSError, match="no file"):
        load_rows(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match=r"text.*messages|'text' or 'messages'"):
        load_rows(write(tmp_path / "other.jsonl", [{"question": "?"}]))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="no rows"):
        load_rows(tmp_path / "empty.jsonl")
    for broken in ("{not json", *('{"text": %s}' % ("[" * deep + "]" * deep) for deep in DEPTHS)):
        (tmp_path / "broken.jsonl").write_text(f"{broken}\n")
        with pytest.raises(ValueError, match="not JSON lines: line 1"):
            load_rows(tmp_path / "broken.jsonl")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": [{"from": "human", "value": "b"}]},
            r"Row 2: A turn needs 'role' and 'content'.*'from': 'human'",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "Row 2: A turn needs"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "Row 2: A turn needs"),
        *(
            (
                {"messages": [{"role": "assistant", "content": "b", "reasoning_content": thought}]},
                "Row 2: A turn needs .* thoughts are a text or none, but .*'reasoning_content'",
            )
            for thought in (5, ["x"], {"a": 1}, True)
        ),
        ({"messages": "b c"}, "Row 2: 'messages' must be a list of turns, but is 'b c'"),
        ({"messages": {"role": "user", "content": "b"}}, "Row 2: 'messages' must be a list"),
        ({"text": ["b", "c"]}, r"Row 2: 'text' must be a text, but is \['b', 'c'\]"),
        (
            {"messages": [{"role": "user", "content": "b"}], "tools": "[" * 900 + "]" * 900},
            "Row 2: 'tools' must be a list of JSON schemas",
        ),
        ({"text": 5}, "Row 2: 'text' must be a text, but is 5"),
    ],
)
def test_rows_of_another_shape_are_named(tokenizer, tmp_path, row, message):
    rows = load_rows(write(tmp_path / "rows.jsonl", [dict.fromkeys(row), row]))
    with pytest.raises(ValueError, match=message):
        encode_rows(rows, tokenizer, max_length=20)


def test_chats_that_a_template_refuses_are_left_out(tokenizer, tmp_path, caplog):
    refuse = "{% if m['content'] == 'h' %}{{ raise_exception('no h') }}{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}" + refuse + "{{ m['content'] }}{% endfor %}"
    rows = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": "c"}]}
        for word in "bh"
    ]
    file = write(tmp_path / "rows.jsonl", rows)
    assert len(encode_rows(load_rows(file), tokenizer, max_length=20)) == 1
    assert "1 of 2 rows are left out. Row 2: The chat template refuses" in caplog.text
    assert (
        regenerate(
            tiny_model(), tokenizer, file, tmp_path / "some.jsonl", batch_size=1, max_new_tokens=2
        )
        == 1
    )
    assert "1 of 2 rows are left out. Prompt 2: " in caplog.text
    worse = write(tmp_path / "worse.jsonl", [*rows, rows[1]])
    with pytest.raises(
        ValueError, match=r"2 of 3 rows cannot be used. Row 2: The chat template refuses .*no h"
    ):
        encode_rows(load_rows(worse), tokenizer, max_length=20)
    with pytest.raises(ValueError, match=r"refuses .*: no h"):
        regenerate(
            tiny_model(), tokenizer, worse, tmp_path / "out.jsonl", batch_size=1, max_new_tokens=2
        )
    assert not (tmp_path / "out.jsonl").exists()
    write(tmp_path / "out.jsonl", rows * 2)
    with pytest.raises(ValueError, match="how it was made"):
        regenerate(tiny_model(), make_tokenizer(), file, tmp_path / "out.jsonl", max_new_tokens=2)


def test_content_in_parts_is_one_text(tokenizer, tmp_path):
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": " c"}]
    whole, split = (
        encode_rows(load_rows(write(tmp_path / name, [{"messages": [question, {"role": "assistant",
        "content": content}]}])),
                    tokenizer, max_length=20)[0]["input_ids"]
        for question in [{"role": "user", "content": "d"}]
        for name, content in (("whole.jsonl", "b c"), ("split.jsonl", parts))
    )  # fmt: skip
    assert whole == split


def test_chats_without_a_template_are_refused(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        encode_chat(tokenizer, [{"role": "assistant", "content": "b"}])


def test_rows_from_a_dataset_on_the_hub(hub, tmp_path):
    rows = [{"text": f"line {i}"} for i in range(5)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    HfApi().create_repo("user/rows", repo_type="dataset")
    HfApi().upload_folder(repo_id="user/rows", folder_path=tmp_path, repo_type="dataset")
    assert list(load_rows("user/rows")) == rows
    with pytest.raises((OSError, ValueError), match="user/nothing"):
        load_rows("user/nothing")


def test_prompts_are_not_overwritten_with_answers(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "a b c"}\n{"text": "second row"}')
    before = file.read_bytes()
    with pytest.raises(ValueError, match="name another one"):
        regenerate(tiny_model(), make_tokenizer(), file, file)
    assert file.read_bytes() == before


def test_answers_of_another_run_are_not_gone_on_with(tmp_path):
    file, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    write(file, [{"text": "a b c"}, {"text": "c b a"}])
    options = {"max_new_tokens": 3}
    assert regenerate(tiny_model(), make_tokenizer(), file, output, **options) == 2
    assert regenerate(tiny_model(), make_tokenizer(), file, output, **options) == 0
    before = output.read_bytes()
    for model, more, what in (
        (tiny_model(seed=5), {}, "weights"),
        (tiny_model(), {"max_new_tokens": 4}, "max_new_tokens: 3 there, 4 now"),
        (tiny_model(), {"temperature": 0.5}, "temperature"),
    ):
        with pytest.raises(ValueError, match=what):
            regenerate(model, make_tokenizer(), file, output, **{**options, **more})
    write(file, [{"text": "c b a"}, {"text": "a b c"}])
    with pytest.raises(ValueError, match="prompts"):
        regenerate(tiny_model(), make_tokenizer(), file, output, **options)
    assert output.read_bytes() == before
    assert regenerate(tiny_model(), make_tokenizer(), file, output, **options, overwrite=True) == 2
    (tmp_path / "answers.jsonl.run").unlink()
    with pytest.raises(ValueError, match="how it was made"):
        regenerate(tiny_model(), make_tokenizer(), file, output, **options)


def test_a_run_that_was_killed_inside_a_character_goes_on(tmp_path):
    file, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    write(file, [{"text": "a b c"}, {"text": "c b a"}])
    regenerate(tiny_model(), make_tokenizer(), file, output, max_new_tokens=3)
    whole = output.read_bytes()
    first = whole.split(b"\n")[0] + b"\n"
    output.write_bytes(first + '{"text": "é'.encode()[:-1])
    assert regenerate(tiny_model(), make_tokenizer(), file, output, max_new_tokens=3) == 1
    assert output.read_bytes() == whole


def test_prompts_that_are_measured_on_are_not_answered(tmp_path):
    file, measured, output = (
        tmp_path / name for name in ("prompts.jsonl", "measured.jsonl", "answers.jsonl")
    )
    write(file, [{"text": "a b c d e f g h " * 3}, {"text": "h g f"}])
    write(measured, [{"turns": ["so: " + "a b c d e f g h " * 2]}])
    assert (
        regenerate(tiny_model(), make_tokenizer(), file, output, max_new_tokens=3, avoid=measured)
        == 1
    )
    assert json.loads(output.read_text())["text"].startswith("h g f")
    write(measured, [{"text": "a b c d e f g h " * 2}])
    with pytest.raises(ValueError, match="nothing is left"):
        regenerate(
            tiny_model(), make_tokenizer(), measured, tmp_path / "none.jsonl", avoid=measured
        )


def test_bare_text_instead_of_a_chat_is_told_once(monkeypatch):
    told, tokenizer = [], make_tokenizer()
    monkeypatch.setattr("hf_paradraft.chat.logger.warning_once", told.append)
    encode_question(tokenizer, "a b")
    assert told == []
    tokenizer.chat_template = None
    assert encode_question(tokenizer, "a b").tolist() == [[0, 1]]
    assert "has no chat template" in told[0]


def test_rows_of_other_columns_are_counted_and_named(tmp_path, caplog):
    """They vanished: one row of a hundred was learned from, without a word."""
    file = tmp_path / "rows.jsonl"
    write(file, [{"text": "a b c"}, {"text": "c b a"}, {"prompt": "a", "response": "b"}])
    assert len(load_rows(file)) == 2
    assert (
        "1 of 3 rows are left out. Row 3 has none of conversations, messages, text." in caplog.text
    )
    write(file, [{"text": "a b c"}, *[{"prompt": "a"}] * 9])
    with pytest.raises(ValueError, match=r"9 of 10 rows cannot be used. Row 2 has none of"):
        load_rows(file)


def test_rows_with_nothing_to_learn_are_counted(caplog):
    rows = [{"text": "a b c"}, {"text": ""}, {"text": "c b a"}]
    assert len(encode_rows(rows, make_tokenizer(), 16)) == 2
    assert "1 of 3 rows have no token to learn" in caplog.text


def test_the_token_that_ends_an_answer_is_learned_where_it_opens_the_next_turn(tokenizer):
    """As in GLM's templates, whose `<|user|>` ends what the model writes."""
    tokenizer.add_special_tokens({"eos_token": "<user>"})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ ('<user> ' if m['role'] == 'user' else ' a ') + m['content'] "
        "}}{% endfor %}{% if add_generation_prompt %}{{ ' a ' }}{% endif %}"
    )
    end, i = tokenizer.eos_token_id, -100
    messages = [
        {"role": role, "content": word}
        for role, word in zip(["user", "assistant"] * 2, "bcde", strict=True)
    ]
    encoded = encode_chat(tokenizer, messages)
    assert encoded["input_ids"] == [end, 2, 0, 3, end, 4, 0, 5, end]
    assert encoded["labels"] == [i, i, i, 3, end, i, i, 5, end]
    assert encode_chat(tokenizer, messages, finished=False)["labels"] == [i, i, i, 3, end, i, i, 5]


@pytest.mark.parametrize(
    "mark",
    [
        {"weight": 0},
        {"loss": False},
        {"train": False},
        {"weight": 1},
        {"train": True, "weight": 0.0},
    ],
)
def test_turns_that_are_not_to_be_learned_are_not(tokenizer, mark):
    messages = [
        {"role": role, "content": word}
        for role, word in zip(["user", "assistant"] * 2, "bcde", strict=True)
    ]
    i, learned = -100, mark == {"weight": 1}
    first = encode_chat(tokenizer, [messages[0], {**messages[1], **mark}, *messages[2:]])["labels"]
    assert first == [i, i, i, *([3, EOS] if learned else [i, i]), i, i, i, 5, EOS]
    last = encode_chat(tokenizer, [*messages[:3], {**messages[3], **mark}])["labels"]
    assert last == [i, i, i, 3, EOS, i, i, i, *([5, EOS] if learned else [i, i])]
    with pytest.raises(ValueError, match="learned or not"):
        encode_chat(tokenizer, [messages[0], {**messages[1], "weight": 0.5}])


def test_chats_are_learned_by_templates_that_iterate_over_parts(tokenizer):
    messages = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c d"}]
    plain = encode_chat(tokenizer, messages)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "m['content'] }}", "m['content'][0]['text'] }}"
    )
    assert encode_chat(tokenizer, messages) == plain
