"""Accuracies count what a round would accept, and travel with the adapter."""

import json

import pytest
import torch
from datasets import Dataset
from lossless import assert_lossless
from peft import PeftModel, get_peft_model
from tiny import EOS, make_tokenizer, tiny_model
from typer.testing import CliRunner

import hf_paradraft
from hf_paradraft.cli import app
from hf_paradraft.drafters.ppd import PpdConfig
from hf_paradraft.drafters.ppd.rows import calibrate, falling, rank_counts


def logits_for(*rankings):
    """Logits `(m, 6)` whose best tokens are as listed."""
    logits = torch.zeros(len(rankings), 6)
    for row, tokens in zip(logits, rankings, strict=True):
        for rank, token in enumerate(tokens):
            row[token] = 9 - rank
    return logits


def test_guesses_count_only_where_they_would_be_judged():
    guesses = [
        logits_for([1, 2], [3, 4]),
        logits_for([1, 2], [3, 4]),
        logits_for([5, 0], [3, 4]),
        logits_for([1, 2], [3, 4]),
    ]
    teachers = [
        logits_for([1], [4]),
        logits_for([2], [3]),
        logits_for([1], [3]),
        logits_for([1], [3]),
    ]
    tokens = torch.tensor([[1, 4], [0, 3], [1, 3], [1, 3]])
    begins = torch.tensor([True, True, True, False])
    hits, tries = rank_counts(torch.stack(guesses), torch.stack(teachers), tokens, begins, ranks=2)
    # The first text: right at once, then by the second guess. The second: right by its second
    # guess, but the text goes on otherwise. The third: not among the guesses, so nothing behind it
    # is ever looked at. The fourth begins with a token that the model would not have written.
    assert tries.tolist() == [3, 1]
    assert hits.tolist() == [[1, 1], [0, 1]]


def texts(count=150, length=24):
    ids = torch.randint(
        1, EOS, (count, length), generator=torch.Generator().manual_seed(0)
    ).tolist()
    return Dataset.from_list([{"input_ids": row, "labels": row, "length": length} for row in ids])


def test_accuracies_fall_and_travel_with_the_adapter(tmp_path, prompt):
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(), PpdConfig(num_prompt_tokens=2, num_ensembles=2))
    accuracy = calibrate(model, texts())
    assert [len(row) for row in accuracy] == [16, 16]
    assert all(row == sorted(row, reverse=True) and 0 <= row[-1] <= row[0] <= 1 for row in accuracy)
    model.save_pretrained(tmp_path)
    assert PeftModel.from_pretrained(tiny_model(), tmp_path).active_peft_config.accuracy == accuracy
    drafter = hf_paradraft.AutoDrafter.from_pretrained(tmp_path)
    assert drafter.speculation_config.tree_size == "auto"
    target = tiny_model()
    options = {"do_sample": False, "max_new_tokens": 20}
    assert_lossless(target, drafter, prompt, **options)
    assert drafter.last_stats.num_drafted > 0


def test_falling_rates():
    assert falling([0.5, 0.3, 0.1]) == [0.5, 0.3, 0.1]
    assert falling([0.5, 0.0, 0.2, 0.1]) == pytest.approx([0.5, 0.1, 0.1, 0.1])
    assert falling([0.1, 0.2, 0.3]) == pytest.approx([0.2, 0.2, 0.2])


def test_too_few_places_to_count_at_are_refused():
    model = get_peft_model(tiny_model(), PpdConfig(num_prompt_tokens=2))
    with pytest.raises(ValueError, match="places to count"):
        calibrate(model, texts(2, 8))


@pytest.mark.parametrize(
    "accuracy", [[[0.5, 0.6]], [[0.5], [0.4]], [[1.5]], [[]], [[0.9, 0.9]], 5, ["ab"], [["a"]]]
)
def test_accuracies_that_are_no_falling_rates_are_refused(accuracy):
    with pytest.raises(ValueError, match="calibrate again"):
        PpdConfig(num_prompt_tokens=1, accuracy=accuracy)


def test_the_calibrate_command_changes_the_config_alone(tmp_path):
    base, adapter, data = tmp_path / "base", tmp_path / "adapter", tmp_path / "rows.jsonl"
    tiny_model().save_pretrained(base)
    make_tokenizer().save_pretrained(base)
    get_peft_model(tiny_model(), PpdConfig(num_prompt_tokens=2)).save_pretrained(adapter)
    data.write_text(
        "".join(
            json.dumps({"text": " ".join("abcdefgh"[i % 8] for i in range(40))}) + "\n"
            for _ in range(40)
        )
    )
    before = (adapter / "adapter_model.safetensors").read_bytes()
    command = ["calibrate", str(adapter), "--eval-file", str(data), "--dtype", "float32"]
    # it names no base model
    assert isinstance(CliRunner().invoke(app, command).exception, ValueError)
    command += ["--target", str(base), "--max-length", "64"]
    longer = CliRunner().invoke(app, [*command, "--max-length", "257"]).exception
    assert "longer than the model's context of 256" in str(longer)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "rank 1" in result.output
    assert len(json.loads((adapter / "adapter_config.json").read_text())["accuracy"]) == 2
    assert (adapter / "adapter_model.safetensors").read_bytes() == before
    assert not (adapter / ".calibrated").exists()
