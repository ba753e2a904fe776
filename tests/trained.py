"""Training runs as one call each: where from, where to, and options."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_paradraft.drafters.blocks.training import DFlashTraining, DSparkTraining
from hf_paradraft.drafters.eagle3.training import Eagle3Training
from hf_paradraft.drafters.parallelspec.training import ParallelSpecTraining
from hf_paradraft.drafters.pard.training import PardTraining
from hf_paradraft.drafters.ppd.training import PpdTraining
from hf_paradraft.training.run import TrainingOptions, train


def run_of(kind: type[TrainingOptions], source: str = "target") -> Callable[..., Any]:
    """A function of the model, the rows, the output folder, and options of the kind."""

    def run(model: str | Path, train_file: str | Path, output_dir: str | Path, **options: Any) -> Any:
        return train(kind, **{source: model}, train_file=train_file, output_dir=output_dir, **options)

    return run


train_pard = run_of(PardTraining, "model")
train_ppd = run_of(PpdTraining)
train_parallelspec = run_of(ParallelSpecTraining)
train_dspark = run_of(DSparkTraining)
train_dflash = run_of(DFlashTraining)
train_eagle3 = run_of(Eagle3Training)
