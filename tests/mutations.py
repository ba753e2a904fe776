"""Small mistakes, sown one at a time into a copy of the library: each has to turn a test red.

`make mutations` runs all of them, some ten minutes; `python tests/mutations.py cache` those whose
file has the word in its name.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATIENCE = 600  # seconds
PYTEST = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "once"]
LOSSLESS = ["tests/decoding/test_lossless.py"]
BATCHES = ["tests/decoding/test_batches.py"]
CACHES = [*LOSSLESS, "tests/decoding/test_verify.py"]
NOISE = ["tests/decoding/test_noise.py"]
SAMPLING = ["tests/decoding/test_sampling.py"]
JOINED = ["tests/decoding/test_continuous.py", "tests/decoding/test_batch.py"]
LAYOUTS = ["tests/drafters/test_published_logits.py"]
# File, what stands there, what is sown, and what has to notice it.
MUTATIONS = [
    (
        "decoding/accept.py",
        "raw = logits[node + 1 : node + 2].to(",
        "raw = logits[max(0, node) : max(0, node) + 1].to(",
        LOSSLESS,
    ),
    (
        "decoding/accept.py",
        "raw = logits[node + 1 : node + 2]\n",
        "raw = logits[max(0, node) : max(0, node) + 1]\n",
        LOSSLESS,
    ),
    (
        "decoding/accept.py",
        "room.new_tensor([choices[node + 1]",
        "room.new_tensor([choices[node]",
        LOSSLESS,
    ),
    ("decoding/accept.py", "if draft.token_ids[child] == token), None", "), None", LOSSLESS),
    ("decoding/accept.py", "buffer[0, length] = token", "buffer[0, length - 1] = token", LOSSLESS),
    (
        "decoding/sequence.py",
        "outcome.num_read = len(outcome.accepted)",
        "outcome.num_read = len(outcome.accepted) + 1",
        ["tests/decoding/test_callers_cache.py"],
    ),
    (
        "decoding/verify.py",
        "last[row, :count] = maxsize",
        "last[row, :size] = maxsize",
        ["tests/decoding/test_batches.py"],
    ),
    ("decoding/verify.py", "parent + count - 1 for parent", "parent + count for parent", CACHES),
    ("decoding/verify.py", "node + rows for node in path", "node for node in path", CACHES),
    (
        "decoding/verify.py",
        "logits[:, -size - 1 :]",
        "logits[:, : size + 1]",
        ["tests/integration/test_foreign_code.py"],
    ),
    ("decoding/verify.py", "end = ids.shape[1] - 1", "end = ids.shape[1] - 2", LOSSLESS),
    (
        "decoding/cache.py",
        "if len(entries) < written",
        "if len(entries) < written - 1",
        ["tests/decoding/test_recurrent.py"],
    ),
    (
        "decoding/cache.py",
        "(row, begin + entry, length + offset)",
        "(row, begin + offset, length + offset)",
        CACHES,
    ),
    ("decoding/cache.py", "if begin + entry != length + offset", "if entry != offset", BATCHES),
    (
        "decoding/cache.py",
        "kind.crop(layer, self.end - written)",
        "kind.crop(layer, self.end - written + 1)",
        [*CACHES, "tests/decoding/test_targets.py", "tests/decoding/test_recurrent.py"],
    ),
    (
        "decoding/cache.py",
        "fill_(self.end)",
        "fill_(written)",
        [*BATCHES, "tests/decoding/test_compiled.py"],
    ),
    (
        "decoding/cache.py",
        "state[rows] = saved[key][rows]",
        "state[rows] = state[rows]",
        ["tests/decoding/test_recurrent.py"],
    ),
    (
        "decoding/tree_attention.py",
        "> query_positions[:, :, None] - window",
        ">= query_positions[:, :, None] - window",
        CACHES,
    ),
    ("decoding/tree_attention.py", "depths[parent + 1] + 1", "row", BATCHES),
    (
        "decoding/tree_attention.py",
        "sees[row] |= sees[parent + 1]",
        "sees[row, :row] = True",
        BATCHES,
    ),
    ("decoding/tree_attention.py", "known = slots < ends", "known = slots <= ends", BATCHES),
    ("decoding/joining.py", "slots - states.shape[2]", "slots - states.shape[2] + 1", JOINED),
    ("decoding/joining.py", "attention.offsets[rows] + count", "attention.offsets[rows]", JOINED),
    (
        "decoding/joining.py",
        "sequence.length - 1 - begin",
        "sequence.length - begin",
        ["tests/serve/test_scheduler.py"],
    ),
    (
        "decoding/growing.py",
        "self.read[self.parents[node]]",
        "-1",
        ["tests/drafters/test_kinds.py", "tests/drafters/test_small_kinds.py"],
    ),
    (
        "decoding/budget.py",
        "tokens - rate * seconds",
        "tokens - 0.5 * rate * seconds",
        ["tests/decoding/test_budget.py"],
    ),
    (
        "rules/same_seed.py",
        "length - self.prompt_length + distance",
        "length - self.prompt_length + distance + 1",
        NOISE,
    ),
    (
        "rules/same_seed.py",
        "step = max(map(self._step, self.sequences))",
        "step = min(map(self._step, self.sequences))",
        NOISE,
    ),
    ("rules/same_seed.py", "self.state_index = min(\n", "self.state_index = max(\n", NOISE),
    (
        "rules/same_seed.py",
        "> self.state_index:\n            self.generator.set_state(self.states[-1])",
        "> self.state_index:\n            pass",
        NOISE,
    ),
    ("rules/same_seed.py", "        if ahead:\n", "        if False:\n", NOISE),
    ("rules/same_seed.py", "block[index].clone()", "block[0].clone()", NOISE),
    ("rules/rejection.py", "q[token] = 0", "q[token] = q[token]", SAMPLING),
    ("rules/rejection.py", ".clamp(max=1)", ".clamp(max=2)", SAMPLING),
    ("rules/rejection.py", "residual = (p - q)", "residual = (p - 0 * q)", SAMPLING),
    (
        "copies/lookup.py",
        "counts[0] += index < right",
        "counts[0] += index <= right",
        ["tests/decoding/test_lookup.py", "tests/decoding/test_memory.py"],
    ),
    ("drafters/formats/fields.py", "offset=-1", "offset=0", LAYOUTS),
    (
        "drafters/blocks/config.py",
        "key + 1 for key in self.features",
        "key for key in self.features",
        ["tests/drafters/test_published_loading.py"],
    ),
    (
        "drafters/eagle3/config.py",
        "key + 1 for key in drafter.features",
        "key for key in drafter.features",
        ["tests/drafters/test_published_loading.py"],
    ),
    ("drafters/formats/fields.py", "return not anchor", "return bool(anchor)", LAYOUTS),
    (
        "drafters/formats/publishers.py",
        "return not (_dspark(said)",
        "return (_dspark(said)",
        LAYOUTS,
    ),
    (
        "drafters/formats/publishers.py",
        "(layers - 4)",
        "(layers - 3)",
        [*LAYOUTS, "tests/drafters/test_published_configs.py"],
    ),
    (
        "drafters/formats/publishers.py",
        "from_anchor(said) is False",
        "from_anchor(said) is True",
        LAYOUTS,
    ),
    (
        "drafters/formats/files.py",
        "torch.arange(1, head_dim, 2)",
        "torch.arange(0, head_dim, 2)",
        LAYOUTS,
    ),
]


def noticed(root: Path, tests: list[str]) -> str | None:
    """Run what has to notice a mistake: the first test that fails, or None if all pass."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(root),
    }
    try:
        run = subprocess.run(
            [sys.executable, *PYTEST, *tests],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return f"nothing ends within {PATIENCE} seconds"
    if run.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::\S+)", run.stdout, re.M)
    return failed[1] if failed else sys.exit(f"No test has run: {run.stdout}{run.stderr}")


def main() -> None:
    """Sow all mistakes, or those in files of a name; fail where one is not noticed."""
    words = sys.argv[1:]
    chosen = [one for one in MUTATIONS if not words or any(word in one[0] for word in words)]
    gone = [
        f"{file} has no {old!r} any more: sow another mistake."
        for file, old, _, _ in chosen
        if old not in (ROOT / "hf_paradraft" / file).read_text()
    ]
    if gone:
        sys.exit("\n".join(gone))
    missed = 0
    with tempfile.TemporaryDirectory(prefix="paradraft-mutations-") as name:
        root = Path(name)
        for part in ("hf_paradraft", "tests", "hub_cards", "spaces"):
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", root)
        for file, old, new, tests in chosen:
            path = root / "hf_paradraft" / file
            text = path.read_text()
            path.write_text(text.replace(old, new))
            test = noticed(root, tests)
            path.write_text(text)
            missed += test is None
            sown = " ".join(f"{file}: {old} → {new}".split())
            print("GREEN" if test is None else "red  ", sown, test or "", sep="  ", flush=True)
    if missed:
        sys.exit(f"{missed} mistakes were not noticed.")


if __name__ == "__main__":
    main()
