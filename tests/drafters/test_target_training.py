"""Drafters that are trained on a frozen target: the loss falls on what it should, runs resume, and what is saved drafts."""

import json

import pytest
import torch
from datasets import Dataset
from tiny import EOS, make_tokenizer, tiny_model
from transformers import TrainingArguments
from typer.testing import CliRunner

import hf_paradraft as pd
from hf_paradraft.cli import app
from hf_paradraft.drafters.anchors import AnchorCollator
from hf_paradraft.drafters.dspark.blocks import block_mask, slots
from hf_paradraft.drafters.dspark.calibration import calibration_error, temperatures
from hf_paradraft.drafters.dspark.training import block_drafter, train_dspark
from hf_paradraft.drafters.eagle3.training import Unrolled, eagle_drafter, train_eagle3
from hf_paradraft.drafters.feature_training import unused_token
from hf_paradraft.drafters.kinds import kind_of_folder
from hf_paradraft.drafters.pairs import read_whole
from hf_paradraft.drafters.parallelspec.training import ParallelSpecTrainer, train_parallelspec
from hf_paradraft.drafters.target_states import states_of
from hf_paradraft.training.losses import cross_entropy, rejection
from hf_paradraft.training.row_trainer import CodConfig, RowCollator

OPTIONS = {"per_device_train_batch_size": 4, "learning_rate": 3e-3, "use_cpu": True, "max_length": 64}


@pytest.mark.slow
@pytest.mark.parametrize(("style", "loss"), [("medusa", "ce"), ("medusa", "tv"), ("eagle", "tv")])
def test_parallelspec_learns(style, loss, folder):
    rows = folder / "rows.jsonl"
    options = {**OPTIONS, "style": style, "loss": loss, "num_masks": 2, "eval_file": folder / "some.jsonl", "vocab": 24}
    drafter = train_parallelspec(folder / "target", rows, folder / "out", max_steps=60, **options)
    record = drafter.paradraft["training"]
    assert record["steps"] == 60
    assert record["eval"]["eval_loss_depth_0"] < (2.5 if loss == "ce" else 0.75)
    assert record["acceptance"]["mean_emitted"] > 1.25
    again = pd.AutoDrafter.from_pretrained(folder / "out")
    assert again.config.style == style
    assert again.paradraft["training"]["style"] == style
    target = tiny_model("llama", num_hidden_layers=6)
    ids = torch.tensor([[1, 2, 3]])
    plain = target.generate(ids, do_sample=False, max_new_tokens=30)
    assert torch.equal(plain, target.generate(ids, do_sample=False, max_new_tokens=30, assistant_model=again))
    kind = kind_of_folder(folder / "out")
    kind.check(folder / "out")
    assert kind.card(folder / "out").provenance["training"]["num_masks"] == 2
    with pytest.raises(ValueError, match="already has files"):
        train_parallelspec(folder / "target", rows, folder / "out", max_steps=1, **OPTIONS)


@torch.no_grad()
@pytest.mark.parametrize("style", ["medusa", "eagle"])
def test_training_rows_are_what_is_drafted(style):
    """The logits of a row `(d, t)` in training are those that the drafter gives behind the first `t - d + 1` tokens."""
    target = tiny_model("llama", num_hidden_layers=3)
    drafter = pd.ParallelSpecDrafter.from_target(target, style, 2)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    batch = RowCollator(0, CodConfig(3, 1.0, 1.0))([{"input_ids": ids, "labels": ids}, {"input_ids": ids[:5], "labels": ids[:5]}])
    batch.pop("labels")
    text = torch.tensor([ids])
    states = states_of(target, ("normed",), text, torch.ones_like(text, dtype=torch.bool))["normed"]
    features = None
    if style == "eagle":
        features = torch.zeros((*batch["input_ids"].shape, 32))
        features[:, 1 : len(ids)] = states[:, :-1]
    columns = torch.arange(batch["input_ids"].shape[1])
    logits, _ = drafter(**batch, columns=columns, features=features)
    for row, length in ((0, 8), (1, 5)):
        for column in columns.tolist():
            depth, place = int(batch["depths"][row, column]), int(batch["position_ids"][row, column])
            known = place - depth + 1
            if depth < 0 or known < 2 or known > length:
                continue
            given = {"normed": states[:, : known - 1]} if style == "eagle" else None
            expected = drafter.draft_logits(text[:, :known], given, depth + 1)[0, depth]
            torch.testing.assert_close(logits[row, column], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_training_blocks_are_what_is_drafted(kind):
    """The logits of a slot in training are those behind its anchor, with the text's own tokens before."""
    target = tiny_model("llama", num_hidden_layers=6)
    drafter = block_drafter(target, 31, block_size=3, num_features=3, markov_rank=4, markov_type=kind)
    torch.nn.init.normal_(drafter.markov.after.weight)
    torch.nn.init.normal_(drafter.markov.before.weight)
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    batch = AnchorCollator(4, 3)([{"input_ids": ids, "labels": ids}, {"input_ids": ids[:6], "labels": [-100] * 3 + ids[3:6]}])
    seen = torch.arange(batch["input_ids"].shape[1]) < batch["lengths"][:, None]
    found = slots(drafter, batch, states_of(target, drafter.features, batch["input_ids"], seen))
    assert (found["labels"] != -100).any()
    for row, length in ((0, 10), (1, 6)):
        for place, anchor in enumerate(batch["anchors"][row].tolist()):
            if anchor < 0:
                assert (found["labels"][row, place] == -100).all()
                continue
            text = batch["input_ids"][row : row + 1, : anchor + 1]
            given = states_of(target, drafter.features, text, torch.ones_like(text, dtype=torch.bool))
            states = drafter.block_states(text, {key: own[:, :-1] for key, own in given.items()})
            before = batch["input_ids"][row, anchor : anchor + 3]
            expected = drafter.base_logits(states)[0] + drafter.markov.along(before, states[0])
            torch.testing.assert_close(found["logits"][row, place], expected, rtol=1e-4, atol=1e-4)
            following = [ids[anchor + 1 + k] if anchor + 1 + k < length else -100 for k in range(3)]
            assert found["labels"][row, place].tolist() == following


@torch.no_grad()
def test_training_steps_are_what_is_drafted():
    """The logits of a step in training are those of the drafter behind the text's own tokens, read one after the other."""
    target = tiny_model("llama", num_hidden_layers=8)
    drafter = eagle_drafter(target, 3)
    torch.nn.init.normal_(drafter.fc.weight, std=0.3)
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    batch = AnchorCollator(4, 3)([{"input_ids": ids, "labels": ids}, {"input_ids": ids[:6], "labels": [-100] * 3 + ids[3:6]}])
    seen = torch.arange(batch["input_ids"].shape[1]) < batch["lengths"][:, None]
    found = Unrolled(drafter, 3)(batch, states_of(target, drafter.features, batch["input_ids"], seen))
    checked = 0
    for row in range(2):
        for place, anchor in enumerate(batch["anchors"][row].tolist()):
            if anchor < 0:
                continue
            text = batch["input_ids"][row : row + 1, : anchor + 1]
            given = states_of(target, drafter.features, text, torch.ones_like(text, dtype=torch.bool))
            reader, logits = read_whole(drafter, text, drafter.fuse({key: own[:, :-1] for key, own in given.items()}), 1)
            expected = [logits[0, -1]]
            for step in (1, 2):
                token = batch["input_ids"][row, anchor + step : anchor + step + 1]
                expected.append(reader.read_nodes([token], [[step - 2]])[0][0])
            torch.testing.assert_close(found["logits"][row, place], torch.stack(expected), rtol=1e-4, atol=1e-4)
            checked += 1
    assert checked > 4


@pytest.mark.slow
def test_eagle3_learns(folder):
    rows = folder / "rows.jsonl"
    tiny_model("llama", num_hidden_layers=8, initializer_range=0.15).save_pretrained(folder / "deep")
    make_tokenizer().save_pretrained(folder / "deep")
    options = {**OPTIONS, "num_draft_tokens": 3, "eval_file": folder / "some.jsonl", "vocab": 24}
    drafter = train_eagle3(folder / "deep", rows, folder / "out", max_steps=60, cache_dir=folder / "states", **options)
    record = drafter.paradraft["training"]
    assert record["method"] == "eagle3"
    assert record["eval"]["eval_acceptance_depth_2"] > 0.15
    assert record["acceptance"]["mean_emitted"] > 1.05
    again = pd.AutoDrafter.from_pretrained(folder / "out")
    assert isinstance(again, pd.Eagle3Drafter)
    assert again.speculation_config.num_draft_tokens == 3
    target = tiny_model("llama", num_hidden_layers=8)
    ids = torch.tensor([[1, 2, 3]])
    plain = target.generate(ids, do_sample=False, max_new_tokens=30, eos_token_id=EOS)
    assert torch.equal(plain, target.generate(ids, do_sample=False, max_new_tokens=30, eos_token_id=EOS, assistant_model=again))
    kind_of_folder(folder / "out").check(folder / "out")
    with pytest.raises(ValueError, match="7 are needed"):
        eagle_drafter(tiny_model("llama"))
    with pytest.raises(ValueError, match="an anchor at least"):
        train_eagle3(folder / "target", rows, folder / "none", num_anchors=0)


def test_a_block_sees_its_context_and_itself():
    mask = block_mask(torch.tensor([[2, -1]]), 4, 2)[0, 0]
    assert mask.int().tolist() == [[1, 1, 0, 0, 1, 1, 0, 0]] * 2 + [[0, 0, 0, 0, 0, 0, 1, 1]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "confidence"), [(4, True), (0, False)])
def test_dspark_learns(rank, confidence, folder):
    rows = folder / "rows.jsonl"
    options = {**OPTIONS, "markov_rank": rank, "confidence": confidence, "block_size": 3, "num_features": 3, "num_layers": 1}
    drafter = train_dspark(
        folder / "target", rows, folder / "out", max_steps=60, eval_file=folder / "some.jsonl", vocab=24, **options
    )
    record = drafter.paradraft["training"]
    assert record["eval"]["eval_acceptance_depth_0"] > 0.2
    assert record["acceptance"]["mean_emitted"] > 1.25
    again = pd.AutoDrafter.from_pretrained(folder / "out")
    assert isinstance(again, pd.DSparkDrafter) == bool(rank)
    if confidence:
        assert len(record["temperatures"]) == 3
        assert again.temperatures == record["temperatures"]
    assert set(json.loads((folder / "out" / "config.json").read_text())) >= {
        "speculators_model_type",
        "aux_hidden_state_layer_ids",
    }
    target = tiny_model("llama", num_hidden_layers=6)
    ids = torch.tensor([[1, 2, 3]])
    plain = target.generate(ids, do_sample=False, max_new_tokens=30, eos_token_id=EOS)
    assert torch.equal(plain, target.generate(ids, do_sample=False, max_new_tokens=30, eos_token_id=EOS, assistant_model=again))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["parallelspec", "dspark", "eagle3"])
def test_a_resumed_run_is_the_run_that_would_have_been(what, folder):
    run = {"parallelspec": train_parallelspec, "dspark": train_dspark, "eagle3": train_eagle3}[what]
    small = {
        "parallelspec": {"style": "eagle", "num_masks": 2},
        "dspark": {"block_size": 3, "num_features": 2},
        "eagle3": {"num_draft_tokens": 2},
    }[what]
    options = {**OPTIONS, **small, "lr_scheduler_type": "constant"}
    rows = folder / "rows.jsonl"
    if what == "eagle3":
        tiny_model("llama", num_hidden_layers=7).save_pretrained(folder / "target")
    whole = run(folder / "target", rows, folder / "whole", max_steps=8, **options)
    run(folder / "target", rows, folder / "parts", max_steps=4, save_steps=4, **options)
    parts = run(folder / "target", rows, folder / "parts", max_steps=8, resume=True, **options)
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_command(folder):
    common = [
        "--target",
        str(folder / "target"),
        "--train-file",
        str(folder / "rows.jsonl"),
        "--max-steps",
        "2",
        "--max-length",
        "64",
    ]
    made = [
        ["train", "parallelspec", *common, "--output-dir", str(folder / "p"), "--style", "eagle", "--num-masks", "2"],
        ["train", "dspark", *common, "--output-dir", str(folder / "d"), "--block-size", "3", "--num-features", "2"],
    ]
    for arguments in made:
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    assert isinstance(pd.AutoDrafter.from_pretrained(folder / "p"), pd.ParallelSpecDrafter)
    assert isinstance(pd.AutoDrafter.from_pretrained(folder / "d"), pd.DSparkDrafter)
    for what in ("parallelspec", "dspark"):
        shown = CliRunner().invoke(app, ["train", what, "--help"]).output
        assert "Example" in shown


BAD = {
    "style": (train_parallelspec, {"style": "hydra"}, "style is 'hydra'"),
    "loss": (train_parallelspec, {"loss": "kl"}, "ce or tv"),
    "masks": (train_parallelspec, {"num_masks": 0}, "at least 1|a mask at least"),
    "context": (train_parallelspec, {"max_length": 4096}, "longer than the target's context"),
    "vocabulary": (train_parallelspec, {"vocab": 1}, "special ones"),
    "block": (train_dspark, {"block_size": 1}, "2 rows at least"),
    "features": (train_dspark, {"num_features": 9}, "9 of them cannot be read"),
    "head": (train_dspark, {"markov_type": "lstm"}, "vanilla, gated or rnn"),
    "steps": (train_dspark, {"max_steps": 0}, "trains nothing"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_options(what, folder):
    run, options, message = BAD[what]
    with pytest.raises(ValueError, match=message):
        run(folder / "target", folder / "rows.jsonl", folder / "out", **{**OPTIONS, "max_steps": 1, **options})
    assert not (folder / "out").exists() or not any((folder / "out").iterdir())


def test_losses():
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0]])
    assert cross_entropy(logits, torch.tensor([0, -100])).tolist() == pytest.approx([-logits[0].log_softmax(-1)[0].item(), 0.0])
    q, p = logits.softmax(-1), torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.1]])
    chance = rejection(logits, p)
    assert chance[0].item() == pytest.approx(1 - torch.minimum(p[0], q[0]).sum().item(), abs=1e-6)
    assert chance[1].item() == pytest.approx(1 - torch.minimum(p[1], q[1]).sum().item(), abs=1e-6)  # 0.7 of other tokens


def test_temperatures_mend_confidences():
    torch.manual_seed(0)
    chances = torch.rand(4000, 3)
    right = (torch.rand(4000, 3) < chances).int()
    logits = 3 * torch.logit(chances.clamp(1e-3, 1 - 1e-3))  # three times too sure
    heat = temperatures(logits, right.cumprod(1))
    assert all(2.2 < one < 4 for one in heat[:2])
    before = calibration_error(torch.sigmoid(logits[:, 0]), right[:, 0])
    assert calibration_error(torch.sigmoid(logits[:, 0] / heat[0]), right[:, 0]) < 0.3 * before


def test_tokens_that_text_does_not_use():
    tokenizer = make_tokenizer()
    assert unused_token(tokenizer, 32) == 31
    tokenizer.mask_token = None
    assert unused_token(tokenizer, 40) == 39
    tokenizer.add_special_tokens({"additional_special_tokens": ["<one>", "<two>"]})
    assert unused_token(tokenizer, 34) == 33


def test_group_wise_losses_count_every_depth():
    target = tiny_model("llama", num_hidden_layers=2)
    drafter = pd.ParallelSpecDrafter.from_target(target, "medusa", 2)
    arguments = TrainingArguments(output_dir="unused", report_to="none", use_cpu=True)
    ids = [3, 1, 4, 1, 5]
    cod = CodConfig(3, 1.0, 1.0)
    trainer = ParallelSpecTrainer(
        drafter, arguments, target, cod, train_dataset=Dataset.from_list([{"input_ids": ids, "labels": ids, "length": 5}])
    )
    batch = RowCollator(0, cod)([{"input_ids": ids, "labels": ids}])
    with torch.no_grad():
        loss = trainer.compute_loss(drafter.train(), batch)
        losses = []
        for depth in range(3):
            for known in range(1, 5 - depth):
                logits = drafter.eval().draft_logits(torch.tensor([ids[:known]]), None, depth + 1)[0, depth]
                losses.append(-logits.log_softmax(-1)[ids[known + depth]])
    assert loss.item() == pytest.approx(torch.stack(losses).mean().item(), abs=1e-4)


@torch.no_grad()
def test_states_and_embeddings_weigh_the_same_at_first():
    """Normed states are many times as large as embeddings, which they would drown."""
    target = tiny_model("llama", num_hidden_layers=2)
    target.model.norm.weight.mul_(3.0)
    drafter = pd.ParallelSpecDrafter.from_target(target, "eagle", 2)
    ids = torch.arange(28)[None]
    embedded, normed = target.get_input_embeddings()(ids), target.model(ids).last_hidden_state
    both = [drafter.text(ids, normed), drafter.text(ids, torch.zeros_like(normed))]
    assert (both[0] - both[1]).std() / embedded.std() == pytest.approx(1.0, rel=0.3)
    assert both[1].std() / embedded.std() == pytest.approx(1.0, rel=0.05)
