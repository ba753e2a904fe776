"""Train a drafter for a model that has none: one layer on the model's own embedding and head
(ParallelSpec).

python examples/train.py                          # the embedded family's target, a few steps
python examples/train.py my-model answers.jsonl my-drafter 2000
"""

import json
import sys
from pathlib import Path
from tempfile import mkdtemp

from hf_paradraft import AutoDrafter
from hf_paradraft.demo import FAMILY
from hf_paradraft.drafters.parallelspec.training import ParallelSpecTraining
from hf_paradraft.training.run import train


def some_rows(folder: Path) -> Path:
    """Texts to try it with; better are answers of the target itself (`paradraft regenerate`)."""
    file = folder / "rows.jsonl"
    chat = [
        {"role": "user", "content": "Write 3 euros in cents."},
        {"role": "assistant", "content": "300 cents"},
    ]
    file.write_text(f"{json.dumps({'messages': chat})}\n" * 16)
    return file


def main(target: str, rows: str, output_dir: str, steps: str) -> None:
    """Train it, and load what was saved."""
    options = {"max_steps": int(steps), "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    train(ParallelSpecTraining, target=target, train_file=rows, output_dir=output_dir, **options)
    drafter = AutoDrafter.from_pretrained(output_dir)
    print(
        f"{type(drafter).__name__} in {output_dir}: target.generate(..., assistant_model=drafter)"
    )


if __name__ == "__main__":
    if "--help" in sys.argv:
        sys.exit(print(__doc__))
    folder = Path(mkdtemp())
    main(
        *(
            sys.argv[1:]
            or (str(FAMILY / "target"), str(some_rows(folder)), str(folder / "drafter"), "3")
        )
    )
