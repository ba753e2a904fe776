"""Kernels of attention: those that are planned anew for every length, and those that copy keys."""

import os
from threading import Barrier, Thread

import pytest
import torch
from tiny import generate, make_tokenizer, near_copy, tiny_model
from trained import train_parallelspec
from transformers import TrainerCallback

from hf_paradraft import SpeculationConfig
from hf_paradraft.decoding.tree_attention import GROUPED, grouped_heads, without_cudnn_attention

chosen = torch.backends.cuda.cudnn_sdp_enabled


@pytest.fixture(params=[True, False], autouse=True)
def choice(request):
    """What the process has chosen before, which is what it has again at the end."""
    before = chosen()
    torch.backends.cuda.enable_cudnn_sdp(request.param)
    yield
    assert chosen() == request.param
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("overlap", [False, True])
def test_no_forward_of_a_drafted_call_has_them(overlap):
    target, seen = tiny_model(), []
    drafter = near_copy(target, 0.1)
    drafter.speculation_config = SpeculationConfig(3, None, never_slower=False, overlap=overlap)
    hooks = [
        model.register_forward_pre_hook(lambda *_: seen.append(chosen()))
        for model in (target.model, drafter.model)
    ]
    for _ in range(2):
        seen.clear()  # of the look at the target
        generate(target, drafter, torch.tensor([[1, 2, 3]]), max_new_tokens=12)
    for hook in hooks:
        hook.remove()
    assert len(seen) > 4
    assert not any(seen)


def test_no_step_of_a_training_has_them(tmp_path):
    target, seen = tiny_model(dtype=torch.float32), []
    target.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "rows.jsonl").write_text('{"text": "a b c d e f g h"}\n')

    class Looks(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            seen.append(chosen())

    rows, options = tmp_path / "rows.jsonl", {"max_length": 32, "max_steps": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.trainer.DEFAULT_CALLBACKS", [Looks])
        train_parallelspec(tmp_path / "target", rows, tmp_path / "out", **options)
    assert seen == [False, False]


def test_the_last_of_several_threads_takes_the_choice_back():
    first, second, seen = Barrier(2), Barrier(2), []

    def run(wait):
        with without_cudnn_attention():
            first.wait()
            if wait:
                second.wait()
            seen.append(chosen())

    threads = [Thread(target=run, args=(wait,)) for wait in (False, True)]
    for thread in threads:
        thread.start()
    threads[0].join()
    assert not chosen()
    second.wait()
    threads[1].join()
    assert seen == [False, False]


def test_an_error_takes_the_choice_back():
    with pytest.raises(ValueError, match="odd"), without_cudnn_attention():
        raise ValueError("odd")


@pytest.mark.parametrize("tree_size", [None, 7])
def test_keys_of_grouped_heads_are_read_as_they_lie(tree_size):
    if torch.accelerator.is_available():
        pytest.skip("on a machine with a GPU the switch stays off")
    target, seen = tiny_model(), []
    drafter = near_copy(target, 0.1)
    drafter.speculation_config = SpeculationConfig(3, tree_size, never_slower=False)
    target.model.norm.register_forward_pre_hook(
        lambda _, given: seen.append((given[0].shape[1] > 1, GROUPED in os.environ))
    )
    generate(target, drafter, torch.tensor([[1, 2, 3]]), max_new_tokens=12)
    assert sum(grouped for several, grouped in seen if several) > 2
    assert not any(grouped for several, grouped in seen if not several)
    assert GROUPED not in os.environ


def test_what_the_caller_has_chosen_stays(monkeypatch):
    monkeypatch.setenv(GROUPED, "0")
    with grouped_heads(3):
        assert os.environ[GROUPED] == "0"
    assert os.environ[GROUPED] == "0"
