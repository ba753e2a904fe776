"""What people do wrong ends in one sentence that names the file or the model, before anything is
written.
"""

import gzip
import json

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_tokenizer, near_copy, ppd_folder, tiny_model
from trained import regenerate, train_parallelspec
from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM
from typer.testing import CliRunner

import hf_paradraft
from hf_paradraft.bench.questions import Question, ask
from hf_paradraft.cli import app

ROW = '{"text": "a b c d e f g h a b c"}\n'


def said(*words):
    """The sentence that a command ends in."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(result.exception, ValueError | OSError), result.output
    return str(result.exception)


@pytest.fixture
def model(tmp_path):
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


DATA = {
    "utf-16": (ROW.encode("utf-16"), "it is packed, or no text in UTF-8"),
    "gzip": (gzip.compress(ROW.encode(), mtime=0), "it is packed, or no text in UTF-8"),
    "digits": (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "line 1: Exceeds the limit"),
}


@pytest.mark.parametrize("kind", DATA)
def test_data_that_is_no_text_is_named(kind, model, tmp_path):
    content, message = DATA[kind]
    (tmp_path / "rows.jsonl").write_bytes(content)
    sentence = said(
        *(
            "train",
            "pard",
            "--model",
            model,
            "--train-file",
            tmp_path / "rows.jsonl",
            "--output-dir",
            tmp_path / "out",
        ),
        *("--mask-token-id", 31, "--max-length", 64),
    )
    assert sentence.startswith(f"{tmp_path / 'rows.jsonl'} is not JSON lines: {message}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["pard", "ppd", "parallelspec"])
def test_a_model_without_a_tokenizer_is_named(kind, tmp_path):
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(ROW)
    option = "--model" if kind == "pard" else "--target"
    words = (
        "--train-file",
        tmp_path / "rows.jsonl",
        "--output-dir",
        tmp_path / "out",
        "--max-length",
        64,
    )
    assert said("train", kind, option, tmp_path / "model", *words).startswith(
        f"{tmp_path / 'model'} has no tokenizer (tokenizer.json"
    )


def test_a_mistyped_target_is_named(hub, tmp_path):
    (tmp_path / "rows.jsonl").write_text(ROW)
    words = ("--train-file", tmp_path / "rows.jsonl", "--output-dir", tmp_path / "out")
    assert "user/mistyped" in said("train", "eagle3", "--target", "user/mistyped", *words)
    assert "user/mistyped" in said(
        "regenerate", "--target", "user/mistyped", "--prompts", "x", "--output", tmp_path / "y"
    )


@pytest.mark.parametrize("kind", ["mamba", "bloom"])
def test_models_that_cannot_be_taught_by_rows(kind, tmp_path):
    torch.manual_seed(0)
    made = {
        "mamba": lambda: MambaForCausalLM(
            MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=8, time_step_rank=4)
        ),
        "bloom": lambda: BloomForCausalLM(
            BloomConfig(vocab_size=32, hidden_size=32, n_layer=8, n_head=4)
        ),
    }[kind]()
    made.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(ROW * 4)
    words = (
        "--train-file",
        tmp_path / "rows.jsonl",
        "--output-dir",
        tmp_path / "out",
        "--max-length",
        32,
        "--max-steps",
        1,
    )
    sentence = said("train", "pard", "--model", tmp_path / "model", "--mask-token-id", 31, *words)
    assert "takes no masks and positions as they are given" in sentence
    for other in ("dspark", "eagle3") if kind == "mamba" else ():
        assert "has no attention heads" in said(
            "train", other, "--target", tmp_path / "model", *words
        )


def test_a_damaged_adapter_is_not_calibrated(model, tmp_path):
    folder = ppd_folder(tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text()) | {
        "base_model_name_or_path": str(model)
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    (tmp_path / "rows.jsonl").write_text(ROW)
    sentence = said("calibrate", folder, "--eval-file", tmp_path / "rows.jsonl", "--max-length", 64)
    assert sentence.startswith(f"{weights} is truncated or damaged")


def test_states_that_are_damaged_are_made_again(folder, caplog):
    """Every run with that cache failed, and none said which file was to blame."""
    options = {
        "style": "eagle",
        "num_masks": 2,
        "max_steps": 2,
        "use_cpu": True,
        "max_length": 64,
        "cache_dir": folder / "states",
    }
    train_parallelspec(folder / "target", folder / "some.jsonl", folder / "one", **options)
    file = next((folder / "states").glob("*.safetensors"))
    # the file is cut below them
    whole = {name: tensor.clone() for name, tensor in load_file(file).items()}
    file.write_bytes(file.read_bytes()[:-9])
    train_parallelspec(folder / "target", folder / "some.jsonl", folder / "two", **options)
    assert f"{file} is damaged" in caplog.text
    torch.testing.assert_close(load_file(file), whole)


def test_a_drafter_without_its_tokenizers_vocabulary_is_not_published(hub, tmp_path):
    near_copy(tiny_model(dtype=torch.float32)).save_pretrained(tmp_path / "drafter")
    make_tokenizer().save_pretrained(tmp_path / "drafter")
    (tmp_path / "drafter" / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in said("push", tmp_path / "drafter", "user/x")


def test_a_foreign_pickle_is_not_advised_to_be_trusted(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["DFlashDraftModel"], "dflash_config": {}})
    )
    torch.save({"a": print}, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="ask its publisher for safetensors") as raised:
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path)
    assert "weights_only" not in str(raised.value)


def test_prompts_beyond_learned_positions(tmp_path):
    """They ended in an IndexError."""
    target, tokenizer = tiny_model("gpt2"), make_tokenizer()
    rows = [{"messages": [{"role": "user", "content": "a b c d " * count}]} for count in (1, 100)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        regenerate(
            target, tokenizer, tmp_path / "prompts.jsonl", tmp_path / "out.jsonl", max_new_tokens=4
        )
        == 1
    )
    (tmp_path / "long.jsonl").write_text(json.dumps(rows[1]) + "\n")
    with pytest.raises(
        ValueError, match=r"No prompt of .* leaves room for 4 tokens in the target.s context of 256"
    ):
        regenerate(
            target, tokenizer, tmp_path / "long.jsonl", tmp_path / "none.jsonl", max_new_tokens=4
        )
    with pytest.raises(ValueError, match="has no place in the target's context of 256"):
        ask([Question("x", ("a b c d " * 100,))], tokenizer, target, 4)
    assert ask([Question("x", ("a b c d " * 100,))], tokenizer, tiny_model(), 4)
