"""Edit a source file with drafts that are copied from it: what does not change costs next to
nothing.

python examples/edit_file.py                     # the embedded family, and a file that it knows how
to write python examples/edit_file.py Qwen/Qwen2.5-Coder-7B-Instruct shop.py "Rename the argument
prices to costs." > shop-new.py
"""

import sys
from difflib import unified_diff
from pathlib import Path
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paradraft import Memory, NgramDrafter
from hf_paradraft.demo import FAMILY

SOURCE = '''def get_over_5(points):
    """Return the first of the points that is greater than 5, times 2, or None."""
    for point in points:
        if point > 5:
            return point * 2
    return None
'''
# The family writes functions by their descriptions, and knows no other way to edit one.
WISH = (
    "Write in Python:\nget_over_7(points): Return the first of the points that is greater than 7, "
    "times 3, or None, with a loop."
)


def main(target_name: str, source: str, question: str) -> None:
    """Print the new file; how it came about, and what changed, on standard error."""
    tokenizer = AutoTokenizer.from_pretrained(target_name)
    dtype = "auto" if torch.cuda.is_available() else torch.float32
    target = AutoModelForCausalLM.from_pretrained(target_name, dtype=dtype)
    memory = Memory()
    memory.add(tokenizer(source, add_special_tokens=False)["input_ids"])
    copier = NgramDrafter(memory=memory)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    ).to(target.device)
    for name, drafter in (("plain", None), ("copied", copier)):
        begun = perf_counter()
        out = target.generate(
            **inputs, do_sample=False, max_new_tokens=len(source) + 64, assistant_model=drafter
        )
        print(f"{name}: {perf_counter() - begun:.2f} s", file=sys.stderr)
    text = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    lines = unified_diff(
        source.splitlines(), text.splitlines(), "before", "after", lineterm="", n=0
    )
    print("\n".join(lines), copier.last_stats, sep="\n\n", file=sys.stderr)
    print(text)


if __name__ == "__main__":
    if "--help" in sys.argv:
        print(__doc__)
    elif len(sys.argv) == 4:
        model, file, wish = sys.argv[1:]
        before = Path(file).read_text()
        main(model, before, f"{wish} Answer with the whole file and nothing else.\n\n{before}")
    else:
        main(str(FAMILY / "target"), SOURCE, WISH)
