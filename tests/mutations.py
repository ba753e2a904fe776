"""Small mistakes, sown one at a time into a copy of the library: each has to turn a test red.

`make mutations` runs all of them, some ten minutes; `python tests/mutations.py cache` those whose
file has the word in its name.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
GOLDEN = ["-m", "tests.golden.rounds", "--only"]
PYTEST = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
# File, what stands there, what is sown, and what has to notice it.
MUTATIONS = [
    (
        "decoding/accept.py",
        "logits[node + 1 : node + 2]",
        "logits[max(0, node) : max(0, node) + 1]",
        [*GOLDEN, "pard"],
    ),
    (
        "decoding/accept.py",
        "room.new_tensor([choices[node + 1]",
        "room.new_tensor([choices[node]",
        [*GOLDEN, "pard"],
    ),
    (
        "decoding/accept.py",
        "if draft.token_ids[child] == token), None)",
        "), None)",
        [*GOLDEN, "pard"],
    ),
    (
        "decoding/sequence.py",
        "accepted.num_read = len(path)",
        "accepted.num_read = len(path) + 1",
        [*PYTEST, "tests/decoding/test_call.py"],
    ),
    (
        "decoding/verify.py",
        "positions[row, 0 if ended else count :]",
        "positions[row, 0:]",
        [*PYTEST, "tests/decoding/test_refusals.py"],
    ),
    (
        "decoding/verify.py",
        "parent + count - 1 for parent",
        "parent + count for parent",
        [*GOLDEN, "pard"],
    ),
    (
        "decoding/verify.py",
        "if len(kept) < self.written",
        "if len(kept) < self.written - 1",
        [*PYTEST, "tests/decoding/test_recurrent.py"],
    ),
    (
        "decoding/cache.py",
        "(row, begin + entry, length + offset)",
        "(row, begin + offset, length + offset)",
        [*GOLDEN, "pard"],
    ),
    (
        "decoding/cache.py",
        "DynamicLayer.crop(layer, self.end - written)",
        "DynamicLayer.crop(layer, self.end - written + 1)",
        [*GOLDEN, "pard"],
    ),
    (
        "decoding/recurrent.py",
        "state[rows] = saved[key][rows]",
        "state[rows] = state[rows]",
        [*PYTEST, "tests/decoding/test_recurrent.py"],
    ),
    (
        "decoding/tree_attention.py",
        "> query_positions[:, :, None] - window",
        ">= query_positions[:, :, None] - window",
        [*PYTEST, "tests/decoding/test_lossless.py", "tests/decoding/test_verify.py"],
    ),
    (
        "decoding/joining.py",
        "slots - states.shape[2]",
        "slots - states.shape[2] + 1",
        [*GOLDEN, "pard"],
    ),
    ("decoding/growing.py", "self.indices[self.parents[node]]", "-1", [*GOLDEN, "autoregressive"]),
    (
        "decoding/budget.py",
        "tokens - rate * seconds",
        "tokens - 0.5 * rate * seconds",
        [*GOLDEN, "pard"],
    ),
    (
        "rules/noise.py",
        "length - self.begin + distance",
        "length - self.begin + distance + 1",
        [*GOLDEN, "pard"],
    ),
    (
        "rules/rejection.py",
        "q[token] = 0",
        "q[token] = q[token]",
        [*PYTEST, "tests/decoding/test_sampling.py"],
    ),
    (
        "copies/lookup.py",
        "counts[0] += index < right",
        "counts[0] += index <= right",
        [*PYTEST, "tests/decoding/test_lookup.py", "tests/decoding/test_memory.py"],
    ),
    (
        "drafters/formats/speculators.py",
        "offset=-1",
        "offset=0",
        [*PYTEST, "tests/drafters/test_published_logits.py"],
    ),
    (
        "drafters/formats/zlab.py",
        "return not (_dspark(said)",
        "return (_dspark(said)",
        [*PYTEST, "tests/drafters/test_published_logits.py"],
    ),
    (
        "drafters/formats/tensors.py",
        "torch.arange(1, head_dim, 2)",
        "torch.arange(0, head_dim, 2)",
        [*PYTEST, "tests/drafters/test_published_logits.py"],
    ),
]


def turns_red(root: Path, file: str, old: str, new: str, noticed_by: list[str]) -> bool:
    """Sow a mistake, run what has to notice it, and mend it again."""
    path = root / "hf_paradraft" / file
    text = path.read_text()
    if text.count(old) < 1:
        sys.exit(f"{file} has no {old!r} any more: sow another mistake.")
    path.write_text(text.replace(old, new))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        run = subprocess.run(
            [sys.executable, *noticed_by],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.write_text(text)
    return run.returncode != 0


def main() -> None:
    """Sow all mistakes, or those in files of a name; fail where one is not noticed."""
    words, missed = sys.argv[1:], []
    with tempfile.TemporaryDirectory(prefix="paradraft-mutations-") as name:
        root = Path(name)
        for part in ("hf_paradraft", "tests", "hub_cards", "spaces"):
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", root)
        for file, old, new, noticed_by in MUTATIONS:
            if words and not any(word in file for word in words):
                continue
            red = turns_red(root, file, old, new, noticed_by)
            print(f"{'red  ' if red else 'GREEN'}  {file}: {old}  →  {new}", flush=True)
            missed += [] if red else [file]
    if missed:
        sys.exit(f"{len(missed)} mistakes were not noticed.")


if __name__ == "__main__":
    main()
