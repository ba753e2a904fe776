"""Generate with a drafter: the same text, several times faster.

python examples/generate.py                       # the embedded family: no download
python examples/generate.py Qwen/Qwen2.5-7B-Instruct amd/PARD-Qwen2.5-0.5B "Write a haiku."
"""

import sys
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paradraft import AutoDrafter
from hf_paradraft.demo import FAMILY

QUESTION = (
    "1. Write 6 euros and 70 cents in cents.\n2. The exam is 2 days after 31 July. Which date is "
    "the exam?"
)
EMBEDDED = [str(FAMILY / "target"), str(FAMILY / "pard"), QUESTION]


def main(target_name: str, drafter_name: str, question: str) -> None:
    """Answer a question twice."""
    tokenizer = AutoTokenizer.from_pretrained(target_name)
    dtype = "auto" if torch.cuda.is_available() else torch.float32  # which every CPU is fast at
    target = AutoModelForCausalLM.from_pretrained(target_name, dtype=dtype)
    drafter = AutoDrafter.from_pretrained(drafter_name, dtype=dtype)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    ).to(target.device)
    for name, options in (("plain", {}), ("drafted", {"assistant_model": drafter})):
        begun = perf_counter()
        out = target.generate(**inputs, do_sample=False, max_new_tokens=128, **options)
        text = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"{name}, {perf_counter() - begun:.2f} s: {text}")
    print(drafter.last_stats)


if __name__ == "__main__":
    if "--help" in sys.argv:
        sys.exit(print(__doc__))
    main(*(sys.argv[1:] or EMBEDDED))
