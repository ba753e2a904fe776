"""Prompts that a target writes itself, and answers whose order does not depend on how they were
batched.
"""

import json

import pytest
import torch
from tiny import make_tokenizer, near_copy, tiny_model
from trained import regenerate
from typer.testing import CliRunner

from hf_paradraft.cli import app
from hf_paradraft.training.answers import batches
from hf_paradraft.training.regenerate import invent, user_turn

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ' <eos> ' }}{% endfor %}{% if "
    "add_generation_prompt %}a {% endif %}"
)


def chat_tokenizer():
    tokenizer = make_tokenizer("u a b c d e f g")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_a_template_shows_where_the_user_speaks_or_is_refused():
    tokenizer = chat_tokenizer()
    opened, end = user_turn(tokenizer)
    assert tokenizer.decode(opened) == "u"
    assert end == tokenizer.eos_token_id
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        user_turn(tokenizer)
    tokenizer.chat_template = "{{ messages[0]['content'] | upper }}"
    with pytest.raises(ValueError, match="does not show where"):
        user_turn(tokenizer)
    # as [/INST]: "b" is a word of prompts too
    tokenizer.chat_template = TEMPLATE.replace("<eos>", "b c")
    with pytest.raises(ValueError, match=r"ordinary text \('b c'\)"):
        user_turn(tokenizer)


@pytest.mark.slow
def test_prompts_are_new_finished_and_the_same_when_a_run_goes_on(tmp_path):
    target, tokenizer = tiny_model(initializer_range=0.1), chat_tokenizer()
    options = {"max_tokens": 30, "batch_size": 4}
    invent(target, tokenizer, 20, tmp_path / "whole.jsonl", **options)
    rows = [json.loads(line) for line in (tmp_path / "whole.jsonl").read_text().splitlines()]
    texts = [row["messages"][0]["content"] for row in rows]
    assert len(texts) == len(set(texts)) == 20
    assert not any("<eos>" in text or not text for text in texts)
    parts = tmp_path / "parts.jsonl"
    invent(target, tokenizer, 7, parts, **options)
    with parts.open("a") as file:
        file.write('{"messages": [{"ro')  # killed in a line
    tried = invent(target, tokenizer, 20, parts, **options)
    assert parts.read_text() == (tmp_path / "whole.jsonl").read_text()
    # from the batch on that may have had more
    assert tried == 4 * (1 + rows[-1]["batch"] - rows[6]["batch"])
    assert invent(target, tokenizer, 7, parts, **options) == 0
    assert parts.read_text() == (tmp_path / "whole.jsonl").read_text()


def test_prompts_of_another_run_are_not_continued(tmp_path):
    target, tokenizer = tiny_model(initializer_range=0.1), chat_tokenizer()
    file = tmp_path / "prompts.jsonl"
    options = {"max_tokens": 30, "batch_size": 4}
    invent(target, tokenizer, 2, file, **options)
    made = file.read_text()
    for other in ({"seed": 1}, {"temperature": 0.5}):
        with pytest.raises(ValueError, match="made with other settings"):
            invent(target, tokenizer, 3, file, **options, **other)
    with pytest.raises(ValueError, match=r"made with other settings .*weights"):
        invent(tiny_model(initializer_range=0.1, seed=1), tokenizer, 3, file, **options)
    assert file.read_text() == made
    invent(target, tokenizer, 2, file, **options, seed=1, overwrite=True)
    assert file.read_text() != made


@pytest.mark.parametrize(
    "row", [{"messages": [], "batch": 0}, {"messages": [{"role": "user", "content": "a"}]}]
)
def test_invented_prompts_that_others_changed_are_not_continued(row, tmp_path):
    target, tokenizer = tiny_model(initializer_range=0.1), chat_tokenizer()
    file = tmp_path / "prompts.jsonl"
    options = {"max_tokens": 30, "batch_size": 4}
    invent(target, tokenizer, 2, file, **options)
    with file.open("a") as lines:
        lines.write(json.dumps(row) + "\n")
    changed = file.read_text()
    with pytest.raises(ValueError, match="was changed by others: pass --overwrite"):
        invent(target, tokenizer, 4, file, **options)
    assert file.read_text() == changed


def test_inventing_gives_up_on_turns_that_never_end(tmp_path):
    """However many are wanted, it is given up after some batches; and again where it went on."""
    tokenizer, target = chat_tokenizer(), tiny_model()
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r"None of the last 128 invented turns ended within 1 tokens .* take a chat model",
        ):
            invent(target, tokenizer, 5000, tmp_path / "out.jsonl", max_tokens=1, batch_size=32)
    assert (tmp_path / "out.jsonl").read_text() == ""
    with pytest.raises(ValueError, match="1 at least"):
        invent(target, tokenizer, 0, tmp_path / "out.jsonl")


def test_regenerate_invents_prompts_once_and_answers_them(tmp_path):
    tiny_model(initializer_range=0.1).save_pretrained(tmp_path / "target")
    chat_tokenizer().save_pretrained(tmp_path / "target")
    common = [
        "regenerate",
        "--target",
        str(tmp_path / "target"),
        "--max-new-tokens",
        "8",
        "--dtype",
        "float32",
    ]
    result = CliRunner().invoke(
        app, [*common, "--invent", "5", "--output", str(tmp_path / "out.jsonl")]
    )
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [len(row["messages"]) for row in rows] == [2] * 5
    prompts = tmp_path / "out.jsonl.prompts.jsonl"
    assert json.loads(prompts.with_name(f"{prompts.name}.run").read_text())["drawn"] == [64, 0]
    (tmp_path / "out.jsonl").unlink()
    result = CliRunner().invoke(
        app, [*common, "--invent", "3", "--output", str(tmp_path / "out.jsonl")]
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out.jsonl").read_text().count("\n") == 3  # of the five that are there
    assert prompts.read_text().count("\n") == 5
    assert CliRunner().invoke(app, [*common, "--output", str(tmp_path / "o.jsonl")]).exit_code != 0


def test_batches_hold_prompts_of_similar_length():
    lengths = {0: 5, 1: 900, 2: 6, 3: 7, 4: 1300, 5: 4}
    made = list(batches(lengths, 100, 3, 3 * 356))
    assert made == [[5, 0, 2], [3], [1], [4]]
    assert sorted(index for batch in made for index in batch) == list(range(6))


@pytest.mark.slow
@pytest.mark.parametrize("drafted", [False, True])
def test_the_order_of_the_file_stays(drafted, tmp_path):
    """Prompts of many lengths, answered in other batches: each answer is the one that its prompt
    has alone.
    """
    target, tokenizer = tiny_model(), chat_tokenizer()
    generator = torch.Generator().manual_seed(0)
    rows = [
        {
            "messages": [
                {
                    "role": "user",
                    "content": " ".join(
                        [
                            "b c d e f g"[2 * int(i)]
                            for i in torch.randint(0, 6, (n,), generator=generator)
                        ]
                    ),
                }
            ]
        }
        for n in torch.randint(1, 40, (30,), generator=generator).tolist()
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    drafter = near_copy(target) if drafted else None
    regenerate(target, tokenizer, file, tmp_path / "many.jsonl", 12, batch_size=4, drafter=drafter)
    regenerate(target, tokenizer, file, tmp_path / "one.jsonl", 12, batch_size=1)
    assert (tmp_path / "many.jsonl").read_text() == (tmp_path / "one.jsonl").read_text()
    lines = (tmp_path / "many.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "many.jsonl").write_text("".join(lines[:13]) + lines[13][:9])  # killed in a line
    assert (
        regenerate(
            target, tokenizer, file, tmp_path / "many.jsonl", 12, batch_size=4, drafter=drafter
        )
        == 17
    )
    assert (tmp_path / "many.jsonl").read_text() == (tmp_path / "one.jsonl").read_text()
