"""What conditional output dropping brings: speed and memory by sequence length, and an ablation
with τ.

`python examples/studies/dropping.py throughput --model …` and `… ablation --model … --target …
--train-file … --eval-file …` print Markdown tables.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated

import torch
import typer
from datasets import Dataset
from rich.console import Console
from torch import BoolTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainingArguments

from hf_paradraft.bench.measure import peak_memory, reset_peak_memory
from hf_paradraft.drafters.pard.model import PardDrafter
from hf_paradraft.drafters.pard.training import PardTrainer
from hf_paradraft.hardware import fast_dtype
from hf_paradraft.training.data import encode_rows
from hf_paradraft.training.rows import CodConfig, RowCollator
from hf_paradraft.training.source import load_rows
from hf_paradraft.training.target_training import acceptance

app = typer.Typer(help=__doc__)


class UnconditionalCollator(RowCollator):
    """Drops as many rows at each depth as COD does, but any: chains break."""

    def keep(self, seq_len: int, generator: torch.Generator) -> BoolTensor:
        """As many rows per depth as COD keeps, chosen without its condition."""
        keep = torch.zeros(self.cod.num_depths, seq_len, dtype=torch.bool)
        for depth, count in enumerate(super().keep(seq_len, generator).sum(1).tolist()):
            keep[depth, torch.randperm(seq_len, generator=generator)[:count]] = True
        return keep


VARIANTS = {
    "COD, r 0.7, r_min 0.2": (RowCollator, CodConfig(8, 0.7, 0.2)),
    "no dropping": (RowCollator, CodConfig(8, 1.0, 1.0)),
    "the same share dropped at random": (UnconditionalCollator, CodConfig(8, 0.7, 0.2)),
}


@app.command()
def ablation(
    model: Annotated[str, typer.Option(help="The small causal LM.")],
    target: Annotated[str, typer.Option(help="Judges the drafts.")],
    train_file: Annotated[Path, typer.Option(help="JSON lines.")],
    eval_file: Annotated[Path, typer.Option(help="JSON lines; prompts of the acceptance.")],
    mask_token_id: int = 4,
    steps: int = 100,
    batch_size: int = 16,
    max_length: int = 320,
    learning_rate: float = 1e-3,
    eval_samples: int = 48,
) -> None:
    """Train each variant for the same steps on the same samples, and measure."""
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    train_set = encode_rows(load_rows(train_file), tokenizer, max_length)
    eval_set = encode_rows(load_rows(eval_file), tokenizer, max_length)
    judge = AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, trust_remote_code=False
    )
    lines = ["| rows | seconds per step | rows built in | τ at K = 8 |", "|---|---|---|---|"]
    for name, (collator_class, cod) in VARIANTS.items():
        drafter = PardDrafter.from_causal_lm(
            model, mask_token_id=mask_token_id, dtype=torch.float32
        )
        drafter.speculation_config.num_draft_tokens = 8
        with TemporaryDirectory() as folder:
            arguments = _arguments(
                folder,
                steps,
                batch_size,
                learning_rate=learning_rate,
                warmup_steps=10,
                lr_scheduler_type="cosine",
            )
            trainer = PardTrainer(
                drafter, arguments, cod, train_dataset=train_set, processing_class=tokenizer
            )
            trainer.data_collator = collator_class(mask_token_id, cod)
            started = perf_counter()
            trainer.train()
            seconds = (perf_counter() - started) / steps
        started = perf_counter()
        for begin in range(0, 10 * batch_size, batch_size):
            trainer.data_collator(
                [train_set[(begin + i) % len(train_set)] for i in range(batch_size)]
            )
        building = (perf_counter() - started) / 10
        measured = acceptance(judge, drafter, tokenizer, eval_set, eval_samples)["acceptance"]
        tau = measured["mean_emitted"]
        lines.append(f"| {name} | {seconds:.2f} | {building / seconds:.1%} of it | {tau:.2f} |")
    print("\n".join(lines))


@app.command()
def throughput(
    model: Annotated[str, typer.Option(help="The small causal LM.")],
    lengths: Annotated[
        list[int] | None, typer.Option("--length", help="Tokens of a text; repeatable.")
    ] = None,
    mask_token_id: int = 4,
    num_depths: int = 8,
    tokens_per_step: Annotated[
        int, typer.Option(help="Texts of one step together; at least one text.")
    ] = 4096,
    steps: int = 1,
) -> None:
    """Tokens and rows per second, and memory, with and without dropping; texts of random tokens,
    all of one length.
    """
    lines = [
        "| tokens | rows kept | rows/s | tokens/s | peak MiB | rows/s, all | tokens/s, all | peak "
        "MiB, all |",
        "|" + "---:|" * 8,
    ]
    for length in lengths or (512, 1024, 2048, 4096):
        cells = [str(length)]
        for ratio, least in ((0.7, 0.2), (1.0, 1.0)):
            drafter = PardDrafter.from_causal_lm(
                model, mask_token_id=mask_token_id, dtype=torch.float32
            )
            batch_size = max(1, tokens_per_step // length)
            ids = torch.randint(drafter.config.vocab_size, (steps * batch_size, length)).tolist()
            texts = Dataset.from_dict(
                {"input_ids": ids, "labels": ids, "length": [length] * len(ids)}
            )
            cod = CodConfig(num_depths, ratio, least)
            with TemporaryDirectory() as folder:
                trainer = PardTrainer(
                    drafter, _arguments(folder, steps, batch_size), cod, train_dataset=texts
                )
                trainer.remove_callback(PrinterCallback)
                rows = len(trainer.data_collator.rows(texts[0])["input_ids"])
                reset_peak_memory(drafter.device)
                started = perf_counter()
                trainer.train()
                seconds = (perf_counter() - started) / steps / batch_size
            memory = peak_memory(drafter.device)
            cells += [f"{rows / length / num_depths:.0%}"] if ratio < 1 else []
            cells += [
                f"{rows / seconds:.0f}",
                f"{length / seconds:.0f}",
                "–" if memory is None else f"{memory / 2**20:.0f}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
        Console(stderr=True).print(lines[-1])
    print("\n".join(lines))


def _arguments(folder: str, steps: int, batch_size: int, **options) -> TrainingArguments:
    """A short run that leaves nothing behind."""
    return TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        bf16=fast_dtype() == torch.bfloat16,
        use_cpu=not torch.cuda.is_available(),  # or Trainer refuses bf16 there
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )


if __name__ == "__main__":
    app()
