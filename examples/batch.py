"""Sample several answers to several prompts at once: the seed's own texts, as plain `generate` has
them.

python examples/batch.py
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paradraft import AutoDrafter
from hf_paradraft.demo import FAMILY

QUESTIONS = (
    "1. Write 6 euros and 70 cents in cents.",
    "1. The exam is 2 days after 31 July. Which date is the exam?",
)


def main() -> None:
    """Two prompts of different lengths, three answers each."""
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target", padding_side="left")
    target = AutoModelForCausalLM.from_pretrained(FAMILY / "target", dtype=torch.float32)
    drafter = AutoDrafter.from_pretrained(FAMILY / "pard", dtype=torch.float32)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    options = {
        "do_sample": True,
        "temperature": 0.8,
        "num_return_sequences": 3,
        "max_new_tokens": 48,
    }
    texts = []
    for more in ({}, {"assistant_model": drafter}):
        torch.manual_seed(0)
        out = target.generate(**inputs, **options, **more)
        texts.append(
            tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    assert texts[0] == texts[1]
    print("\n".join(texts[1]))
    print(drafter.last_stats)


if __name__ == "__main__":
    main()
