"""Write a drafter: it guesses, the engine decides. This one knows the text of a form by heart.

python examples/own_drafter.py
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paradraft import Drafter, Drafting, GuessedTokens, Prefix, SpeculationConfig
from hf_paradraft.demo import FAMILY


class Known(Drafter, Drafting):
    """Guesses what follows in a text that is often asked for.

    Args:
        text: int64 `(n,)`.
    """

    def __init__(self, text: torch.LongTensor):
        self.text = text
        self.speculation_config = SpeculationConfig(num_draft_tokens=8, tree_size=None)

    def start_drafting(self, target, max_length: int) -> Drafting:
        """Itself: it has no state."""
        return self

    def propose(self, prefixes: list[Prefix]) -> list[GuessedTokens]:
        """What stands behind the last place in the text that ends like the prefix."""
        return [GuessedTokens(self.behind(prefix.ids[0, -2:], prefix.room)) for prefix in prefixes]

    def behind(self, ending: torch.LongTensor, room: int) -> torch.LongTensor:
        """`room` tokens at most."""
        places = (self.text.unfold(0, len(ending), 1) == ending).all(1).nonzero()
        begin = int(places[-1]) + len(ending) if len(places) else len(self.text)
        return self.text[begin : begin + room]


def main() -> None:
    """An answer that the drafter has seen before."""
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target")
    target = AutoModelForCausalLM.from_pretrained(FAMILY / "target", dtype=torch.float32)
    chat = [{"role": "user", "content": "1. Write 6 euros and 70 cents in cents."}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=48)
    drafter = Known(plain[0])
    out = target.generate(**inputs, do_sample=False, max_new_tokens=48, assistant_model=drafter)
    assert torch.equal(plain, out)
    print(drafter.last_stats)


if __name__ == "__main__":
    main()
