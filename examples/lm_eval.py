"""lm-evaluation-harness with a drafter that is set: the same answers and the same results, sooner.

pip install 'hf-paradraft[eval]' python examples/lm_eval.py                                   # the
embedded family, eight word problems python examples/lm_eval.py Qwen/Qwen2.5-7B-Instruct
amd/PARD-Qwen2.5-0.5B ifeval 100
"""

import json
import os
import sys
from pathlib import Path
from tempfile import mkdtemp
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paradraft import AutoDrafter, set_drafter
from hf_paradraft.demo import FAMILY

STORY = (
    "{0} has {2} {1} in a box. Then {0} buys {3} more {1}. Then {0} loses {4} {1}. Then {0} finds "
    "{5} {1}. Count the {1}."
)
PROBLEMS = [
    (STORY.format(name, goods, *numbers), numbers[0] + numbers[1] - numbers[2] + numbers[3], goods)
    for name, goods, numbers in zip(
        "Mia Tom Ana Ben Eva Leo Zoe "
        "Max".split(), "books coins pens stamps shells cards keys eggs".split(),
        ((12, 8, 3, 5), (31, 5, 9, 2), (17, 9, 4, 6), (44, 3, 8, 7), (25, 7, 2, 9), (18, 6, 5, 3),
        (60, 4, 7, 8), (29, 2, 6, 4)),
        strict=True,
    )
]  # fmt: skip


def word_problems() -> dict:
    """Describe a task of this file's own, whose answers have to end as they should; any that the
    harness has works as well.
    """
    file = Path(mkdtemp()) / "problems.jsonl"
    rows = [
        {"prompt": prompt, "answer": f"Answer: {total} {goods}"}
        for prompt, total, goods in PROBLEMS
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return {
        "task": "word_problems",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["<|endoftext|>"], "max_gen_toks": 96, "do_sample": False},
        "filter_list": [{"name": "last line", "filter": [
            {"function": "regex", "regex_pattern": "(Answer: .*)"}, {"function": "take_first"},
        ]}],
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip


def main(target_name: str, drafter_name: str, task: str | dict, limit: str | None = None) -> None:
    """Evaluate plainly and with the drafter, and compare."""
    from lm_eval import simple_evaluate  # behind the change of sys.path below
    from lm_eval.models.huggingface import HFLM

    tokenizer = AutoTokenizer.from_pretrained(target_name, padding_side="left")
    # where texts are equal, token for token
    dtype = "auto" if torch.cuda.is_available() else torch.float32
    target = AutoModelForCausalLM.from_pretrained(
        target_name, dtype=dtype, device_map="auto" if dtype == "auto" else None
    )
    drafter = AutoDrafter.from_pretrained(drafter_name, dtype=dtype)
    model = HFLM(pretrained=target, tokenizer=tokenizer, batch_size=4, device=str(target.device))
    answers = []
    for name, used in (("plain", None), ("drafted", drafter)):
        begun = perf_counter()
        with set_drafter(target, used):  # every call of generate inside
            results = simple_evaluate(
                model,
                tasks=[task],
                limit=None if limit is None else int(limit),
                apply_chat_template=True,
                bootstrap_iters=0,
            )
        (task_name,) = results["results"]
        answers.append([row["resps"] for row in results["samples"][task_name]])
        numbers = {
            key: float(value)
            for key, value in results["results"][task_name].items()
            if isinstance(value, float)
        }
        print(f"{name}, {perf_counter() - begun:.1f} s: {numbers}")
    print(
        "The same answers."
        if answers[0] == answers[1]
        else "Other answers: a dtype coarser than fp32 rounds near ties apart."
    )
    print(drafter.last_stats)


if __name__ == "__main__":
    if "--help" in sys.argv:
        sys.exit(print(__doc__))
    sys.path.pop(0)  # this folder, in which this file is called as the harness is
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(*(sys.argv[1:] or (str(FAMILY / "target"), str(FAMILY / "pard"), word_problems())))
