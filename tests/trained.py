"""Training runs as one call each: where from, where to, and options."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_paradraft.drafters.blocks.training import DFlashTraining, DSparkTraining
from hf_paradraft.drafters.eagle3.training import Eagle3Training
from hf_paradraft.drafters.mtp.training import MtpTraining
from hf_paradraft.drafters.parallelspec.training import ParallelSpecTraining
from hf_paradraft.drafters.pard.training import PardTraining
from hf_paradraft.drafters.ppd.training import PpdTraining
from hf_paradraft.training.answers import Target
from hf_paradraft.training.regenerate import regenerate as write_answers
from hf_paradraft.training.run import TrainingOptions, train


def regenerate(
    target: Any, tokenizer: Any, source: str | Path, output: Path, max_new_tokens: int = 256,
    batch_size: int = 16,
    temperature: float = 0.0, drafter: Any = None, **options: Any,
) -> int:  # fmt: skip
    """Answers of a target in this process."""
    writer = Target(target, tokenizer, max_new_tokens, batch_size, temperature, 0, drafter)
    return write_answers(writer, source, output, **options)


def run_of(kind: type[TrainingOptions], source: str = "target") -> Callable[..., Any]:
    """A function of the model, the rows, the output folder, and options of the kind."""

    def run(
        model: str | Path, train_file: str | Path, output_dir: str | Path, **options: Any
    ) -> Any:
        return train(
            kind, **{source: model}, train_file=train_file, output_dir=output_dir, **options
        )

    return run


train_pard = run_of(PardTraining, "model")
train_ppd = run_of(PpdTraining)
train_parallelspec = run_of(ParallelSpecTraining)
train_dspark = run_of(DSparkTraining)
train_dflash = run_of(DFlashTraining)
train_eagle3 = run_of(Eagle3Training)
train_mtp = run_of(MtpTraining)
