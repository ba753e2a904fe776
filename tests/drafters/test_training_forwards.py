"""What training sees is what is drafted: rows, blocks and steps give the logits that the drafter
gives behind the same text.
"""

import pytest
import torch
from datasets import Dataset
from lossless import assert_lossless
from published import block_states
from tiny import tiny_model
from transformers import AutoModelForCausalLM, Gemma4TextConfig, TrainingArguments

import hf_paradraft
from hf_paradraft.drafters.blocks.training import Blocks, block_mask
from hf_paradraft.drafters.parallelspec.training import ParallelSpecTrainer, ParallelSpecTraining
from hf_paradraft.protocol import Prefix
from hf_paradraft.training.anchors import AnchorCollator
from hf_paradraft.training.rows import CodConfig, RowCollator
from hf_paradraft.training.run import RunInputs
from hf_paradraft.training.target_states import states_of
from hf_paradraft.training.unrolled import Unrolled


@torch.no_grad()
def test_a_row_at_the_end_of_learned_positions():
    """Its neighbours' masks, which it does not need, would have no positions; nor has the padding
    of a row that is whole.
    """
    target = tiny_model("gpt2", max_position_embeddings=16)
    drafter = hf_paradraft.ParallelSpecDrafter.from_target(target, "medusa", 4)
    drafting, text = drafter.start_drafting(target, 16), torch.arange(16)[None]
    for whole, end in ((15, 0), (16, 15), (16, 16)):
        short, length = text[:, : whole - 7], 0 if end == 0 else end - 7
        guesses = drafting.propose(
            [Prefix(text[:, :whole], 16 - whole, end), Prefix(short, 4, length)]
        )
        if end < 16:
            torch.testing.assert_close(
                guesses[1].logits, drafter.draft_logits(short, None, 4)[0], rtol=1e-3, atol=1e-4
            )
            assert len(guesses[0].logits) == 16 - whole


@pytest.mark.parametrize("style", ["medusa", "eagle"])
def test_layers_of_a_target_whose_kinds_differ_in_size(style, prompt):
    config = Gemma4TextConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, global_head_dim=16, layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=0,
    )  # fmt: skip
    target = AutoModelForCausalLM.from_config(config).eval()
    drafter = hf_paradraft.ParallelSpecDrafter.from_target(target, style, 3)
    assert drafter.stack.layers[0].self_attn.head_dim == 16
    options = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": None}
    assert_lossless(target, drafter, prompt, **options)


@torch.no_grad()
@pytest.mark.parametrize("style", ["medusa", "eagle"])
def test_training_rows_are_what_is_drafted(style):
    """The logits of a row `(d, t)` in training are those that the drafter gives behind the first `t
    - d + 1` tokens.
    """
    target = tiny_model("llama", num_hidden_layers=3)
    drafter = hf_paradraft.ParallelSpecDrafter.from_target(target, style, 2)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    batch = RowCollator(0, CodConfig(3, 1.0, 1.0))(
        [{"input_ids": ids, "labels": ids}, {"input_ids": ids[:5], "labels": ids[:5]}]
    )
    batch.pop("labels")
    text = torch.tensor([ids])
    states = states_of(target, ("normed",), text, torch.tensor([len(ids)]))["normed"]
    features = None
    if style == "eagle":
        features = torch.zeros((*batch["input_ids"].shape, 32))
        features[:, 1 : len(ids)] = states[:, :-1]
    columns = torch.arange(batch["input_ids"].shape[1])
    logits, _ = drafter(**batch, columns=columns, features=features)
    for row, length in ((0, 8), (1, 5)):
        for column in columns.tolist():
            depth = int(batch["depths"][row, column])
            position = int(batch["position_ids"][row, column])
            seen = position - depth + 1
            if depth < 0 or seen < 2 or seen > length:
                continue
            given = {"normed": states[:, : seen - 1]} if style == "eagle" else None
            expected = drafter.draft_logits(text[:, :seen], given, depth + 1)[0, depth]
            torch.testing.assert_close(logits[row, column], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "dflash"])
def test_training_blocks_are_what_is_drafted(kind):
    """The logits of a slot in training are those behind its anchor, with the text's own tokens
    before.
    """
    target = tiny_model("llama", num_hidden_layers=6)
    if kind == "dflash":
        drafter = hf_paradraft.DFlashDrafter.from_target(target, 31, block_size=4, num_features=3)
    else:
        drafter = hf_paradraft.DSparkDrafter.from_target(
            target, 31, block_size=3, num_features=3, markov_rank=4, markov_type=kind
        )
        torch.nn.init.normal_(drafter.markov.after.weight)
        torch.nn.init.normal_(drafter.markov.before.weight)
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    batch = AnchorCollator(4, 3)(
        [{"input_ids": ids, "labels": ids}, {"input_ids": ids[:6], "labels": [-100] * 3 + ids[3:6]}]
    )
    states = states_of(target, drafter.features, batch["input_ids"], batch["lengths"])
    guesses = Blocks(drafter)(batch, states)
    assert (batch["labels"] != -100).any()
    for row, length in ((0, 10), (1, 6)):
        for index, anchor in enumerate(batch["anchors"][row].tolist()):
            if anchor < 0:
                assert (batch["labels"][row, index] == -100).all()
                continue
            text = batch["input_ids"][row : row + 1, : anchor + 1]
            given = states_of(target, drafter.features, text, torch.tensor([text.shape[1]]))
            whole = block_states(
                drafter, text, {key: states[:, :-1] for key, states in given.items()}
            )
            states = drafter.guesses(whole)
            before = batch["input_ids"][row, anchor : anchor + 3]
            expected = drafter.base_logits(states)[0]
            if kind != "dflash":
                memory = drafter.first_memory(text[0, -1], whole[0])
                expected = expected + drafter.markov.biases_of_known(before, states[0], memory)
            torch.testing.assert_close(
                guesses["logits"][row, index], expected, rtol=1e-4, atol=1e-4
            )
            following = [ids[anchor + 1 + k] if anchor + 1 + k < length else -100 for k in range(3)]
            assert batch["labels"][row, index].tolist() == following


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["speculators DSpark, rnn, fill-in", "DeepSpec rnn", "speculators DSpark, gated"]
)
def test_blocks_go_on_learning_from_what_they_draft(name, load):
    """The recurrent head's memory has seen the newest token's own row, where that row guesses
    nothing.
    """
    drafter = load(name)
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    count = drafter.config.num_drafts
    batch = AnchorCollator(4, count)([{"input_ids": ids, "labels": ids}])
    width = batch["input_ids"].shape[1]
    features = {key: torch.randn(1, width, 32) for key in drafter.features}
    learned = Blocks(drafter)(batch, features)["logits"][0]
    anchors = batch["anchors"][0].tolist()
    assert max(anchors) > 0
    for index, anchor in enumerate(anchors):
        text = torch.tensor([ids[: anchor + 1]])
        seen = {key: states[:, :anchor] for key, states in features.items()}
        guess = drafter.guess(block_states(drafter, text, seen)[0], text[0, -2:], count)
        memories = [None]
        for depth, token in enumerate(ids[anchor : anchor + count]):
            bias, memories = guess.bias(torch.tensor([depth]), torch.tensor([token]), memories)
            torch.testing.assert_close(
                learned[index, depth], guess.logits[depth] + bias[0], rtol=1e-4, atol=1e-4
            )


@torch.no_grad()
def test_training_steps_are_what_is_drafted():
    """The logits of a step in training are those of the drafter behind the text's own tokens, read
    one after the other.
    """
    target = tiny_model("llama", num_hidden_layers=8)
    drafter = hf_paradraft.Eagle3Drafter.from_target(target, 3)
    torch.nn.init.normal_(drafter.fc.weight, std=0.3)
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    batch = AnchorCollator(4, 3)(
        [{"input_ids": ids, "labels": ids}, {"input_ids": ids[:6], "labels": [-100] * 3 + ids[3:6]}]
    )
    guesses = Unrolled(drafter, drafter, 3)(
        batch, states_of(target, drafter.features, batch["input_ids"], batch["lengths"])
    )
    checked = 0
    for row in range(2):
        for index, anchor in enumerate(batch["anchors"][row].tolist()):
            if anchor < 0:
                continue
            text = batch["input_ids"][row : row + 1, : anchor + 1]
            given = states_of(target, drafter.features, text, torch.tensor([text.shape[1]]))
            drafting = drafter.drafting(hf_paradraft.SpeculationConfig(), 0)
            logits = drafting.logits_after_texts(
                text, {key: states[:, :-1] for key, states in given.items()}, 1
            )
            expected = [logits[0, -1]]
            for step in (1, 2):
                token = batch["input_ids"][row, anchor + step : anchor + step + 1]
                expected.append(drafting.extend([token], [[step - 2]])[0][0])
            torch.testing.assert_close(
                guesses["logits"][row, index], torch.stack(expected), rtol=1e-4, atol=1e-4
            )
            checked += 1
    assert checked > 4


def test_a_block_sees_its_context_and_itself():
    mask = block_mask(torch.tensor([[2, -1]]), 4, 2)[0, 0]
    assert mask.int().tolist() == [[1, 1, 0, 0, 1, 1, 0, 0]] * 2 + [[0, 0, 0, 0, 0, 0, 1, 1]] * 2


def test_group_wise_losses_count_every_depth(tmp_path):
    target = tiny_model("llama", num_hidden_layers=2)
    drafter = hf_paradraft.ParallelSpecDrafter.from_target(target, "medusa", 2)
    arguments = TrainingArguments(output_dir=tmp_path, report_to="none", use_cpu=True)
    ids = [3, 1, 4, 1, 5]
    samples = Dataset.from_list([{"input_ids": ids, "labels": ids, "length": 5}])
    options = ParallelSpecTraining(target="", train_file="", output_dir=tmp_path)
    inputs = RunInputs(target, None, arguments, samples, None)
    trainer = ParallelSpecTrainer(options, drafter, inputs)
    batch = RowCollator(0, CodConfig(3, 1.0, 1.0))([{"input_ids": ids, "labels": ids}])
    with torch.no_grad():
        loss = trainer.compute_loss(drafter.train(), batch)
        losses = []
        for depth in range(3):
            for length in range(1, 5 - depth):
                logits = drafter.eval().draft_logits(torch.tensor([ids[:length]]), None, depth + 1)[
                    0, depth
                ]
                losses.append(-logits.log_softmax(-1)[ids[length + depth]])
    assert loss.item() == pytest.approx(torch.stack(losses).mean().item(), abs=1e-4)
