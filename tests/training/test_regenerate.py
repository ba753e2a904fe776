"""Answers that a run which was killed had finished are not made again, and the file has the order
of its prompts.
"""

import json

import pytest
from tiny import make_tokenizer, tiny_model
from trained import regenerate
from transformers import AutoTokenizer

from hf_paradraft.demo import FAMILY
from hf_paradraft.training.regenerate import prompts_of


class Killed(Exception):
    pass


def dying_after(calls):
    """A target that answers so many batches; a count of its batches."""
    target, count = tiny_model(), []
    plain = target.generate

    def generate(*args, **kwargs):
        if len(count) == calls:
            raise Killed
        count.append(1)
        return plain(*args, **kwargs)

    target.generate = generate
    return target, count


@pytest.fixture
def prompts(tmp_path):
    """The first ones are the longest, and answered last: none is in the file before all are
    there.
    """
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "".join(
            json.dumps({"text": "a b c d e f g h"[: 2 * length - 1]}) + "\n"
            for length in range(8, 0, -1)
        )
    )
    return file


OPTIONS = {"max_new_tokens": 4, "batch_size": 2}


@pytest.mark.parametrize("name", ["run", "part", "former", "part.former"])
@pytest.mark.parametrize("folder", [False, True])
def test_files_of_others_beside_the_answers(name, folder, prompts, tmp_path):
    """An unfinished download is called `.part`, too."""
    other = tmp_path / f"answers.jsonl.{name}"
    other.mkdir() if folder else other.write_text("half of my download")
    with pytest.raises(ValueError, match="none of this command's"):
        regenerate(tiny_model(), make_tokenizer(), prompts, tmp_path / "answers.jsonl", **OPTIONS)
    assert sorted(tmp_path.iterdir()) == sorted([other, prompts])
    assert folder or other.read_text() == "half of my download"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_finished_answers_are_not_generated_again(temperature, prompts, tmp_path):
    options = {**OPTIONS, "temperature": temperature}
    regenerate(tiny_model(), make_tokenizer(), prompts, tmp_path / "whole.jsonl", **options)
    output = tmp_path / "parts.jsonl"
    target, _ = dying_after(3)
    with pytest.raises(Killed):
        regenerate(target, make_tokenizer(), prompts, output, **options)
    assert output.read_text() == ""
    part = tmp_path / "parts.jsonl.part"
    assert part.read_text().count("\n") == 6
    part.write_bytes(part.read_bytes()[:-5])  # killed in a line
    target, count = dying_after(9)
    assert regenerate(target, make_tokenizer(), prompts, output, **options) == 8
    assert len(count) == 2
    assert output.read_text() == (tmp_path / "whole.jsonl").read_text()
    assert not part.exists()


def test_greedy_answers_go_on_in_other_batches(prompts, tmp_path):
    output = tmp_path / "parts.jsonl"
    target, _ = dying_after(2)
    with pytest.raises(Killed):
        regenerate(target, make_tokenizer(), prompts, output, **OPTIONS)
    target, count = dying_after(1)
    with pytest.raises(Killed):
        regenerate(target, make_tokenizer(), prompts, output, 4, batch_size=1)
    target, count = dying_after(9)
    regenerate(target, make_tokenizer(), prompts, output, 4, batch_size=1)
    assert len(count) == 3
    regenerate(tiny_model(), make_tokenizer(), prompts, tmp_path / "whole.jsonl", 4, batch_size=1)
    assert output.read_text() == (tmp_path / "whole.jsonl").read_text()


def test_beginning_anew_forgets_what_was_finished(prompts, tmp_path):
    output = tmp_path / "parts.jsonl"
    target, _ = dying_after(2)
    with pytest.raises(Killed):
        regenerate(target, make_tokenizer(), prompts, output, **OPTIONS)
    with pytest.raises(ValueError, match="other settings"):
        regenerate(tiny_model(seed=1), make_tokenizer(), prompts, output, **OPTIONS)
    regenerate(tiny_model(seed=1), make_tokenizer(), prompts, output, **OPTIONS, overwrite=True)
    regenerate(tiny_model(seed=1), make_tokenizer(), prompts, tmp_path / "whole.jsonl", **OPTIONS)
    assert output.read_text() == (tmp_path / "whole.jsonl").read_text()


def test_waiting_answers_are_written_without_asking_the_target(prompts, tmp_path):
    """All answers wait, and the output has none of them: they are written without asking the
    target.
    """
    output = tmp_path / "answers.jsonl"
    regenerate(tiny_model(), make_tokenizer(), prompts, output, **OPTIONS)
    whole = output.read_text()
    waiting = [
        json.dumps({"index": i, "row": json.loads(line)})
        for i, line in enumerate(whole.splitlines())
    ]
    (tmp_path / "answers.jsonl.part").write_text("\n".join(waiting) + "\n")
    output.write_text(whole[:9])
    target, _ = dying_after(0)
    assert regenerate(target, make_tokenizer(), prompts, output, **OPTIONS) == 8
    assert output.read_text() == whole


def test_a_text_keeps_its_roles(tmp_path):
    """A chat that was rendered before is a text with special tokens."""
    text = "<|user|>1. Write 6 euros in cents.<|assistant|>1. 6 euros"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (row,) = prompts_of(
        tmp_path / "rows.jsonl", 64, AutoTokenizer.from_pretrained(FAMILY / "target")
    )
    assert row["text"] == text


@pytest.mark.parametrize("size", range(1, 12))
def test_a_text_is_cut_between_characters(size, tmp_path):
    text = "今日は良い天気ですね。🙂" * 3
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (row,) = prompts_of(
        tmp_path / "rows.jsonl", size, AutoTokenizer.from_pretrained(FAMILY / "target")
    )
    assert text.startswith(row["text"]) or size < 3  # of which one character is made
