"""TRL's GRPO with a drafter that is set: the completions, rewards and losses of a run without
one.
"""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import make_tokenizer, near_copy, tiny_model

from hf_paradraft import set_drafter

trl = pytest.importorskip("trl", reason="the extra rl is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*checkpointing:FutureWarning"),  # TRL's own names
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def grpo(folder, drafts, lora):
    target, seen = tiny_model(dtype=torch.float32, eos_token_id=None), []
    drafter = near_copy(target, 0.01)

    def reward(completions, **_):
        seen.extend(completions)
        return [float(len(set(text.split()))) for text in completions]

    torch.manual_seed(0)
    arguments = trl.GRPOConfig(
        output_dir=folder, max_steps=3, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=16, bf16=False,
        learning_rate=1e-3, gradient_checkpointing=True, logging_steps=1, save_strategy="no",
        report_to="none", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": ["a b c", "d", "e f g h a", "b"] * 8})
    trainer = trl.GRPOTrainer(
        target, reward, args=arguments, train_dataset=prompts, processing_class=make_tokenizer(),
        peft_config=LoraConfig(target_modules="all-linear",
        task_type="CAUSAL_LM") if lora else None,
    )  # fmt: skip
    with set_drafter(trainer.model, drafter if drafts else None):
        trainer.train()
    assert (drafter.last_stats is not None and drafter.last_stats.num_drafted > 0) == drafts
    return seen, [
        (line["loss"], line["reward"]) for line in trainer.state.log_history if "reward" in line
    ]


@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "whole"])
def test_grpo_is_the_run_without_a_drafter(lora, tmp_path):
    plain, drafted = (grpo(tmp_path / str(drafts), drafts, lora) for drafts in (False, True))
    assert len(plain[0]) == 24
    assert drafted == plain
