"""Build the embedded family from a seed: tokenizer, target, autoregressive parent, PARD drafter,
measurements.

`make family` runs it. Every stage resumes where it stopped, and a finished one is not run again.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.family.tasks import CATEGORIES, tasks
from hf_paradraft.drafters.pard.model import PardDrafter
from hf_paradraft.drafters.pard.training import PardTraining
from hf_paradraft.drafters.ppd.model import PpdDrafter
from hf_paradraft.drafters.ppd.training import PpdTraining
from hf_paradraft.hardware import fast_dtype
from hf_paradraft.training.answers import Target
from hf_paradraft.training.regenerate import regenerate
from hf_paradraft.training.run import train

from .corpus import MASK, Corpus, library_files, train_tokenizer
from .pretrain import answer_loss, grow, new_model, pretrain
from .quality import measure


@dataclass(frozen=True)
class Stage:
    """One pretraining run.

    Attributes:
        name: of its folder.
        start: the stage whose model it continues, or None for a new one.
        layers: of its model; more than its start has means growing.
        steps: of about 4,000 tokens each.
        lr: of Muon.
        decay: the share of the steps over which the learning rate falls to nothing.
        first_batch: where in the corpus it begins.
        weights: how many times as often as others a category is drawn.
    """

    name: str
    start: str | None
    layers: int
    steps: int
    lr: float
    decay: float
    first_batch: int
    weights: Mapping[str, int] = field(default_factory=dict)


HARDER = {"CSV": 4, "JSON": 2, "dates and units": 2}
HARDEST = {"CSV": 6, "JSON": 5}  # copying by position is learnt last
# Most of the target's learning happens while it has 4 layers, at a quarter of the cost; then it
# grows to 16, and to 24 at the end: eight times the drafter's, as in the papers' pairs.
STAGES = (
    Stage("target-4a", None, 4, 600, 0.02, 0.0, 0),
    Stage("target-4b", "target-4a", 4, 1200, 0.01, 0.3, 600),
    Stage("draft", None, 3, 450, 0.01, 0.5, 0),
    Stage("target-16", "target-4b", 16, 480, 0.008, 0.7, 1800, HARDER),
    Stage("target-16b", "target-16", 16, 3000, 0.008, 0.8, 2280, HARDER),
    Stage("target-16c", "target-16b", 16, 900, 0.005, 1.0, 5280, HARDEST),
    Stage("target-16d", "target-16c", 16, 1500, 0.008, 0.8, 6180, HARDEST),
    Stage("target", "target-16d", 24, 600, 0.006, 1.0, 7680, HARDEST),
)
# where the target is right, both are the same
REGENERATED_PER_CATEGORY, REFERENCES_PER_CATEGORY = (
    400,
    5000,
)
PARD_STEPS, PARD_DEPTHS = 2400, 16
PPD_STEPS, CALIBRATION_PER_CATEGORY = 300, 40


def build_stage(stage: Stage, tokenizer: PreTrainedTokenizerFast, work: Path, seed: int) -> None:
    """Train one stage, or do nothing if it is done."""
    folder = work / stage.name
    if (folder / "model.safetensors").exists():
        return
    torch.manual_seed(seed)
    if stage.start is None:
        model = new_model(tokenizer, stage.layers)
    else:
        model = LlamaForCausalLM.from_pretrained(work / stage.start, dtype=torch.float32)
        if model.config.num_hidden_layers != stage.layers:
            model = grow(model, tokenizer, stage.layers)
    corpus = Corpus(tokenizer, seed, weights=stage.weights)
    pretrain(model, corpus, folder, stage.steps, stage.lr, stage.decay, stage.first_batch)
    tokenizer.save_pretrained(folder)


def write_tasks(file: Path, seed: int, per_category: int, held_out: bool) -> Path:
    """Chats of one side of the split, categories in turn, as JSON lines."""
    streams = [tasks(name, seed, held_out) for name in CATEGORIES]
    with file.open("w") as lines:
        for _ in range(per_category):
            for task in map(next, streams):
                turns = [
                    {"role": "user", "content": task.prompt},
                    {"role": "assistant", "content": task.answer},
                ]
                lines.write(json.dumps({"messages": turns}) + "\n")
    return file


@torch.no_grad()
def library_loss(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, files: int = 40
) -> float:
    """Nats per token over the beginnings of held-out standard-library files."""
    losses = []
    for file in islice(library_files(held_out=True), files):
        ids = torch.tensor([tokenizer(file.read_text(errors="ignore")[:2000])["input_ids"][:256]])
        if ids.shape[1] > 8:
            losses.append(answer_loss(model, {"input_ids": ids, "labels": ids}).item())
    return sum(losses) / len(losses)


def export(source: Path, destination: Path, tokenizer: PreTrainedTokenizerFast, **record) -> None:
    """Copy a trained model as bfloat16 safetensors with its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, trust_remote_code=False
    )
    if record:
        model.config.paradraft = {**(getattr(model.config, "paradraft", None) or {}), **record}
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


def build(
    work_dir: Annotated[
        Path, typer.Option(help="Checkpoints and intermediate files; go on here after a stop.")
    ],
    output_dir: Annotated[
        Path,
        typer.Option(
            help="Gets target/, draft/ and pard/ in bfloat16, ppd/, ppd-draft/ and family.json."
        ),
    ],
    seed: int = 0,
) -> None:
    """Rebuild the embedded family. Takes hours on two cores."""
    work_dir.mkdir(parents=True, exist_ok=True)
    if not (work_dir / "tokenizer").exists():
        train_tokenizer(seed).save_pretrained(work_dir / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work_dir / "tokenizer")
    for stage in STAGES:
        build_stage(stage, tokenizer, work_dir, seed)
    target = LlamaForCausalLM.from_pretrained(work_dir / "target", dtype=fast_dtype()).eval()

    answers = work_dir / "answers.jsonl"
    questions = write_tasks(
        work_dir / "questions.jsonl", seed + 1, REGENERATED_PER_CATEGORY, held_out=False
    )
    regenerate(Target(target, tokenizer, 160, 192), questions, answers)
    references = write_tasks(
        work_dir / "references.jsonl", seed + 2, REFERENCES_PER_CATEGORY, held_out=False
    )
    lessons = work_dir / "lessons.jsonl"
    lessons.write_text(answers.read_text() + references.read_text())
    held_out = write_tasks(work_dir / "held_out.jsonl", seed, 10, held_out=True)
    if not (work_dir / "pard" / "model.safetensors").exists():
        train(
            PardTraining,
            model=work_dir / "draft",
            train_file=lessons,
            output_dir=work_dir / "pard",
            mask_token_id=tokenizer.convert_tokens_to_ids(MASK),
            eval_file=held_out,
            target=work_dir / "target",
            num_depths=PARD_DEPTHS,
            max_length=320,
            resume=(work_dir / "pard").exists(),
            max_steps=PARD_STEPS,
            per_device_train_batch_size=16,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=30,
            save_steps=100,
            bf16=fast_dtype() == torch.bfloat16,
            use_cpu=not torch.cuda.is_available(),  # or Trainer refuses bf16 there
            seed=seed,
        )
    # Calibration sees neither what prompts learn from nor what they are measured on.
    calibration = write_tasks(
        work_dir / "calibration.jsonl", seed + 3, CALIBRATION_PER_CATEGORY, held_out=False
    )
    for base, folder, num_prompts in (("target", "ppd", 3), ("draft", "ppd-draft", 7)):
        if not (work_dir / folder / "adapter_model.safetensors").exists():
            train(
                PpdTraining,
                target=work_dir / base,
                train_file=lessons,
                output_dir=work_dir / folder,
                eval_file=calibration,
                num_prompt_tokens=num_prompts,
                max_length=320,
                resume=(work_dir / folder).exists(),
                max_steps=PPD_STEPS,
                per_device_train_batch_size=16,
                save_steps=50,
                bf16=fast_dtype() == torch.bfloat16,
                use_cpu=not torch.cuda.is_available(),
                seed=seed,
            )
    record = {
        "stages": [asdict(stage) for stage in STAGES],
        "pard": PardDrafter.from_pretrained(work_dir / "pard").paradraft["training"],
        "ppd": {
            folder: json.loads((work_dir / folder / "paradraft.json").read_text())["training"]
            for folder in ("ppd", "ppd-draft")
        },
        "answers_by_target": REGENERATED_PER_CATEGORY * len(CATEGORIES),
        "held_out_library_loss": library_loss(target, tokenizer),
        "held_out_tasks": {
            name: asdict(quality) for name, quality in measure(target, tokenizer, 100).items()
        },
        "parameters": {
            name: LlamaForCausalLM.from_pretrained(work_dir / folder).num_parameters()
            for name, folder in (("target", "target"), ("draft", "draft"), ("pard", "pard"))
        },
    }
    for name, folder in (("target", "target"), ("draft", "draft"), ("pard", "pard")):
        export(work_dir / folder, output_dir / name, tokenizer)
    for folder in ("ppd", "ppd-draft"):
        adapter = PpdDrafter.from_pretrained(work_dir / folder)
        adapter.config.base_model_name_or_path = None  # a path that means nothing elsewhere
        adapter.save_pretrained(output_dir / folder)
    (output_dir / "family.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["held_out_tasks"], indent=1))


if __name__ == "__main__":
    typer.run(build)
