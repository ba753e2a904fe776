"""Training end to end on tiny models: it learns, resumes as if never stopped, and refuses what
cannot work.
"""

import json
import random

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import MASK, make_tokenizer, tiny_model
from trained import regenerate, train_pard, train_ppd
from transformers import AutoModelForCausalLM, TrainingArguments

import hf_paradraft
from hf_paradraft.drafters.pard.training import PardTrainer, block_mask
from hf_paradraft.training import rows as rows_module
from hf_paradraft.training.rows import CodConfig, RowCollator, may_attend

COUNTING = "a b c d e f g h"


@pytest.fixture
def model_dir(tmp_path):
    tiny_model(initializer_range=0.05, dtype=torch.float32).save_pretrained(tmp_path / "model")
    make_tokenizer(COUNTING).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def texts(tmp_path):
    """Eight letters in a circle: easy to draft."""
    rng, letters = random.Random(0), COUNTING.split()
    file = tmp_path / "texts.jsonl"
    with file.open("w") as lines:
        for _ in range(64):
            start, length = rng.randrange(8), rng.randint(10, 20)
            text = " ".join(letters[(start + i) % 8] for i in range(length))
            lines.write(json.dumps({"text": text}) + "\n")
    return file


ARGUMENTS = {
    "max_length": 32,
    "num_depths": 4,
    "per_device_train_batch_size": 8,
    "warmup_steps": 2,
    "disable_tqdm": True,
}


@pytest.mark.slow
def test_a_trained_drafter_drafts_several_tokens(model_dir, texts, tmp_path):
    drafter = train_pard(
        model_dir,
        texts,
        tmp_path / "out",
        eval_file=texts,
        max_steps=60,
        learning_rate=1e-2,
        **ARGUMENTS,
    )
    record = drafter.paradraft["training"]
    losses = [record["eval"][f"eval_loss_depth_{depth}"] for depth in range(4)]
    # guessing is log(32) = 3.5; the end of a text cannot be foreseen
    assert all(loss < 0.7 for loss in losses)
    again = hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "out")
    assert again.mask_token_id == MASK
    assert again.paradraft["training"]["num_depths"] == 4
    # It drafts its own continuation: a target that counts accepts several tokens.
    target = tiny_model(initializer_range=0.05, dtype=torch.float32)
    target.load_state_dict(again.state_dict())
    again.eval()
    target.generate(
        torch.arange(4)[None], assistant_model=again, max_new_tokens=12, do_sample=False
    )
    assert again.last_stats.mean_emitted > 2


def test_a_drafter_drafts_as_far_as_it_was_trained(model_dir, texts, tmp_path):
    drafter = train_pard(
        model_dir, texts, tmp_path / "out", max_steps=1, **{**ARGUMENTS, "num_depths": 15}
    )
    assert drafter.speculation_config.num_draft_tokens == 15
    assert (
        hf_paradraft.AutoDrafter.from_pretrained(
            tmp_path / "out"
        ).speculation_config.num_draft_tokens
        == 15
    )


@pytest.mark.slow
def test_resume_gives_the_same_run(model_dir, texts, tmp_path):
    """Also in the middle of a later epoch."""
    common = {**ARGUMENTS, "learning_rate": 1e-3, "save_steps": 5, "lr_scheduler_type": "constant"}
    common["per_device_train_batch_size"] = 16
    train_pard(model_dir, texts, tmp_path / "whole", max_steps=12, **common)
    train_pard(model_dir, texts, tmp_path / "parts", max_steps=5, **common)
    train_pard(model_dir, texts, tmp_path / "parts", max_steps=12, resume=True, **common)
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    for name, tensor in whole.items():
        torch.testing.assert_close(tensor, parts[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_loss_is_cross_entropy_over_rows_whatever_the_padding(model_dir, attention, tmp_path):
    """A padded batch of two has the mean of all labelled rows, each computed alone; accumulated
    batches share their count.
    """
    drafter = hf_paradraft.PardDrafter.from_causal_lm(
        model_dir, mask_token_id=MASK, attn_implementation=attention
    )
    drafter.train()
    samples = [
        {"input_ids": list(range(n)), "labels": [-100, *range(1, n)], "length": n} for n in (5, 9)
    ]
    cod = CodConfig(3, 0.7, 0.2)
    trainer = PardTrainer(
        drafter, TrainingArguments(output_dir=tmp_path, report_to="none", use_cpu=True), cod
    )
    collator = trainer.data_collator
    total = count = 0
    alone = tiny_model(initializer_range=0.05, dtype=torch.float32)
    for sample in samples:
        rows = collator.rows(sample)
        depth, position = rows["depths"], rows["position_ids"]
        mask = may_attend(depth[:, None], position[:, None], depth, position)[None, None]
        logits = alone(
            rows["input_ids"][None], position_ids=rows["position_ids"][None], attention_mask=mask
        ).logits[0]
        labelled = rows["labels"] != -100
        total = total + torch.nn.functional.cross_entropy(
            logits[labelled], rows["labels"][labelled], reduction="sum"
        )
        count += int(labelled.sum())
    torch.testing.assert_close(
        trainer.compute_loss(drafter, collator(samples)), total / count, rtol=1e-4, atol=1e-5
    )
    batches, items = trainer.get_batch_samples(
        iter([collator([sample]) for sample in samples]), 2, torch.device("cpu")
    )
    assert items == count
    accumulated = sum(
        trainer.compute_loss(drafter, batch, num_items_in_batch=items) for batch in batches
    )
    torch.testing.assert_close(accumulated, total / count, rtol=1e-4, atol=1e-5)


def test_training_is_in_fp32_whatever_the_checkpoint(model_dir, texts, tmp_path):
    tiny_model(dtype=torch.float32).to(torch.bfloat16).save_pretrained(model_dir)
    drafter = train_pard(model_dir, texts, tmp_path / "out", max_steps=1, **ARGUMENTS)
    assert drafter.dtype == torch.float32


def test_overwriting_forgets_old_checkpoints(model_dir, texts, tmp_path):
    common = {**ARGUMENTS, "save_steps": 2}
    train_pard(model_dir, texts, tmp_path / "out", max_steps=4, **common)
    train_pard(model_dir, texts, tmp_path / "out", max_steps=2, overwrite=True, **common)
    assert sorted(file.name for file in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-2"]


def test_overwriting_deletes_nothing_that_it_cannot_replace(model_dir, texts, tmp_path):
    train_pard(model_dir, texts, tmp_path / "out", max_steps=2, **{**ARGUMENTS, "save_steps": 2})
    for wrong in ({"eval_strategy": "steps"}, {"resume": True}):
        with pytest.raises(ValueError, match=r"eval|pass one of them"):
            train_pard(
                model_dir,
                texts,
                tmp_path / "out",
                max_steps=2,
                overwrite=True,
                **ARGUMENTS,
                **wrong,
            )
    assert (tmp_path / "out" / "checkpoint-2" / "model.safetensors").exists()


@pytest.mark.slow
def test_acceptance_against_a_target_with_an_adapter(model_dir, texts, tmp_path):
    lora = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_dir), LoraConfig(target_modules=["q_proj"])
    )
    lora.save_pretrained(tmp_path / "lora")
    few = tmp_path / "few.jsonl"
    few.write_text("".join(texts.read_text().splitlines(keepends=True)[:8]))
    options = {"eval_file": few, "target": tmp_path / "lora", "max_steps": 1}
    drafter = train_pard(model_dir, texts, tmp_path / "out", **options, **ARGUMENTS)
    assert drafter.paradraft["training"]["acceptance"]["mean_emitted"] >= 1


def test_rows_change_with_the_epoch_and_nothing_else():
    sample = {"input_ids": list(range(30)), "labels": list(range(30))}
    collator = RowCollator(MASK, CodConfig(4, 0.5, 0.1), seed=3)
    first = collator.rows(sample)
    assert torch.equal(first["position_ids"], collator.rows(sample)["position_ids"])
    collator.epoch = 1
    assert not torch.equal(first["position_ids"], collator.rows(sample)["position_ids"])


def test_block_mask_is_the_boolean_mask():
    samples = [{"input_ids": list(range(n)), "labels": list(range(n))} for n in (6, 11)]
    batch = RowCollator(MASK, CodConfig(3, 0.7, 0.2))(samples)
    mask = block_mask(batch["depths"], batch["position_ids"])
    size = batch["depths"].shape[1]
    b, i, j = torch.meshgrid(torch.arange(2), torch.arange(size), torch.arange(size), indexing="ij")
    assert torch.equal(mask.mask_mod(b, 0, i, j), batch["attention_mask"][:, 0])


def test_a_mask_is_computed_for_each_sample_alone(monkeypatch):
    """Computed over the padding too, ragged batches took up to 15 times as long."""
    entries = []

    def counted(*operands):
        seen = may_attend(*operands)
        entries.append(seen.numel())
        return seen

    monkeypatch.setattr(rows_module, "may_attend", counted)
    samples = [{"input_ids": list(range(n)), "labels": list(range(n))} for n in (6, 30)]
    collator = RowCollator(MASK, CodConfig(3, 0.7, 0.2))
    collator(samples)
    assert entries == [len(collator.rows(sample)["depths"]) ** 2 for sample in samples]


@pytest.mark.parametrize("changes", [{"num_depths": 0}, {"ratio": 2.0}, {"min_ratio": 0.0}])
def test_numbers_of_dropping_are_checked_when_written_down(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        CodConfig(**changes)


def test_regenerate_continues_an_unfinished_file(model_dir, texts, tmp_path):
    tokenizer = make_tokenizer(COUNTING)
    target, output = tiny_model(dtype=torch.float32), tmp_path / "answers.jsonl"
    options = {"max_new_tokens": 6, "batch_size": 8, "prompt_tokens": 4}
    assert regenerate(target, tokenizer, texts, output, **options) == 64
    whole = output.read_text()
    lines = whole.splitlines(keepends=True)
    assert {"text", "finished", "ids", "tokenizer"} == set(json.loads(lines[0]))
    output.write_text("".join(lines[:16]) + lines[16][:9])
    assert regenerate(target, tokenizer, texts, output, **options) == 48
    assert output.read_text() == whole


def test_output_folders_are_not_overwritten(model_dir, texts, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("mine")
    with pytest.raises(ValueError, match="already has files"):
        train_pard(model_dir, texts, out, max_steps=1, **ARGUMENTS)
    assert [file.name for file in out.iterdir()] == ["precious"]
    with pytest.raises(ValueError, match="is a file"):
        train_pard(model_dir, texts, out / "precious", max_steps=1, **ARGUMENTS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cod_ratio": 0.0}, "ratio"),
        ({"cod_min_ratio": 1.5}, "ratio"),
        ({"num_depths": 0}, "num_depths"),
        ({"mask_token_id": 99}, "no embedding"),
        ({"max_length": 257}, "longer than the model's context of 256"),
        ({"max_length": 1}, "max_length must be at least 2"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1"),
        ({"num_train_epochs": -1.0}, "num_train_epochs must be more than 0"),
        ({"max_steps": 0}, "max_steps=0 trains nothing"),
        ({"learning_rate": float("nan")}, "learning_rate must be more than 0"),
        ({"num_train_epochs": float("inf")}, "num_train_epochs must be a finite number"),
        ({"target": "nowhere"}, "pass an evaluation file too"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(
    model_dir, texts, tmp_path, changes, message
):
    with pytest.raises(ValueError, match=message):
        train_pard(model_dir, texts, tmp_path / "out", **{**ARGUMENTS, "max_steps": 1, **changes})
    assert not (tmp_path / "out").exists()


def test_a_missing_target_is_noticed_before_training(model_dir, texts, tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        train_pard(
            model_dir,
            texts,
            tmp_path / "out",
            eval_file=texts,
            target=tmp_path / "nowhere",
            max_steps=1,
            **ARGUMENTS,
        )
    assert not (tmp_path / "out").exists()


def test_a_target_that_fails_costs_no_training(model_dir, texts, tmp_path):
    target = tmp_path / "target"
    tiny_model(dtype=torch.float32).config.save_pretrained(target)  # without weights
    with pytest.raises(OSError, match="target"):
        train_pard(
            model_dir,
            texts,
            tmp_path / "out",
            eval_file=texts,
            target=target,
            max_steps=1,
            **ARGUMENTS,
        )
    assert (
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "out").paradraft["training"]["steps"]
        == 1
    )


@pytest.mark.parametrize("kind", ["pard", "ppd"])
def test_files_about_former_weights_are_moved_aside(kind, model_dir, texts, tmp_path):
    """An old card, benchmark or adapter would be published with the new weights; and nothing moves
    before these are there.
    """
    out = tmp_path / "out"
    out.mkdir()
    card = "---\ntags:\n- speculative-decoding\n- paradraft\n---\n"
    stale = dict.fromkeys(
        ("bench.json", "tau.png", "config.json" if kind == "ppd" else "adapter_config.json"), "old"
    )
    stale |= {"README.md": card, "vocab.txt": "old"}
    for name, text in {**stale, "notes.txt": "mine", "LICENSE": "mine"}.items():
        (out / name).write_text(text)
    run = {"pard": train_pard, "ppd": train_ppd}[kind]
    options = {
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "overwrite": True,
        "max_length": 64,
    }
    with pytest.raises(OSError, match="There is no file"):
        run(model_dir, tmp_path / "none.jsonl", out, **options)
    assert all((out / name).read_text() == text for name, text in stale.items())
    run(model_dir, texts, out, **options)
    assert not any((out / name).exists() for name in stale)
    assert {file.name: file.read_text() for file in (out / "former").iterdir()} == stale
    assert (out / "notes.txt").read_text() == (out / "LICENSE").read_text() == "mine"
    assert hf_paradraft.AutoDrafter.from_pretrained(out) is not None


@pytest.mark.slow
def test_flex_attentions_loss_is_sdpas(tmp_path):
    """The block mask of the GPU's path and the boolean mask of the CPU's are one rule."""
    losses = []
    rows = [
        {"input_ids": list(range(n)), "labels": [-100, *range(1, n)], "length": n} for n in (9, 14)
    ]
    for attention in ("sdpa", "flex_attention"):
        drafter = hf_paradraft.PardDrafter.from_causal_lm(
            tiny_model(head_dim=16, attn_implementation=attention, dtype=torch.float32),
            mask_token_id=MASK,
        )
        arguments = TrainingArguments(str(tmp_path), report_to="none", max_steps=1, use_cpu=True)
        trainer = PardTrainer(
            drafter, arguments, CodConfig(3, 1.0, 1.0), train_dataset=Dataset.from_list(rows)
        )
        batch = RowCollator(MASK, CodConfig(3, 1.0, 1.0), dense_masks=attention == "sdpa")(rows)
        with torch.no_grad():
            losses.append(float(trainer.compute_loss(drafter.eval(), batch)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
