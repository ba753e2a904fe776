"""Commands that measure: bench, report."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from ..bench.measure import Settings
from ..bench.methods import Case, drafted, methods_of, replayed
from ..bench.questions import ask, load_questions, random_prompts
from ..bench.results import compare
from ..demo import GENERAL, QUESTIONS
from ..drafters.ngram import NgramDrafter
from ..outer_names import is_recurrent_model
from ..protocol import SpeculationConfig
from ..report.tables import markdown, read_bench, table
from .options import (
    DrafterNames,
    Dtype,
    DtypeOption,
    NewTokens,
    Parent,
    References,
    Target,
    Threads,
    console,
    copy_from,
    load,
    sane_temperature,
)

app = typer.Typer()
# what `markdown` writes
TABLES = re.compile(r"(\n|Batch \d+, .*:\n|\| method \| tokens/s \|.*\n(\|.*\n)*+)*+")

Questions = Annotated[
    list[str] | None,
    typer.Option(
        "--questions",
        "-q",
        help="JSON lines (Spec-Bench's too), or a Hub dataset as ID:CONFIG:SPLIT; repeatable.",
    ),
]
Markdown = Annotated[
    Path | None, typer.Option("--markdown", help="Write the tables here as Markdown.")
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot", help="A file: speed-ups by category (png, svg, pdf); a folder: every figure."
    ),
]


def _tree_size(text: str) -> int | str:
    if text != "auto" and (not text.isdecimal() or int(text) < 1):
        raise typer.BadParameter(
            f"a tree size is a whole number of at least 1, or auto, but not {text}"
        )
    return text if text == "auto" else int(text)


def _distinct(values: Iterable) -> tuple:
    """Keep each value once, in order: the same method twice would be counted as one."""
    return tuple(dict.fromkeys(values))


def _check_outputs(*files: Path | None, plot: Path | None = None) -> None:
    """Refuse outputs that cannot be written, before an hour of measuring."""
    named = [file for file in files if file is not None]
    if len({file.resolve() for file in named}) < len(named):
        raise typer.BadParameter(
            f"{named[0].name} is named twice: what is written later would replace it."
        )
    for file in named:
        if file.is_dir():
            raise typer.BadParameter(f"{file} is a folder: name a file.")
        if file.exists() and not _is_ours(file):
            raise typer.BadParameter(
                f"{file} holds something that no benchmark has written: name another file."
            )
    for file in (*named, *([] if plot is None else [plot])):
        if not file.parent.is_dir():
            raise typer.BadParameter(f"there is no folder {file.parent} to write {file.name} into.")
    if plot is None:
        return
    from ..report.figures import FORMATS, is_drawn_here, places

    if plot.is_dir() if plot.suffix in FORMATS else plot.is_file():
        raise typer.BadParameter(
            f"{plot} is a {'folder' if plot.is_dir() else 'file'}: name another place for the "
            "figures."
        )
    if plot.suffix and plot.suffix not in FORMATS and not plot.is_dir():
        raise typer.BadParameter(
            f"{plot.name} is no picture: name a folder, or a file that ends in "
            f"{', '.join(FORMATS)}."
        )
    for file in places(plot):
        if file.exists() and not is_drawn_here(file):
            raise typer.BadParameter(
                f"{file} is a picture that no benchmark has drawn: move it, or name another place."
            )


def _is_ours(file: Path) -> bool:
    """Tell whether a file is empty, or one that a benchmark wrote: records, or their tables."""
    text = file.read_text(encoding="utf-8", errors="replace")
    if TABLES.fullmatch(f"{text}\n"):  # whether or not its last line ends
        return True
    try:
        return bool(read_bench(file))
    except (OSError, ValueError):
        return False


def _write(rows: list, markdown_file: Path | None, plot_file: Path | None) -> None:
    if markdown_file is not None:
        markdown_file.write_text(markdown(rows), encoding="utf-8")
    if plot_file is not None:
        from ..report.figures import draw

        for file in draw(rows, plot_file):
            console.print(f"{file} written")


@app.command(
    epilog="Example: paradraft bench --json results.json --plot figures --markdown table.md"
)
def bench(
    target: Target = None,
    drafter: DrafterNames = None,
    parent: Parent = None,
    questions: Questions = None,
    per_category: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "Questions of each category, at most; default: 4 of the embedded ones, all of "
                "yours."
            ),
        ),
    ] = None,
    case: Annotated[
        Case, typer.Option(help="What to compare; hopeless: an untrained drafter, random prompts.")
    ] = Case.methods,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", "-m", help="Measure plain and methods whose names begin so; repeatable."
        ),
    ] = None,
    draft_tokens: Annotated[
        list[int] | None,
        typer.Option(
            "-k",
            min=1,
            help="Draft lengths of PARD; repeatable. Default: 4, 8, 12 and the drafter's own.",
        ),
    ] = None,
    tree_nodes: Annotated[
        list[str] | None, typer.Option("-n", help="Tree sizes of PARD, or auto; repeatable.")
    ] = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option("--batch-size", "-b", min=1, help="Prompts at a time; repeatable."),
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            "--temperature", "-t", min=0, callback=sane_temperature, help="0 is greedy; repeatable."
        ),
    ] = None,
    prompt_lookup: Annotated[
        bool, typer.Option("--prompt-lookup", help="Copied drafts too, alone and in our trees.")
    ] = False,
    replay: Annotated[
        bool,
        typer.Option("--replayed", help="The target's own answers as drafts: the most there is."),
    ] = False,
    reference: References = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each call; the median counts.")] = 3,
    max_new_tokens: NewTokens = 128,
    threads: Threads = None,
    equality: Annotated[
        bool, typer.Option(help="Compare outputs in float32 too, in a second pass.")
    ] = True,
    dtype: DtypeOption = Dtype.auto,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write one record per method here; a run that was stopped goes on from it.",
        ),
    ] = None,
    markdown_file: Markdown = None,
    plot_file: Plot = None,
) -> None:
    """Compare methods on questions: tokens per second, speed-up, τ, equality, times.

    Results come as tables, JSON and figures.
    """
    sizes = _distinct(_tree_size(size) for size in tree_nodes or ("16", "auto"))
    batches, temperatures = _distinct(batch_size or (1,)), _distinct(temperature or (0.0,))
    settings = Settings(max_new_tokens, batches, temperatures, repeats)
    _check_outputs(json_file, markdown_file, plot=plot_file)
    first, *others = drafter or [None]
    if others and case != Case.methods:
        raise typer.BadParameter(
            f"--case {case} looks at one drafter: name several for --case methods."
        )
    sources = questions or [str(QUESTIONS if target is None else GENERAL)]
    most = per_category if per_category or questions else 4
    asked = [question for source in sources for question in load_questions(source, most)]
    models = load(target, first, dtype, parent, others)
    memory = copy_from(reference, models)
    prompts = ask(asked, models.tokenizer, models.target, max_new_tokens)
    if case == Case.hopeless:
        prompts += random_prompts(len(models.tokenizer))
    lengths = _distinct(
        draft_tokens or sorted({4, 8, 12, models.drafter.speculation_config.num_draft_tokens})
    )
    recurrent = is_recurrent_model(models.target)
    methods = methods_of(
        case, models.drafter, models.parent, lengths, sizes, models.others, recurrent, prompt_lookup
    )
    if memory is not None:
        copies = NgramDrafter(memory=memory)
        methods.append(drafted("ngram-memory-k32", copies, SpeculationConfig(32, None)))
    if replay:
        methods.append(replayed(max(lengths)))
    if only:
        chosen = [method for method in methods[1:] if method.name.startswith(tuple(only))]
        if not chosen:
            raise typer.BadParameter(
                f"no method is called {' or '.join(only)}: there are "
                f"{', '.join(m.name for m in methods)}."
            )
        methods = [methods[0], *chosen]
    tokenizer = models.tokenizer
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    copied = ", ".join(map(str, reference or []))
    rows = compare(
        models.target, methods, prompts, console, settings, pad, json_file, equality, copied
    )
    _write(rows, markdown_file, plot_file)


@app.command(epilog="Example: paradraft report results.json --plot figures")
def report(
    json_file: Annotated[Path, typer.Argument(help="Written by paradraft bench --json.")],
    markdown_file: Markdown = None,
    plot_file: Plot = None,
) -> None:
    """Show the tables of an earlier benchmark again, and write them and its figures."""
    _check_outputs(json_file, markdown_file, plot=plot_file)
    rows = read_bench(json_file)
    console.print(table(rows, json_file.name))
    _write(rows, markdown_file, plot_file)
