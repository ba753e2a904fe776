"""Training rows mean what drafting will do, and training makes guesses better."""

import json
import shutil

import pytest
import torch
from datasets import Dataset
from lossless import assert_lossless
from peft import get_peft_model
from tiny import ARCHITECTURES, EOS, make_tokenizer, tiny_model
from trained import train_ppd
from transformers import TrainingArguments

import hf_paradraft
from hf_paradraft.drafters.ppd import PpdConfig
from hf_paradraft.drafters.ppd.adapter import prompt_embedding
from hf_paradraft.drafters.ppd.rows import (
    PromptCollator,
    forward_with_prompts,
    insertion_points,
    prompt_rows,
)
from hf_paradraft.drafters.ppd.training import PpdTrainer, PpdTraining


def test_prompts_see_the_text_to_their_point_and_their_ensemble():
    """m = 2, E = 2, one point behind x_1 of a text of four: rows x_0 … x_3, then prompts 1a 1b 2a
    2b.
    """
    positions, mask = prompt_rows(torch.arange(4)[None], torch.tensor([[1]]), 2, 2)
    assert positions.tolist() == [[0, 1, 2, 3, 2, 2, 3, 3]]
    sees = [set(row.nonzero()[:, 0].tolist()) for row in mask[0]]
    assert sees[:4] == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}]
    assert sees[4:] == [{0, 1, 4}, {0, 1, 5}, {0, 1, 4, 6}, {0, 1, 5, 7}]


def test_points_have_their_tokens_in_the_text():
    points = insertion_points(20, 3, 100)
    assert points.tolist() == list(range(16))
    assert len(insertion_points(20, 3, 5)) == 5
    assert len(insertion_points(3, 3, 5)) == 0


def samples(count=24, length=18):
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(1, EOS, (count, length), generator=generator).tolist()
    return Dataset.from_list(
        [{"input_ids": ids, "labels": [-100] * 3 + ids[3:], "length": length} for ids in texts]
    )


def trainer_of(tmp_path, model=None, e=1, points=32, **arguments):
    torch.manual_seed(0)
    model = model or get_peft_model(
        tiny_model(dtype=torch.float32), PpdConfig(num_prompt_tokens=2, num_ensembles=e)
    )
    settings = {
        "per_device_train_batch_size": 8,
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
        **arguments,
    }
    settings = {"learning_rate": 0.05, "logging_strategy": "no", "disable_tqdm": True, **settings}
    arguments = TrainingArguments(output_dir=str(tmp_path), **settings)
    return PpdTrainer(
        model, arguments, points, 0.8, train_dataset=samples(), eval_dataset=samples(8)
    )


@pytest.mark.parametrize("e", [1, 2])
def test_one_forward_gives_what_each_insertion_would(tmp_path, e):
    trainer = trainer_of(tmp_path, e=e)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7, 6, 5, 4, 3, 2]])
    points = torch.tensor([[0, 3, 4], [2, 4, -1]])
    base = trainer.model.get_base_model()
    with torch.no_grad():
        guesses, teachers, tokens, begins = forward_with_prompts(base, base, ids, points)
        assert guesses.shape[:2] == teachers.shape[:2] == tokens.shape == (5, 2)
        embedding = prompt_embedding(base)
        wanted = [(row, int(t)) for row in range(2) for t in points[row] if t >= 0]
        for guess, teacher, token, follows, (row, t) in zip(
            guesses, teachers, tokens, begins, wanted, strict=True
        ):
            lanes = []
            for lane in range(e):
                inputs = torch.cat(
                    [embedding(ids[row : row + 1, : t + 1]), embedding.prompts()[lane::e][None]],
                    dim=1,
                )
                lanes.append(base(inputs_embeds=inputs).logits[0, -2:])
            torch.testing.assert_close(guess, torch.stack(lanes).mean(0), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                teacher, base(ids[row : row + 1]).logits[0, t + 1 : t + 3], rtol=1e-4, atol=1e-4
            )
            assert bool(follows) == (
                int(base(ids[row : row + 1]).logits[0, t].argmax()) == int(ids[row, t + 1])
            )
            assert token.tolist() == ids[row, t + 2 : t + 4].tolist()


def test_the_head_is_run_where_it_is_wanted():
    """Of a long text with a large vocabulary, logits of all rows would be most of the memory."""
    base = get_peft_model(
        tiny_model(dtype=torch.float32), PpdConfig(num_prompt_tokens=2)
    ).get_base_model()
    rows = []
    base.lm_head.register_forward_pre_hook(
        lambda module, args: rows.append(args[0].shape[:-1].numel())
    )
    forward_with_prompts(
        base,
        base,
        torch.randint(0, 30, (2, 60)),
        torch.tensor([[3, 20, 40], [7, -1, -1]]),
    )
    # of each text: at three points what it says, with the token before, and its guesses
    assert rows == [2 * (3 * 3 + 3 * 2)]


# whose layers embed ids too
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "gemma4"])
def test_the_head_is_run_on_what_is_used_however_many_texts_there_are(name):
    """Four texts asked at places of their own: each gets what it gets alone, and the head no row
    more.
    """
    config = PpdConfig(num_prompt_tokens=2, num_ensembles=2)
    base = get_peft_model(tiny_model(name, dtype=torch.float32), config).get_base_model()
    ids = torch.randint(0, 30, (4, 60))
    points = torch.tensor([[0, 9, 20], [4, 30, 50], [7, 13, 56], [2, 25, 44]])
    counted = []
    hook = base.lm_head.register_forward_pre_hook(
        lambda module, args: counted.append(args[0].shape[:-1].numel())
    )
    with torch.no_grad():
        together = forward_with_prompts(base, base, ids, points)
        hook.remove()
        alone = [
            forward_with_prompts(base, base, ids[row : row + 1], points[row : row + 1])
            for row in range(4)
        ]
    # at each point: it and two teachers, and two prompts of two ensembles
    assert counted == [4 * 3 * (3 + 2 * 2)]
    for tensor, parts in zip(together, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(tensor, torch.cat(parts), rtol=1e-5, atol=1e-5)


def test_models_without_logits_to_keep_have_the_same_guesses():
    """A subclass of one's own may take nothing but the inputs that it names."""
    base = get_peft_model(
        tiny_model(dtype=torch.float32), PpdConfig(num_prompt_tokens=2)
    ).get_base_model()
    ids, points = torch.randint(0, 30, (2, 20)), torch.tensor([[3, 9, 12], [7, -1, -1]])
    wanted = forward_with_prompts(base, base, ids, points)

    class Own(type(base)):
        def forward(self, inputs_embeds, attention_mask, position_ids, use_cache):
            return super().forward(
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=use_cache,
            )

    base.__class__ = Own
    torch.testing.assert_close(forward_with_prompts(base, base, ids, points), wanted)


def test_only_answers_are_guessed():
    batch = PromptCollator(2, 50)(
        [{"input_ids": list(range(1, 11)), "labels": [-100] * 4 + list(range(5, 11))}]
    )
    points = batch["points"][0][batch["points"][0] >= 0].tolist()
    assert points == [3, 4, 5, 6]


@pytest.mark.slow
def test_training_lowers_its_loss(tmp_path):
    trainer = trainer_of(tmp_path, points=8, max_steps=120, learning_rate=0.1)
    base_before = trainer.model.get_base_model().lm_head.weight.clone()
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.95 * before["eval_loss"]  # the texts are random
    assert set(after) == {
        "eval_loss",
        "eval_@1_top1",
        "eval_@1_top5",
        "eval_@2_top1",
        "eval_@2_top5",
    }
    assert after["eval_@1_top1"] <= after["eval_@1_top5"] <= 1
    assert torch.equal(base_before, trainer.model.get_base_model().lm_head.weight)


@pytest.mark.parametrize("options", [{"points": 0}, {"decay": 0.0}, {"decay": 1.5}])
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match="must be"):
        PpdTraining(target="x", train_file="y", output_dir="z", **options).check()


def test_from_files_to_a_drafter(tmp_path, prompt):
    make_tokenizer().save_pretrained(tmp_path / "base")
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path / "base")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "a b c d e f g h " * 3}) + "\n" for _ in range(8)))
    options = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "save_steps": 2,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    with pytest.raises(
        ValueError, match="max_length=257 is longer than the model's context of 256 tokens"
    ):
        train_ppd(tmp_path / "base", rows, tmp_path / "out", max_length=257, **options)
    assert not (tmp_path / "out").exists()
    options["max_length"] = 64
    drafter = train_ppd(tmp_path / "base", rows, tmp_path / "out", eval_file=rows, **options)
    assert json.loads((tmp_path / "out" / "paradraft.json").read_text())["training"]["steps"] == 3
    loaded = hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.prompts, drafter.prompts)
    target = tiny_model(dtype=torch.float32)
    assert_lossless(target, loaded, prompt, max_new_tokens=10)
    with pytest.raises(ValueError, match="already has files"):
        train_ppd(tmp_path / "base", rows, tmp_path / "out", **options)


def test_a_resumed_run_is_the_same_run(tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "base")
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path / "base")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"text": " ".join(f"w{(i * j) % 22 + 8}" for i in range(14))}) + "\n"
            for j in range(1, 9)
        )
    )
    options = {
        "per_device_train_batch_size": 2,
        "save_steps": 3,
        "use_cpu": True,
        "disable_tqdm": True,
        "num_train_epochs": 2,
        "max_length": 64,
    }
    whole = train_ppd(tmp_path / "base", rows, tmp_path / "whole", **options)
    shutil.copytree(tmp_path / "whole" / "checkpoint-6", tmp_path / "part" / "checkpoint-6")
    resumed = train_ppd(tmp_path / "base", rows, tmp_path / "part", resume=True, **options)
    assert torch.equal(whole.prompts, resumed.prompts)


def test_texts_too_short_for_any_point_are_left_out():
    base = get_peft_model(tiny_model(dtype=torch.float32), PpdConfig()).get_base_model()
    ids = torch.tensor([[1, 2], [3, 4]])
    guesses, teachers, tokens, begins = forward_with_prompts(
        base, base, ids, torch.full((2, 1), -1)
    )
    assert len(guesses) == len(teachers) == len(tokens) == len(begins) == 0
