"""Answers that a run which was killed had finished are not made again, and the file has the order
of its prompts.
"""

import json

import pytest
from tiny import make_tokenizer, tiny_model
from trained import regenerate
from transformers import AutoTokenizer

from hf_paradraft.demo import FAMILY
from hf_paradraft.training import regenerate as regenerate_module
from hf_paradraft.training.answers import Target
from hf_paradraft.training.data import encode_rows
from hf_paradraft.training.journal import Journal
from hf_paradraft.training.source import load_rows, prompts_of


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


@pytest.mark.parametrize("name", ["run", "former"])
@pytest.mark.parametrize("folder", [False, True])
def test_files_of_others_beside_the_answers(name, folder, prompts, tmp_path):
    """What others call a file next to the answers is theirs."""
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
    assert output.read_text().count("\n") == 6
    output.write_bytes(output.read_bytes()[:-5])  # killed in a line
    target, count = dying_after(9)
    assert regenerate(target, make_tokenizer(), prompts, output, **options) == 3
    assert len(count) == 2
    assert output.read_text() == (tmp_path / "whole.jsonl").read_text()


def test_windows_that_are_finished_are_not_read_again(prompts, tmp_path, monkeypatch):
    """Each was tokenised once more to find the longest of no prompts."""
    monkeypatch.setattr(regenerate_module, "WINDOW", 1)
    output, plain, windows = tmp_path / "answers.jsonl", Target.answers, []
    target, _ = dying_after(3)
    with pytest.raises(Killed):
        regenerate(target, make_tokenizer(), prompts, output, **OPTIONS)

    def answers(self, rows, done):
        windows.append(list(rows))
        return plain(self, rows, done)

    monkeypatch.setattr(Target, "answers", answers)
    regenerate(tiny_model(), make_tokenizer(), prompts, output, **OPTIONS)
    assert windows == [[6, 7]]


def test_a_link_to_the_answers_stays_one(prompts, tmp_path):
    regenerate(tiny_model(), make_tokenizer(), prompts, tmp_path / "whole.jsonl", **OPTIONS)
    output, disk = tmp_path / "parts.jsonl", tmp_path / "disk.jsonl"
    target, _ = dying_after(2)
    with pytest.raises(Killed):
        regenerate(target, make_tokenizer(), prompts, output, **OPTIONS)
    output.rename(disk)
    disk.chmod(0o600)
    output.symlink_to(disk)
    regenerate(tiny_model(), make_tokenizer(), prompts, output, **OPTIONS)
    assert output.is_symlink()
    assert disk.stat().st_mode & 0o777 == 0o600
    assert disk.read_text() == (tmp_path / "whole.jsonl").read_text()
    before = disk.stat()
    regenerate(tiny_model(), make_tokenizer(), prompts, output, **OPTIONS)
    assert disk.stat().st_ino == before.st_ino


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


def test_answers_that_are_all_there_are_put_in_order_without_asking_the_target(prompts, tmp_path):
    """A run that was killed after its last answer, and before its file had the prompts' order."""
    output = tmp_path / "answers.jsonl"
    regenerate(tiny_model(), make_tokenizer(), prompts, output, **OPTIONS)
    whole = output.read_text()
    rows = [{"index": i, **json.loads(line)} for i, line in enumerate(whole.splitlines())]
    output.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    target, _ = dying_after(0)
    assert regenerate(target, make_tokenizer(), prompts, output, **OPTIONS) == 0
    assert output.read_text() == whole


def test_an_unfinished_file_can_be_learned_from(prompts, tmp_path):
    """Its answers are rows as any others, with their numbers."""
    output, tokenizer = tmp_path / "answers.jsonl", make_tokenizer()
    target, _ = dying_after(2)
    with pytest.raises(Killed):
        regenerate(target, tokenizer, prompts, output, **OPTIONS)
    assert len(encode_rows(load_rows(output), tokenizer, 64)) == 4


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


def test_a_row_that_cannot_be_written_leaves_none_of_itself(tmp_path, monkeypatch):
    output = tmp_path / "answers.jsonl"
    with Journal.open(output, {}) as journal:
        journal.add({"index": 0})
        before = output.read_bytes()

        def half(row):
            with output.open("ab") as opened:
                opened.write(b'{"ind')
            raise OSError("no space left")

        monkeypatch.setattr("hf_paradraft.training.journal._as_line", half)
        with pytest.raises(OSError, match="no space left"):
            journal.add({"index": 1})
        assert output.read_bytes() == before


def test_prompts_that_change_during_a_run_are_not_mixed_with_others(prompts, tmp_path):
    """A run answers the prompts that it has read; answers of others are not gone on with."""
    before, output = prompts.read_text(), tmp_path / "parts.jsonl"
    regenerate(tiny_model(), make_tokenizer(), prompts, tmp_path / "whole.jsonl", **OPTIONS)
    target, _ = dying_after(2)
    plain = target.generate

    def generate(*args, **kwargs):
        prompts.write_text(before.replace("a b", "b a"))
        return plain(*args, **kwargs)

    target.generate = generate
    with pytest.raises(Killed):
        regenerate(target, make_tokenizer(), prompts, output, **OPTIONS)
    unfinished = output.read_text()
    with pytest.raises(ValueError, match=r"other settings .prompts: .* there, .* now"):
        regenerate(tiny_model(), make_tokenizer(), prompts, output, **OPTIONS)
    assert output.read_text() == unfinished
    prompts.write_text(before)
    regenerate(tiny_model(), make_tokenizer(), prompts, output, **OPTIONS)
    assert output.read_text() == (tmp_path / "whole.jsonl").read_text()
