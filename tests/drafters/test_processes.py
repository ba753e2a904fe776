"""A training step is the same whether its texts are read at once, one part after the other, or by
two processes over gloo.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_tokenizer, tiny_model

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import torch
from trained import train_dspark, train_eagle3, train_pard, train_parallelspec
for run in sys.argv[1:]:
    out, batch, parts = run.split(",")
    # By SGD without clipping, so that steps show how large a gradient is.
    options = {"max_steps": 3, "max_length": 64, "learning_rate": 0.1, "seed": 3, "use_cpu": True,
               "per_device_train_batch_size": int(batch), "gradient_accumulation_steps": int(parts),
               "lr_scheduler_type": "constant", "save_strategy": "no", "bf16": False,
               "optim": "sgd", "max_grad_norm": 0.0}
    train_pard("small", "rows.jsonl", out + "/pard", **options)
    options |= {"eval_file": "one.jsonl" if out == "two" else None}
    kinds = {"parallelspec": train_parallelspec, "dspark": train_dspark, "eagle3": train_eagle3}
    for name, train in kinds.items():
        options |= {"cache_dir": f"{out}/states-{name}"}
        train("target", "rows.jsonl", f"{out}/{name}", **options)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()  # one that just leaves may abort
"""


@pytest.mark.nightly
def test_parts_and_processes_train_what_one_does(folder):
    """The same samples in every step, the same rows and anchors of each, the same mean over all
    that is learned; one saves.
    """
    tiny_model("llama", num_hidden_layers=8, initializer_range=0.15).save_pretrained(
        folder / "target"
    )
    tiny_model("llama", seed=3, initializer_range=0.05).save_pretrained(folder / "small")
    make_tokenizer().save_pretrained(folder / "small")
    (folder / "one.jsonl").write_text((folder / "some.jsonl").read_text().splitlines()[0])
    (folder / "train.py").write_text(SCRIPT)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }
    two = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "0",
        "--standalone",
    ]
    for words in (
        [sys.executable, "train.py", "one,4,1", "parts,2,2"],
        [*two, "train.py", "two,2,1"],
    ):
        result = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr[-3000:]
    for kind in ("pard", "parallelspec", "dspark", "eagle3"):
        weights, *others = (
            load_file(folder / out / kind / "model.safetensors") for out in ("one", "parts", "two")
        )
        for other in others:
            for name, tensor in weights.items():
                torch.testing.assert_close(tensor, other[name], rtol=1e-3, atol=2e-5)
        states = [
            sorted(file.name for file in (folder / out).glob(f"states-{kind}/*"))
            for out in ("one", "parts", "two")
        ]
        assert states[0] == states[1] == states[2]
