"""Questions of every form that people have, and none that was trained on."""

import json

import pytest
import torch
from tiny import tiny_model
from transformers import AutoTokenizer

from examples.family.held_out import lessons, pretraining, runs
from examples.family.tasks import CATEGORIES, is_held_out
from hf_paradraft.bench.questions import Question, ask, load_questions
from hf_paradraft.chat import encode_question
from hf_paradraft.demo import FAMILY, GENERAL, QUESTIONS


def write(file, *rows):
    file.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"
    )
    return file


def test_placeholders_are_no_questions(tmp_path):
    turn = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    file = write(
        tmp_path / "speed.jsonl",
        {"category": "math", "turns": ["Is 7 prime?"]},
        {"category": "math", "turns": [turn]},
    )
    with pytest.raises(ValueError, match="row 2: SPEED-Bench leaves this question"):
        load_questions(file)


def test_questions_of_every_format_are_read(tmp_path):
    file = write(
        tmp_path / "mine.jsonl",
        # Spec-Bench
        {
            "question_id": 81,
            "category": "writing",
            "turns": ["Compose a post.", "Rewrite it."],
            "reference": [],
        },
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
                {"role": "user", "content": "Bye"},
            ]
        },
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "assert", "entry_point": "f"},
        {"question": "How many?", "answer": "#### 4"},  # GSM8K
        "",
        '{"text": "Once\u2028more"}',  # a line separator, as JSON may have it
    )
    assert load_questions(file) == [
        Question("writing", ("Compose a post.", "Rewrite it.")),
        Question("mine", ("Hi", "Bye")),
        Question("mine", ("def f():\n",)),
        Question("mine", ("How many?",)),
        Question("mine", ("Once\u2028more",)),
    ]
    assert [question.category for question in load_questions(file, per_category=1)] == [
        "writing",
        "mine",
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{broken", r"is not JSON lines: line 2"),
        ("[1]", r"line 2: wanted an object"),
        ({"answer": "4"}, r"row 2: no question in it, wanted one of turns.*but it has answer"),
        ({"turns": [3]}, r"row 2: no question"),
        ({"turns": 3}, r"row 2: no question"),
        ({"messages": ["hi"]}, r"row 2: no question"),
        ({"messages": 5}, r"row 2: no question"),
        ({"prompt": "a \ud800"}, r"row 2: The text has half a character at place 2"),
        ("[" * 100_000, r"is not JSON lines: line 2"),
        ({"messages": [{"content": "x"}]}, r"row 2: no question"),
        ({"messages": [{"role": "system", "content": "x"}]}, r"row 2: system messages"),
    ],
)
def test_rows_without_a_question_are_refused(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        load_questions(write(tmp_path / "bad.jsonl", {"prompt": "ok"}, row))


def test_missing_and_empty_files_are_refused(tmp_path):
    with pytest.raises(OSError, match="no file"):
        load_questions(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="has no questions"):
        load_questions(write(tmp_path / "empty.jsonl", ""))


def test_questions_are_read_from_the_hub(hub, tmp_path):
    from huggingface_hub import HfApi

    rows = write(
        tmp_path / "test.jsonl",
        {"question": "How many?", "answer": "4"},
        {"question": "How few?", "answer": "3"},
    )
    HfApi().create_repo("user/questions", repo_type="dataset")
    HfApi().upload_file(
        path_or_fileobj=rows,
        path_in_repo="test.jsonl",
        repo_id="user/questions",
        repo_type="dataset",
    )
    expected = [Question("questions", ("How many?",)), Question("questions", ("How few?",))]
    assert load_questions("user/questions") == expected
    assert load_questions("user/questions:default:test") == expected
    with pytest.raises(OSError, match="could be fetched"):
        load_questions("user/questions:default:other")


def test_later_turns_follow_the_targets_own_answers():
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target")
    target = tiny_model(vocab_size=len(tokenizer))
    first, second = ask([Question("a", ("Hello", "Again"))], tokenizer, target, 6)
    assert torch.equal(first.ids, encode_question(tokenizer, "Hello"))
    answer = target.generate(
        first.ids, attention_mask=torch.ones_like(first.ids), do_sample=False, max_new_tokens=6
    )[0]
    spoken = tokenizer.decode(answer[first.ids.shape[1] :], skip_special_tokens=True)
    said = [("user", "Hello"), ("assistant", spoken), ("user", "Again")]
    messages = [{"role": role, "content": content} for role, content in said]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(second.ids[0]) == text
    tokenizer.chat_template = None
    assert tokenizer.decode(encode_question(tokenizer, "Hello")[0]) == "Hello"


@pytest.mark.slow
def test_the_embedded_questions_are_held_out():
    """None shares 13 words in a row with what the family learned from: all lessons, and a fourth of
    what it was pretrained on.
    """
    questions = load_questions(QUESTIONS)
    assert {question.category for question in questions} == set(CATEGORIES)
    assert len({question.turns for question in questions}) == len(questions) == 16 * len(CATEGORIES)
    assert all(is_held_out(question.turns[0]) for question in questions)
    asked = set().union(*(runs(question.turns[0]) for question in questions))
    assert len(asked) > 1000
    for text in (*lessons(), *pretraining(every=4)):
        assert not runs(text) & asked, text


def test_general_questions_load():
    assert len(load_questions(GENERAL)) == 10
