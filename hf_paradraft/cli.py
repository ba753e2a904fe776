"""The `paradraft` command."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .bench.cases import Case
from .hardware import fast_dtype
from .integration.export import Engine

app = typer.Typer(
    help="Parallel drafters for transformers: the same output from generate, several times faster.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
train = typer.Typer(help="Train a drafter.", no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(train, name="train")
console = Console()


class Dtype(StrEnum):
    """Weights' number format; auto is bfloat16 where the hardware multiplies it well, else float32."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"a tree size is a whole number of at least 1, or auto, but not {text}")
    return int(text)


def _load_pair(
    target: str | None, drafter: str | None, parent: str | None, dtype: Dtype, untrained: bool = False
) -> tuple[Any, Any, Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .auto import AutoDrafter
    from .demo import FAMILY
    from .drafters.pard import PardDrafter

    if (target is None) != (drafter is None):
        raise typer.BadParameter("--target and --drafter go together: name both, or neither for the embedded family.")
    if target is None:
        target, drafter, parent = str(FAMILY / "target"), str(FAMILY / "pard"), str(FAMILY / "draft")
    chosen = fast_dtype() if dtype == Dtype.auto else getattr(torch, dtype)
    place = {"device_map": "auto"} if torch.cuda.is_available() else {}
    models = [AutoModelForCausalLM.from_pretrained(target, dtype=chosen, **place, trust_remote_code=False).eval()]
    if untrained:  # any small model will do; what it guesses does not count
        models.append(PardDrafter.from_causal_lm(drafter, mask_token_id=0, dtype=chosen, **place).eval())
    else:
        models.append(AutoDrafter.from_pretrained(drafter, dtype=chosen, **place).eval())
    models.append(
        AutoModelForCausalLM.from_pretrained(parent, dtype=chosen, **place, trust_remote_code=False).eval() if parent else None
    )
    return *models, AutoTokenizer.from_pretrained(target, trust_remote_code=False)


def _family_prompts(parent: Any) -> dict[str, Any]:
    """The embedded family's prompt tokens: its target's, and its small model's, which is copied."""
    import copy
    import warnings

    from peft import PeftModel

    from .auto import AutoDrafter
    from .demo import FAMILY
    from .drafters.ppd.prompted import PromptedDrafter

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # PEFT 0.21 still asks for it
        prompted = PromptedDrafter(PeftModel.from_pretrained(copy.deepcopy(parent), FAMILY / "ppd-draft"))
    return {"adapter": AutoDrafter.from_pretrained(FAMILY / "ppd"), "prompted_parent": prompted}


Target = Annotated[str | None, typer.Option(help="Folder or Hub id of the big model; default: the embedded one.")]
DrafterName = Annotated[str | None, typer.Option("--drafter", help="Folder or Hub id of a drafter for it.")]
Parent = Annotated[str | None, typer.Option(help="An autoregressive small model, for transformers' assisted generation.")]
DtypeOption = Annotated[Dtype, typer.Option(help="bfloat16 or float32; auto takes what this hardware is fast at.")]
NewTokens = Annotated[int, typer.Option(min=1, help="New tokens at most.")]
MaxLength = Annotated[int, typer.Option(help="Tokens of a sample at most; longer ones are cut.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 is greedy.")]


@app.command(epilog="Example: paradraft demo --per-category 2")
def demo(
    target: Target = None,
    drafter: DrafterName = None,
    parent: Parent = None,
    per_category: Annotated[int, typer.Option(min=1, help="Held-out prompts of each category.")] = 8,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Watch one answer being drafted, then compare plain, assisted, prompt lookup and PARD. Downloads nothing by itself."""
    from .bench.cases import methods_of
    from .bench.measure import encode_prompts
    from .demo.show import compare, demo_prompts, stream_one

    model, draft, small, tokenizer = _load_pair(target, drafter, parent, dtype)
    texts = demo_prompts(per_category, general=target is not None)
    stream_one(model, draft, tokenizer, texts[1][1], console, max_new_tokens)
    family = {} if target else _family_prompts(small)
    methods = methods_of(Case.methods, draft, small, tree_sizes=("auto",), **family)
    compare(model, methods, encode_prompts(tokenizer, texts), console, max_new_tokens, temperature)


@app.command(epilog="Example: paradraft generate 'Write as JSON: name is Mia' --target DIR --drafter DIR")
def generate(
    prompt: str,
    target: Target = None,
    drafter: DrafterName = None,
    max_new_tokens: NewTokens = 128,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Answer one prompt, streamed, with accepted drafts coloured, and compare with plain generate."""
    from .demo.show import stream_one

    model, draft, _, tokenizer = _load_pair(target, drafter, None, dtype)
    stream_one(model, draft, tokenizer, prompt, console, max_new_tokens)


@app.command(epilog="Example: paradraft bench --json results.json --plot results.png")
def bench(
    target: Target = None,
    drafter: DrafterName = None,
    parent: Parent = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write one record per method here.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw speed-ups by category here (png, svg, pdf).")] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write the table here as Markdown.")] = None,
    draft_tokens: Annotated[list[int] | None, typer.Option("-k", help="Draft lengths of PARD; repeatable.")] = None,
    tree_nodes: Annotated[list[str] | None, typer.Option("-n", help="Tree sizes of PARD, or auto; repeatable.")] = None,
    per_category: Annotated[int, typer.Option(min=1, help="Held-out prompts of each category.")] = 8,
    case: Annotated[Case, typer.Option(help="What to compare; hopeless: an untrained drafter, random prompts.")] = Case.methods,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each call; the median counts.")] = 1,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Compare methods on held-out prompts: tokens per second, speed-up, τ, equality; as a table, JSON and a plot."""
    from .bench.cases import methods_of, random_prompts
    from .bench.measure import encode_prompts
    from .bench.report import markdown, plot
    from .demo.show import compare, demo_prompts

    model, draft, small, tokenizer = _load_pair(target, drafter, parent, dtype)
    prompts = encode_prompts(tokenizer, demo_prompts(per_category, general=target is not None))
    if case == Case.hopeless:
        prompts += random_prompts(len(tokenizer))
    sizes = [size if size == "auto" else _whole(size) for size in tree_nodes or ("16", "auto")]
    methods = methods_of(case, draft, small, draft_tokens or (4, 8, 12), sizes, **({} if target else _family_prompts(small)))
    if batch_size > 1 and not all(method.batches for method in methods):
        raise typer.BadParameter("transformers' own methods take one prompt at a time: add --case batches")
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    rows = compare(model, methods, prompts, console, max_new_tokens, temperature, repeats, batch_size, pad)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=2) + "\n")
    if markdown_file is not None:
        markdown_file.write_text(markdown(rows))
    if plot_file is not None:
        plot(rows, plot_file)


@app.command(epilog="Example: paradraft plan --target Qwen/Qwen2.5-7B-Instruct --drafter amd/PARD-Qwen2.5-0.5B")
def plan(
    target: Target = None,
    drafter: DrafterName = None,
    draft_tokens: Annotated[list[int] | None, typer.Option("-k", min=1, help="Draft lengths; repeatable.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to measure with.")] = 6,
    max_new_tokens: NewTokens = 128,
    acceptance: Annotated[
        float | None, typer.Option(min=0, max=1, help="Assume this share of right guesses; any small model then.")
    ] = None,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Predict in about a minute whether a drafter will pay on this machine, and with which draft length."""
    from .bench.measure import encode_prompts
    from .bench.plan import plan as run
    from .demo.show import demo_prompts

    model, draft, _, tokenizer = _load_pair(target, drafter, None, dtype, untrained=acceptance is not None)
    texts = demo_prompts(-(-prompts // 6), general=target is not None)
    lengths = draft_tokens or (2, 4, 6, 8, 12, 16)
    plans = run(model, draft, encode_prompts(tokenizer, texts)[:prompts], lengths, max_new_tokens, acceptance)
    best = max(plans, key=lambda entry: entry.speedup)
    table = Table("K", "pays if τ >", "expected τ", "× plain")
    for entry in plans:
        cells = [str(entry.num_draft_tokens), f"{entry.round_cost:.2f}", f"{entry.tau:.2f}", f"{entry.speedup:.2f}"]
        table.add_row(*cells, style="bold green" if entry is best else "")
    console.print(table)
    if best.speedup < 1.05:
        console.print("Drafting does not pay here: leave the drafter out, or take a smaller one.")
    else:
        console.print(f"Draft {best.num_draft_tokens} tokens: about {best.speedup:.1f} times plain generate, greedy, batch 1.")


@app.command(epilog="Example: paradraft info amd/PARD-Qwen2.5-0.5B")
def info(repo_or_dir: str) -> None:
    """Say what a folder or repository is, without loading weights."""
    from .integration.info import describe

    grid = Table(show_header=False, box=None)
    for name, value in describe(repo_or_dir):
        grid.add_row(name, Text(str(value)))
    console.print(grid)


@app.command(epilog="Example: paradraft push my-drafter user/my-drafter --private")
def push(
    source: Annotated[str, typer.Argument(help="A drafter's folder; with --recipe or --space, the repository to make.")],
    repo_id: Annotated[str | None, typer.Argument(help="user/name on the Hub.")] = None,
    private: Annotated[bool | None, typer.Option("--private/--public", help="Of a new repository.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch; made if it does not exist.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Propose the commit instead.")] = False,
    license: Annotated[str | None, typer.Option(help="For the card, as the Hub names it, such as apache-2.0.")] = None,
    recipe: Annotated[bool, typer.Option("--recipe", help="Publish the loop for generate(custom_generate=…).")] = False,
    space: Annotated[bool, typer.Option("--space", help="Publish the demo Space.")] = False,
) -> None:
    """Publish a drafter with its tokenizer and card in one commit; or the recipe, or the Space."""
    from .integration.push import push_folder, push_recipe, push_space

    if (recipe and space) or (recipe or space) != (repo_id is None):
        raise typer.BadParameter("give DIR user/name, or --recipe user/name, or --space user/name.")
    if (recipe or space) and (revision or create_pr or license):
        raise typer.BadParameter("--revision, --create-pr and --license are for drafters.")
    if recipe or space:
        info = (push_recipe if recipe else push_space)(source, private)
    else:
        info = push_folder(source, repo_id, private, revision, create_pr, license=license)
    console.print(info.pr_url or info.commit_url, soft_wrap=True)


@app.command(epilog="Example: paradraft export amd/PARD-Qwen2.5-0.5B out --format vllm --target Qwen/Qwen2.5-7B-Instruct --pad")
def export(
    source: Annotated[str, typer.Argument(help="Folder or Hub id of a PARD drafter.")],
    output: Annotated[Path, typer.Argument(help="A new folder.")],
    engine: Annotated[Engine, typer.Option("--format", help="Who is to load it.")] = Engine.transformers,
    target: Annotated[str | None, typer.Option(help="The model it is to serve, for its vocabulary's size.")] = None,
    pad: Annotated[bool, typer.Option("--pad", help="Widen the drafter's vocabulary to the target's.")] = False,
) -> None:
    """Write a drafter's folder for another engine, checked, and print how to run it there."""
    from .integration.export import export as run

    console.print(Text(run(source, output, engine, target, pad)), soft_wrap=True)


@app.command(epilog="Example: paradraft regenerate --target DIR --source prompts.jsonl --output answers.jsonl")
def regenerate(
    target: Annotated[str, typer.Option(help="Folder or Hub id of the model that answers.")],
    source: Annotated[str, typer.Option(help="JSON lines with 'messages' or 'text', or a Hub dataset.")],
    output: Annotated[Path, typer.Option(help="JSON lines to write; an unfinished file is continued.")],
    max_new_tokens: NewTokens = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 16,
    temperature: Temperature = 0.0,
    dtype: DtypeOption = Dtype.auto,
    seed: int = 0,
) -> None:
    """Rewrite the answers of a dataset with the target, so that a drafter learns from what it will be judged by."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .training.regenerate import regenerate as run

    chosen = fast_dtype() if dtype == Dtype.auto else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=chosen, trust_remote_code=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    rows = run(model, tokenizer, source, output, max_new_tokens, batch_size, temperature=temperature, seed=seed)
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
    from .drafters.ppd.calibration import calibrate_folder
    from .trees.latency import row_latency
    from .trees.sparse import sizes

    chosen = fast_dtype() if dtype == Dtype.auto else getattr(torch, dtype)
    adapted = calibrate_folder(adapter, data, model, max_length, chosen)
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
    target: Annotated[str | None, typer.Option(help="Measure acceptance against this model on the evaluation rows.")] = None,
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
) -> None:
    """Teach a small causal LM to draft K tokens in one forward. Many devices: run it under `accelerate launch`."""
    options = {**locals()}
    from .drafters.pard.run import train_pard as run

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
) -> None:
    """Train prompt tokens that let a model draft for itself: a PEFT adapter of a few kilobytes."""
    options = {**locals()}
    from .drafters.ppd.run import train_ppd as run

    run(**options)


def main() -> None:
    """Run the command; errors that a person can mend are one sentence, not a traceback."""
    try:
        app()
    except ModuleNotFoundError as error:
        extra = {"accelerate": "train", "datasets": "train", "matplotlib": "bench"}.get(error.name or "")
        if extra is None:
            raise
        Console(stderr=True).print(Text(f"{error.name} is not installed: pip install 'hf-paradraft[{extra}]'"), soft_wrap=True)
        raise SystemExit(1) from None
    except (ValueError, OSError) as error:
        Console(stderr=True).print(Text.assemble(("paradraft: ", "bold red"), str(error)), soft_wrap=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
