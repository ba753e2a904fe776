"""Golden rounds: what each round drafts, accepts and emits, for kinds × rules × shapes × sequences,
on a clock of its own.

Time goes by in forwards alone, by their rows, so what is decided by it depends on no machine.
`python -m tests.golden.rounds` compares with what was recorded, `--record` records anew, and
`--show CASE` prints the rounds of a case. `--only` and `--third` choose cases.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from itertools import product
from pathlib import Path

HOME = tempfile.TemporaryDirectory(prefix="paradraft-golden-")
os.environ.update(HF_HOME=HOME.name, HF_HUB_OFFLINE="1")
# before torch: near-ties fall alike on every CPU
os.environ.update(ATEN_CPU_CAPABILITY="avx2", OMP_NUM_THREADS="1")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT.parent)]

import torch  # noqa: E402
from lossless import left_padded  # noqa: E402
from tiny import MASK, near_copy, tiny_model, with_noise_adapter, with_prompts  # noqa: E402

import hf_paradraft  # noqa: E402
from hf_paradraft.continuous import begin  # noqa: E402
from hf_paradraft.decoding.budget import RowLatency  # noqa: E402
from hf_paradraft.decoding.joining import join, leave  # noqa: E402
from hf_paradraft.decoding.loop import step  # noqa: E402

RECORDED = Path(__file__).with_name("rounds.json")
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [5, 6], [7, 8, 9, 7, 8]]
NEW = 24
KINDS = {
    "pard": lambda target: near_copy(target, 0.05),
    "autoregressive": lambda target: hf_paradraft.AutoregressiveDrafter(near_copy(target, 0.05)),
    "ppd": lambda target: hf_paradraft.PpdDrafter.from_model(
        with_prompts(target, 2, calibrated=True)
    ),
    "prompted": lambda target: hf_paradraft.PromptedDrafter(
        with_prompts(near_copy(target, 0.05), 2)
    ),
    "uno": lambda target: with_noise_adapter(target, std=0.05)[1],
    "n-grams": lambda target: hf_paradraft.NgramDrafter(),
    "dspark": lambda target: hf_paradraft.DSparkDrafter.from_target(
        target, MASK, 1, 6, 2, markov_rank=4
    ),
    "dflash": lambda target: hf_paradraft.DFlashDrafter.from_target(target, MASK, 1, 7, 2),
    "medusa": lambda target: hf_paradraft.ParallelSpecDrafter.from_target(target, "medusa", 5),
    "eagle": lambda target: hf_paradraft.ParallelSpecDrafter.from_target(target, "eagle", 5),
    "eagle3": lambda target: hf_paradraft.Eagle3Drafter.from_target(target),
}
RULES = {"greedy": False, "sample_match": True, "rejection": True, "typical": True}
OPTIONS = (
    list(KINDS),
    list(RULES),
    ["chain", "9", "auto"],
    ["one", "three", "joined"],
    ["free", "adaptive"],
    ["", "copies"],
)
CASES = [
    "/".join(case)
    for case in product(*OPTIONS)
    if not (
        case[5]
        and (
            case[0] not in ("pard", "dflash", "autoregressive", "n-grams") or case[1] == "rejection"
        )
    )
    and not (case[4] == "adaptive" and case[1] in ("rejection", "typical"))
    and not (case[3] == "joined" and case[1] in ("rejection", "typical"))
]


def third_of(case):
    """In which third a case is: options take turns, so any two of them meet in each third."""
    chosen = zip(OPTIONS, case.split("/"), strict=True)
    return sum(options.index(value) for options, value in chosen) % 3


class Clock:
    """Seconds that pass in forwards alone: a fixed part, and one for each row."""

    __module__ = (
        "hf_paradraft.golden"  # a hook of the library's own: the target is as its class made it
    )

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def hook(self, fixed, by_row):
        def count(module, args, kwargs):
            tensors = [kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args]
            read = next(tensor for tensor in tensors if tensor is not None)
            self.now += fixed + by_row * read.shape[0] * read.shape[1]

        count.__module__ = self.__module__
        return count


def set_clock(clock):
    """Let everything in the library that reads the time read this clock."""
    for name, module in list(sys.modules.items()):
        if name.startswith("hf_paradraft") and hasattr(module, "perf_counter"):
            module.perf_counter = clock
    rows = [1, 2, 4, 8, 16, 32, 64, 128]
    fixed = RowLatency(rows, [0.010 + 0.0004 * count for count in rows])
    hf_paradraft.admission.row_latency = lambda model: fixed


def trace_of(case):
    """Run a case: for each call its ids, and (row, drafted, parents, accepted, emitted) of each
    round and sequence.
    """
    kind, rule, shape, sequences, pace, copies = case.split("/")
    target = tiny_model(num_hidden_layers=7 if kind == "eagle3" else 2)
    drafter, clock = KINDS[kind](target), Clock()
    size = {"chain": None, "9": 9, "auto": "auto"}[shape]
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        2 if kind in ("ppd", "prompted") else 5,
        size,
        rule,
        never_slower=pace == "adaptive",
        prompt_lookup=bool(copies),
        trace=True,
    )
    target.register_forward_pre_hook(clock.hook(0.010, 0.0004), with_kwargs=True)
    small = getattr(drafter, "model", drafter)
    network = getattr(small, "stack", small)
    if isinstance(network, torch.nn.Module) and network is not target and kind != "ppd":
        network.register_forward_pre_hook(clock.hook(0.002, 0.0001), with_kwargs=True)
    set_clock(clock)
    options = {"max_new_tokens": NEW, "do_sample": RULES[rule], "eos_token_id": None}
    if RULES[rule]:
        options["temperature"] = 0.7
    torch.manual_seed(7)
    if sequences == "joined":
        return joined(target, drafter, options)
    prompts = PROMPTS[:1] if sequences == "one" else PROMPTS
    made = target.generate(
        **left_padded(prompts), assistant_model=drafter, return_dict_in_generate=True, **options
    )
    return [call_of(made.sequences, made.speculation)]


def joined(target, drafter, options):
    """Run three calls in one batch, which begin one after the other."""
    batch, calls = None, []
    for seed, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        generator = torch.Generator().manual_seed(seed)
        joining = begin(
            target,
            ids,
            drafter,
            generator,
            attention_mask=torch.ones_like(ids),
            pad_token_id=0,
            **options,
        )
        calls += joining.calls
        while joining.read_piece():
            pass
        step(joining)
        if batch is None:
            batch = joining
        else:
            join(batch, joining)
        step(batch)
    while batch.sequences:
        step(batch)
        leave(batch)
    return [call_of(call.buffer[:, : call.sequences[0].length], call.stats) for call in calls]


def call_of(ids, stats):
    rounds = [
        [one.row, list(one.drafted), list(one.parents), one.accepted, one.emitted]
        for one in stats.trace
    ]
    return {"ids": ids.tolist(), "rounds": rounds}


def digest(trace):
    """What is recorded of a case: how many rounds it had, tokens drafted and accepted, and a hash
    of everything.
    """
    rounds = [one for call in trace for one in call["rounds"]]
    counts = len(rounds), sum(len(one[1]) for one in rounds), sum(len(one[3]) for one in rounds)
    return [*counts, hashlib.sha256(json.dumps(trace).encode()).hexdigest()[:12]]


def as_text(digests):
    """The file: one line for each case that there is, in the order of the cases."""
    lines = [
        f"{json.dumps(case)}: {json.dumps(digests[case])}" for case in CASES if case in digests
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--record", action="store_true", help="record anew; cases that are not chosen stay"
    )
    parser.add_argument(
        "--only", nargs="*", default=[""], help="cases that begin with one of these"
    )
    parser.add_argument(
        "--third", type=int, nargs="*", default=[0, 1, 2], help="cases of these thirds"
    )
    parser.add_argument("--show", help="print the rounds of a case")
    options = parser.parse_args()
    if options.show:
        for call in trace_of(options.show):
            print(call["ids"], *call["rounds"], sep="\n")
        return
    found = {
        case: digest(trace_of(case))
        for case in CASES
        if case.startswith(tuple(options.only)) and third_of(case) in options.third
    }
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if options.record:
        RECORDED.write_text(as_text(recorded | found))
        return
    differing = [
        f"{case}: {recorded.get(case)} was, {seen} is"
        for case, seen in found.items()
        if recorded.get(case) != seen
    ]
    print(
        *differing, f"{len(found) - len(differing)} of {len(found)} cases are as recorded", sep="\n"
    )
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
