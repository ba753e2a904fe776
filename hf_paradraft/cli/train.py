"""Commands that make a drafter: regenerate, train, calibrate."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from .options import Dtype, DtypeOption, MaxLength, NewTokens, Temperature, Threads, console, open_target, use_threads

app = typer.Typer()
train = typer.Typer(help="Train a drafter.", no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(train, name="train")


@app.command(
    epilog="Example: paradraft regenerate --target DIR --source prompts.jsonl --output answers.jsonl, or with --invent 5000"
)
def regenerate(
    target: Annotated[str, typer.Option(help="Folder or Hub id of the model that answers.")],
    output: Annotated[Path, typer.Option(help="JSON lines to write; an unfinished file is continued.")],
    source: Annotated[str | None, typer.Option(help="JSON lines with 'messages' or 'text', or a Hub dataset.")] = None,
    invent: Annotated[
        int | None, typer.Option(min=1, help="Let the target write so many prompts itself, instead of --source.")
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="A drafter for the target, which makes it faster.")] = None,
    max_new_tokens: NewTokens = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 16,
    temperature: Temperature = 0.0,
    dtype: DtypeOption = Dtype.auto,
    seed: int = 0,
    overwrite: Annotated[bool, typer.Option(help="Begin anew where the file has answers of another run.")] = False,
    threads: Threads = None,
) -> None:
    """Rewrite the answers of a dataset with the target, so that a drafter learns from what it will be judged by."""
    from ..auto import AutoDrafter
    from ..training.regenerate import regenerate as run

    if (source is None) == (invent is None):
        raise typer.BadParameter("give --source FILE, or --invent N.")
    use_threads(threads)
    model, tokenizer = open_target(target, dtype.place)
    if invent is not None:
        from ..training.invent import invent as write_prompts

        prompts = output.with_name(f"{output.name}.prompts.jsonl")
        if overwrite:
            prompts.unlink(missing_ok=True)
        write_prompts(model, tokenizer, invent, prompts, seed=seed)
        source = str(prompts)
    rows = run(
        model,
        tokenizer,
        str(source),
        output,
        max_new_tokens,
        batch_size,
        temperature=temperature,
        seed=seed,
        overwrite=overwrite,
        drafter=AutoDrafter.from_pretrained(drafter, **dtype.place) if drafter else None,
    )
    console.print(f"{rows} rows written to {output}")


@app.command(epilog="Example: paradraft calibrate my-adapter --data answers.jsonl")
def calibrate(
    adapter: Annotated[Path, typer.Argument(help="Folder of a PPD adapter; its adapter_config.json is written anew.")],
    data: Annotated[str, typer.Option(help="Rows it was not trained on, best answered by the model itself.")],
    model: Annotated[str | None, typer.Option(help="The base model; default: the one that the adapter names.")] = None,
    max_length: MaxLength = 512,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Count how often prompt tokens guess right, and show which number of rows is fastest here."""
    from ..decoding.latency import row_latency
    from ..drafters.ppd.calibration import calibrate_folder
    from ..trees.sparse import sizes

    adapted = calibrate_folder(adapter, data, model, max_length, dtype.chosen)
    config, latency = adapted.active_peft_config, row_latency(adapted.get_base_model())
    right = Table("distance", *(f"rank {rank}" for rank in range(1, 6)), title="Right guesses, %")
    for distance, rates in enumerate(config.accuracy, 1):
        right.add_row(str(distance), *(f"{100 * rate:.1f}" for rate in rates[:5]))
    console.print(right)
    found = sizes(config.accuracy, config.num_ensembles, latency)
    best = max(found, key=lambda size: size.tau / size.seconds)
    table = Table("tree_size", "τ", "ms", "× plain", title="Promised, by the rows of a round")
    for size in found:
        speed = f"{size.tau * float(latency(1)) / size.seconds:.2f}"
        cells = [str(size.rows), f"{size.tau:.2f}", f"{1000 * size.seconds:.1f}", speed]
        table.add_row(*cells, style="bold green" if size is best else "")
    console.print(table)


TrainFile = Annotated[str, typer.Option(help="JSON lines with 'text' or 'messages', or a Hub dataset.")]
MaxSteps = Annotated[int, typer.Option(help="Optimiser steps; -1: by epochs.")]
Resume = Annotated[bool, typer.Option(help="Go on from the last checkpoint in the output folder.")]
Overwrite = Annotated[bool, typer.Option(help="Write into an output folder that has files.")]


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


@app.command(epilog="Example: paradraft shrink --target DIR --output-dir small --layers 6 --vocab 8000 --data answers.jsonl")
def shrink(
    target: Annotated[str, typer.Option(help="Folder or Hub id of the causal LM that has no small sibling.")],
    output_dir: Annotated[Path, typer.Option(help="Where the small model goes.")],
    layers: Annotated[int, typer.Option(min=1, help="N: how many of the target's layers are kept.")],
    vocab: Annotated[int | None, typer.Option(min=1, help="V': tokens that its head guesses; default: all.")] = None,
    data: Annotated[str | None, typer.Option(help="The target's answers, in which tokens are counted; with --vocab.")] = None,
    which: Annotated[str, typer.Option(help="first, or even: layers chosen evenly.")] = "even",
    overwrite: Overwrite = False,
) -> None:
    """Make a small model of some of a target's own layers, for `train pard`; with --vocab its head guesses fewer tokens."""
    from ..drafters.pard.shrink import shrink as run

    if which not in ("first", "even"):
        raise typer.BadParameter("--which is first or even.")
    small = run(target, output_dir, layers, vocab, data, which, overwrite=overwrite)  # type: ignore[arg-type]
    console.print(f"{small.num_parameters() / 1e6:.1f} million parameters in {output_dir}")
