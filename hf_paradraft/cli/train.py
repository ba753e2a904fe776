"""Commands that train a drafter."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .options import MaxLength, Overwrite, Threads, use_threads


def _part(*_: Any, **__: Any) -> None:
    """Several processes part in order: one that just leaves may abort."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


app = typer.Typer()
train = typer.Typer(help="Train a drafter.", no_args_is_help=True, rich_markup_mode="rich", result_callback=_part)
app.add_typer(train, name="train")


TrainFile = Annotated[str, typer.Option(help="JSON lines with 'text' or 'messages', or a Hub dataset.")]
MaxSteps = Annotated[int, typer.Option(help="Optimiser steps; -1: by epochs.")]
Resume = Annotated[bool, typer.Option(help="Go on from the last checkpoint in the output folder.")]


@train.command(
    "pard",
    epilog="Example: paradraft train pard --model DIR --train-file answers.jsonl --output-dir OUT --mask-token-id 4",
)
def train_pard(
    model: Annotated[str, typer.Option(help="The small causal LM to teach: folder or Hub id.")],
    train_file: TrainFile,
    output_dir: Annotated[Path, typer.Option(help="Where the drafter and its checkpoints go.")],
    mask_token_id: Annotated[int | None, typer.Option(help="Id of the mask token; default: the tokenizer's or config's.")] = None,
    eval_file: Annotated[str | None, typer.Option(help="Rows for the loss by depth.")] = None,
    target: Annotated[str | None, typer.Option(help="Measure acceptance against this model; needs --eval-file.")] = None,
    num_depths: Annotated[int, typer.Option(help="K: tokens drafted in training.")] = 8,
    cod_ratio: Annotated[float, typer.Option(help="r of conditional output dropping, in (0, 1].")] = 0.7,
    cod_min_ratio: Annotated[float, typer.Option(help="r_min, in (0, 1].")] = 0.2,
    max_steps: MaxSteps = -1,
    num_train_epochs: float = 4.0,
    per_device_train_batch_size: int = 8,
    gradient_accumulation_steps: int = 1,
    learning_rate: float = 1e-4,
    lr_scheduler_type: str = "linear",
    warmup_steps: int = 20,
    max_length: MaxLength = 512,
    save_steps: int = 500,
    seed: int = 0,
    resume: Resume = False,
    overwrite: Overwrite = False,
    threads: Threads = None,
) -> None:
    """Teach a small causal LM to draft K tokens in one forward. Many devices: run it under `accelerate launch`."""
    options = {**locals()}
    use_threads(options.pop("threads"))
    from ..drafters.pard.run import train_pard as run

    run(**options)


@train.command(
    "ppd",
    epilog="Example: paradraft train ppd --model DIR --train-file answers.jsonl --output-dir OUT",
)
def train_ppd(
    model: Annotated[str, typer.Option(help="The causal LM to speed up: folder or Hub id. It is not changed.")],
    train_file: TrainFile,
    output_dir: Annotated[Path, typer.Option(help="Where the adapter and its checkpoints go.")],
    eval_file: Annotated[str | None, typer.Option(help="Rows for the accuracy at each distance.")] = None,
    num_prompt_tokens: Annotated[int, typer.Option(help="m: how far ahead is guessed.")] = 3,
    num_ensembles: Annotated[int, typer.Option(help="E: embeddings per prompt token.")] = 1,
    points: Annotated[int, typer.Option(help="Insertion points in each text, at most.")] = 32,
    decay: Annotated[float, typer.Option(help="α, of the weight of each further distance.")] = 0.8,
    hard_labels: Annotated[bool, typer.Option(help="Learn the text's tokens, not the model's distribution.")] = False,
    max_steps: MaxSteps = -1,
    num_train_epochs: float = 1.0,
    per_device_train_batch_size: int = 4,
    learning_rate: float = 1e-2,
    max_length: MaxLength = 512,
    save_steps: int = 500,
    seed: int = 0,
    resume: Resume = False,
    overwrite: Overwrite = False,
    threads: Threads = None,
) -> None:
    """Train prompt tokens that let a model draft for itself: a PEFT adapter of a few kilobytes."""
    options = {**locals()}
    use_threads(options.pop("threads"))
    from ..drafters.ppd.run import train_ppd as run

    run(**options)


DrafterOutput = Annotated[Path, typer.Option(help="Where the drafter and its checkpoints go.")]
TargetToServe = Annotated[str, typer.Option(help="The causal LM to speed up: folder or Hub id. It is not changed.")]
Vocab = Annotated[int | None, typer.Option(min=1, help="V': tokens that are guessed, the answers' most frequent; default: all.")]
CacheDir = Annotated[Path | None, typer.Option(help="Keep the target's states of every text here: it runs once for all epochs.")]
CacheGb = Annotated[float, typer.Option(min=0, help="Of that folder, at most.")]
EvalFile = Annotated[str | None, typer.Option(help="Rows for the loss by depth, and the prompts of the acceptance.")]


@train.command(
    "parallelspec",
    epilog="Example: paradraft train parallelspec --target DIR --train-file answers.jsonl --output-dir OUT --style eagle",
)
def train_parallelspec(
    target: TargetToServe,
    train_file: TrainFile,
    output_dir: DrafterOutput,
    eval_file: EvalFile = None,
    style: Annotated[str, typer.Option(help="medusa: reads tokens alone; eagle: the target's states too.")] = "medusa",
    num_masks: Annotated[int, typer.Option(help="M: a forward guesses M + 1 tokens.")] = 4,
    num_layers: Annotated[int, typer.Option(help="Of the drafter.")] = 1,
    vocab: Vocab = None,
    cod_ratio: Annotated[float, typer.Option(help="r of conditional output dropping, in (0, 1]; 1 keeps every row.")] = 1.0,
    cod_min_ratio: Annotated[float, typer.Option(help="r_min, in (0, 1].")] = 0.2,
    decay: Annotated[float, typer.Option(help="λ, of the weight of each further distance.")] = 1.0,
    loss: Annotated[str, typer.Option(help="ce, or tv: the chance of being rejected.")] = "ce",
    max_steps: MaxSteps = -1,
    num_train_epochs: float = 4.0,
    per_device_train_batch_size: int = 8,
    gradient_accumulation_steps: int = 1,
    learning_rate: float = 5e-4,
    lr_scheduler_type: str = "linear",
    warmup_steps: int = 20,
    max_length: MaxLength = 512,
    cache_dir: CacheDir = None,
    cache_gb: CacheGb = 50.0,
    save_steps: int = 500,
    seed: int = 0,
    resume: Resume = False,
    overwrite: Overwrite = False,
    threads: Threads = None,
) -> None:
    """Train one decoder layer on a target's own embedding and head, which guesses several tokens in one forward."""
    options = {**locals()}
    use_threads(options.pop("threads"))
    from ..drafters.parallelspec.training import train_parallelspec as run

    run(**options)


@train.command(
    "dspark",
    epilog="Example: paradraft train dspark --target DIR --train-file answers.jsonl --output-dir OUT --vocab 8000",
)
def train_dspark(
    target: TargetToServe,
    train_file: TrainFile,
    output_dir: DrafterOutput,
    eval_file: EvalFile = None,
    num_layers: Annotated[int, typer.Option(help="Of the drafter.")] = 2,
    block_size: Annotated[int, typer.Option(help="Tokens that a block guesses.")] = 7,
    num_features: Annotated[int, typer.Option(help="Layers of the target that are read.")] = 5,
    num_anchors: Annotated[int, typer.Option(help="Blocks in each text, at most.")] = 32,
    markov_rank: Annotated[int, typer.Option(help="Of the head that looks at the token before; 0: none, which is DFlash.")] = 64,
    markov_type: Annotated[str, typer.Option(help="vanilla, gated or rnn.")] = "vanilla",
    confidence: Annotated[bool, typer.Option(help="Learn how sure each guess is.")] = True,
    vocab: Vocab = None,
    max_steps: MaxSteps = -1,
    num_train_epochs: float = 4.0,
    per_device_train_batch_size: int = 8,
    gradient_accumulation_steps: int = 1,
    learning_rate: float = 6e-4,
    lr_scheduler_type: str = "cosine",
    warmup_steps: int = 20,
    max_length: MaxLength = 512,
    cache_dir: CacheDir = None,
    cache_gb: CacheGb = 50.0,
    save_steps: int = 500,
    seed: int = 0,
    resume: Resume = False,
    overwrite: Overwrite = False,
    threads: Threads = None,
) -> None:
    """Train a drafter of blocks on a target's hidden states; --markov-rank 0 --no-confidence is DFlash."""
    options = {**locals()}
    use_threads(options.pop("threads"))
    from ..drafters.dspark.training import train_dspark as run

    run(**options)


@train.command(
    "eagle3",
    epilog="Example: paradraft train eagle3 --target DIR --train-file answers.jsonl --output-dir OUT --vocab 8000",
)
def train_eagle3(
    target: TargetToServe,
    train_file: TrainFile,
    output_dir: DrafterOutput,
    eval_file: EvalFile = None,
    num_draft_tokens: Annotated[int, typer.Option(help="K: tokens drafted one after the other, in training too.")] = 5,
    num_layers: Annotated[int, typer.Option(help="Of the drafter.")] = 1,
    num_anchors: Annotated[int, typer.Option(help="Places in each text from which it goes on, at most.")] = 32,
    vocab: Vocab = None,
    max_steps: MaxSteps = -1,
    num_train_epochs: float = 4.0,
    per_device_train_batch_size: int = 8,
    gradient_accumulation_steps: int = 1,
    learning_rate: float = 5e-4,
    lr_scheduler_type: str = "cosine",
    warmup_steps: int = 20,
    max_length: MaxLength = 512,
    cache_dir: CacheDir = None,
    cache_gb: CacheGb = 50.0,
    save_steps: int = 500,
    seed: int = 0,
    resume: Resume = False,
    overwrite: Overwrite = False,
    threads: Threads = None,
) -> None:
    """Train one decoder layer on three of a target's layers, which guesses one token after the other."""
    options = {**locals()}
    use_threads(options.pop("threads"))
    from ..drafters.eagle3.training import train_eagle3 as run

    run(**options)
