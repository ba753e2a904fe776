"""Others who make `generate` faster on transformers, beside this library: the same target, drafter,
prompts and process.

pip install 'transformers==5.23.0' economize==0.3.2 flashspec==0.3.1      # beside hf-paradraft, in
an environment of their own python examples/peers.py                                 # the embedded
family, two prompts of each of six kinds python examples/peers.py --target DIR --draft DIR --prompts
prompts.jsonl --dtype bfloat16

Fair means here: every library with the settings that it begins with, and economize with the
confidence at which transformers ends a draft (0.4) and cycles of 4 and 12, of which the better one
counts; batch 1, greedy, one thread; each prompt by all in turn, after one that warms them up.
"""

import itertools
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import economize
import torch
from economize.techniques.draft_model import DraftModelConfig
from economize.techniques.lookup import LookupConfig
from flashspec import FlashSpecConfig, SamplingConfig, SpeculativeEngine
from flashspec.engine import HuggingFaceDrafter, TargetModel
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from hf_paradraft import AutoDrafter, AutoregressiveDrafter, NgramDrafter
from hf_paradraft.demo import FAMILY


@dataclass
class Options:
    """Of this comparison.

    Attributes:
        target, draft: a model, and a small one of its kind.
        taught: the small one as a PARD drafter, or any other drafter for the target.
        prompts: JSON lines with `messages`; default: the family's own questions.
        dtype: of all models.
        tokens: new ones, at most.
    """

    target: str = str(FAMILY / "target")
    draft: str = str(FAMILY / "draft")
    taught: str = str(FAMILY / "pard")
    prompts: str | None = None
    dtype: str = "float32"
    tokens: int = 96


def ways(options: Options) -> dict:
    """Make a function of each way to generate: from ids `(1, n)` to the new ones, a list."""
    dtype, cpu = getattr(torch, options.dtype), torch.device("cpu")

    def load(name: str):
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()

    target, small = load(options.target), load(options.draft)
    common = {"do_sample": False, "max_new_tokens": options.tokens}

    def by_generate(model, **more):
        return lambda ids: model.generate(ids, **common, **more)[0, ids.shape[1] :].tolist()

    def by_economize(config, cycle: int, confidence: float | None = None):
        model = economize.apply(load(options.target), config)
        decoding = economize.DecodeConfig(cycle_length=cycle, min_confidence=confidence)
        return lambda ids: model.generate(ids, **common, decoding=decoding)[
            0, ids.shape[1] :
        ].tolist()

    engine = SpeculativeEngine(
        FlashSpecConfig(device="cpu", sampling=SamplingConfig(temperature=0.0)),
        [HuggingFaceDrafter(options.draft, cpu, dtype, model=load(options.draft))],
        TargetModel(options.target, cpu, dtype, model=load(options.target)),
    )

    def by_flashspec(ids):
        result = engine.generate(ids, max_new_tokens=options.tokens)
        return result.output_ids[0, : result.n_tokens_generated].tolist()

    draft = DraftModelConfig(model=options.draft, dtype=options.dtype)
    return {
        "plain": by_generate(target),
        "transformers, small model": by_generate(target, assistant_model=small),
        "transformers, prompt lookup": by_generate(target, prompt_lookup_num_tokens=10),
        "economize, small model, cycles of 4": by_economize(draft, 4, 0.4),
        "economize, small model, cycles of 12": by_economize(draft, 12, 0.4),
        "economize, lookup": by_economize(LookupConfig(), 10),
        "flashspec, small model": by_flashspec,
        "hf_paradraft, small model": by_generate(
            target, assistant_model=AutoregressiveDrafter(small)
        ),
        "hf_paradraft, n-grams": by_generate(target, assistant_model=NgramDrafter()),
        "hf_paradraft, taught": by_generate(
            target, assistant_model=AutoDrafter.from_pretrained(options.taught, dtype=dtype)
        ),
    }


def questions(file: str | None) -> list:
    """Read prompts, or take two of the family's own of each kind."""
    path = Path(file) if file else FAMILY.parent / "questions.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if file:
        return [
            [turn for turn in row["messages"] if turn["role"] != "assistant"][:1] for row in rows
        ]
    kinds = itertools.groupby(rows, key=lambda row: row["category"])
    return [
        [{"role": "user", "content": row["turns"][0]}]
        for _, kind in kinds
        for row in list(kind)[:2]
    ]


def main(options: Options) -> None:
    """Let all answer every prompt, and print the medians."""
    torch.set_num_threads(1)
    tokenizer, used = AutoTokenizer.from_pretrained(options.target), ways(options)
    seconds, same = {name: [] for name in used}, dict.fromkeys(used, 0)
    prompts = questions(options.prompts)
    for number, messages in enumerate([prompts[0], *prompts]):
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        texts = {}
        for name, generate in used.items():
            begun = time.perf_counter()
            texts[name] = generate(ids)
            if number:  # the first warms up
                seconds[name].append(time.perf_counter() - begun)
                same[name] += texts[name] == texts["plain"]
    for name, taken in seconds.items():
        ratios = sorted(plain / own for plain, own in zip(seconds["plain"], taken, strict=True))
        quartiles = f"{ratios[len(ratios) // 4]:.2f}–{ratios[3 * len(ratios) // 4]:.2f}"
        whole = sum(seconds["plain"]) / sum(taken)
        print(
            f"{name:38} {whole:.2f} in all, median {median(ratios):.2f} ({quartiles}), equal "
            f"{same[name]} of {len(taken)}"
        )


if __name__ == "__main__":
    logging.getLogger("transformers").setLevel(logging.ERROR)
    main(*HfArgumentParser(Options).parse_args_into_dataclasses())
