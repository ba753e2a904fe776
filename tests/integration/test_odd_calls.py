"""Calls, and targets as people adapt and configure them, that plain decoding answers."""

import json

import pytest
import torch
from lossless import assert_lossless
from peft import LoraConfig, get_peft_model
from tiny import CACHE, MASK, letters, near_copy, tiny_model
from transformers import AutoModelForCausalLM, StaticCache
from typer.testing import CliRunner

import hf_paradraft
from hf_paradraft.cli import app

IDS = torch.tensor([[1, 2, 3, 4, 1, 2, 3]])
ADAPTERS = {
    "lora on words": {"target_modules": ["embed_tokens"]},
    "trainable tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]},
    "words and head": {"target_modules": ["embed_tokens", "lm_head"]},
}
READERS = {
    "eagle3": lambda target: hf_paradraft.Eagle3Drafter.from_target(target),
    "dflash": lambda target: hf_paradraft.DFlashDrafter.from_target(target, MASK, 1, 7, 2),
    "parallelspec": lambda target: hf_paradraft.ParallelSpecDrafter.from_target(
        target, "medusa", 5
    ),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("reader", READERS)
def test_adapters_on_what_a_drafter_shares(adapter, reader):
    base = tiny_model(num_hidden_layers=7)
    adapted = get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **ADAPTERS[adapter])
    ).double()
    drafter = READERS[reader](base).double()
    drafter.speculation_config.never_slower = False
    assert_lossless(adapted, drafter, IDS)
    plain = adapted.generate(input_ids=IDS, max_new_tokens=12, do_sample=False)
    with hf_paradraft.set_drafter(adapted, drafter):
        assert torch.equal(
            adapted.generate(input_ids=IDS, max_new_tokens=12, do_sample=False), plain
        )
    assert drafter.last_stats is not None


def test_a_static_cache_of_the_callers_for_a_sliding_window_serves_further_turns():
    target = tiny_model("mistral-sliding", sliding_window=16)
    turns = []
    for drafter in (None, near_copy(target)):
        cache = StaticCache(config=target.config, max_cache_len=128)
        options = {"do_sample": False, "eos_token_id": None, "disable_compile": True, CACHE: cache}
        if drafter is not None:
            with pytest.raises(ValueError, match="windows alone"):
                target.generate(IDS, max_new_tokens=12, assistant_model=drafter, **options)
        first = target.generate(IDS, max_new_tokens=12, **options)
        turn = torch.cat([first, IDS], 1)
        turns.append(target.generate(turn, max_new_tokens=90, **options))
    assert torch.equal(*turns)


@pytest.mark.parametrize("asked", ["output_attentions", "output_hidden_states"])
def test_a_saved_config_that_asks_for_more_than_anybody_takes(asked):
    target = tiny_model()
    setattr(target.generation_config, asked, True)
    assert_lossless(target, near_copy(target), IDS)
    with pytest.raises(ValueError, match="does not collect"):
        target.generate(
            IDS, assistant_model=near_copy(target), max_new_tokens=4, return_dict_in_generate=True
        )


@pytest.mark.parametrize("kind", [hf_paradraft.PardDrafter, hf_paradraft.AutoregressiveDrafter])
def test_drafters_of_wrapped_models(kind, tmp_path):
    target, more = tiny_model(), {"mask_token_id": MASK} if kind is hf_paradraft.PardDrafter else {}
    adapted = get_peft_model(
        tiny_model(seed=2), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    ).double()
    for small in (adapted, torch.compile(tiny_model(seed=2), backend="eager")):
        drafter = kind.from_causal_lm(small, **more)
        drafter.speculation_config.never_slower = False
        assert_lossless(target, drafter, IDS)
    with pytest.raises(ValueError, match="merge_and_unload"):
        kind.from_causal_lm(adapted, **more).save_pretrained(tmp_path / "drafter")
    kind.from_causal_lm(adapted.merge_and_unload(), **more).save_pretrained(tmp_path / "drafter")


@pytest.mark.parametrize(("sampled", "rows"), [(False, 1), (True, 2)])
@pytest.mark.parametrize(
    "kind", ["pard", "ngram", "autoregressive", "eagle3", "dflash", "parallelspec"]
)
def test_a_default_device_other_than_the_targets(kind, sampled, rows):
    """Whatever is made without a device would have no numbers there."""
    target = tiny_model(num_hidden_layers=7)
    makers = {
        "pard": near_copy,
        "ngram": lambda target: hf_paradraft.NgramDrafter(),
        "autoregressive": lambda target: hf_paradraft.AutoregressiveDrafter(near_copy(target)),
    }
    drafter = (makers | READERS)[kind](target)
    options = {
        "max_new_tokens": 20,
        "pad_token_id": 0,
        "do_sample": sampled,
        "attention_mask": torch.ones_like(IDS).repeat(rows, 1),
    }
    for size in (None, 9) if sampled else (None, "auto"):
        drafter.speculation_config = hf_paradraft.SpeculationConfig(
            4, size, never_slower=False, prompt_lookup=True
        )
        texts = []
        for assistant in (None, drafter):
            torch.manual_seed(0)
            torch.set_default_device("meta")
            try:
                texts.append(
                    target.generate(IDS.repeat(rows, 1), assistant_model=assistant, **options)
                )
            finally:
                torch.set_default_device(None)
        assert torch.equal(*texts)


def saved_target(folder, **config):
    target = tiny_model(dtype=torch.float32)
    for name, value in config.items():
        setattr(target.generation_config, name, value)
    target.save_pretrained(folder)
    tokenizer = letters()
    tokenizer.eos_token = "E"
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "config", [{"use_cache": False}, {"output_attentions": True}, {"output_hidden_states": True}]
)
def test_a_config_without_a_generation_config(config, tmp_path):
    name = saved_target(tmp_path / "target")
    (tmp_path / "target" / "generation_config.json").unlink()
    file = tmp_path / "target" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    line = [
        "generate",
        "abc",
        "--target",
        name,
        "--drafter",
        "ngram",
        "--dtype",
        "float32",
        "--max-new-tokens",
        "8",
    ]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    target = AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager")
    options = {"do_sample": False, "max_new_tokens": 8, "use_cache": True}
    made = [
        target.generate(IDS, assistant_model=drafter, **options)
        for drafter in (None, near_copy(tiny_model()))
    ]
    assert torch.equal(*(one if isinstance(one, torch.Tensor) else one.sequences for one in made))


@pytest.mark.parametrize("config", [{"stop_strings": ["zz"]}, {"use_cache": False}])
def test_generate_hands_on_what_it_holds(config, tmp_path):
    name = saved_target(tmp_path / "target", **config)
    line = [
        "generate",
        "abc",
        "--target",
        name,
        "--drafter",
        "ngram",
        "--dtype",
        "float32",
        "--max-new-tokens",
        "8",
    ]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    assert "identical to its output" in result.output


@pytest.mark.parametrize("more", [[], ["--temperature", "1"], ["--batch-size", "1"]])
def test_regenerate_hands_on_what_it_holds(more, tmp_path):
    name = saved_target(tmp_path / "target", stop_strings=["a", "b", "c", "d", "e", "f"])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "abc"}\n{"text": "cd"}\n')
    line = [
        "regenerate",
        "--target",
        name,
        "--prompts",
        str(prompts),
        "--output",
        str(tmp_path / "out.jsonl"),
        *more,
    ]
    result = CliRunner().invoke(app, [*line, "--max-new-tokens", "30", "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()):
        assert row["finished"]
        assert not set(row["text"].removeprefix("abc").removeprefix("cd")[:-1]) & set("abcdef")
