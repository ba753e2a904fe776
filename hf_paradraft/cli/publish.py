"""Commands for published drafters: info, push, export."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ..integration.export import Engine
from ..report.tables import printable
from .options import console

app = typer.Typer()


@app.command(epilog="Example: paradraft info amd/PARD-Qwen2.5-0.5B")
def info(repo_or_dir: str) -> None:
    """Say what a folder or repository is, without loading weights."""
    from ..integration.publish import describe

    grid = Table(show_header=False, box=None)
    for name, value in describe(repo_or_dir):
        grid.add_row(name, Text(printable(str(value))))
    console.print(grid)


@app.command(epilog="Example: paradraft push my-drafter user/my-drafter --private")
def push(
    source: Annotated[
        str,
        typer.Argument(
            help="A drafter's folder; with --recipe or --space, the repository to make."
        ),
    ],
    repo_id: Annotated[str | None, typer.Argument(help="user/name on the Hub.")] = None,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Visibility of a new repository.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch; made if it does not exist.")] = None,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Propose the commit instead.")
    ] = False,
    license: Annotated[
        str | None, typer.Option(help="For the card, as the Hub names it, such as apache-2.0.")
    ] = None,
    recipe: Annotated[
        bool, typer.Option("--recipe", help="Publish the loop for generate(custom_generate=…).")
    ] = False,
    space: Annotated[bool, typer.Option("--space", help="Publish the demo Space.")] = False,
) -> None:
    """Publish a drafter with its tokenizer and card in one commit; or the recipe, or the Space."""
    from ..hub.push import push_recipe, push_space
    from ..integration.publish import push_folder

    if (recipe and space) or (recipe or space) != (repo_id is None):
        raise typer.BadParameter("give DIR user/name, or --recipe user/name, or --space user/name.")
    if (recipe or space) and (revision or create_pr or license):
        raise typer.BadParameter("--revision, --create-pr and --license are for drafters.")
    if recipe or space:
        info = (push_recipe if recipe else push_space)(source, private)
    else:
        info = push_folder(
            source,
            repo_id,
            private=private,
            revision=revision,
            create_pr=create_pr,
            license=license,
        )
    console.print(info.pr_url or info.commit_url, soft_wrap=True)


@app.command(
    epilog=(
        "Example: paradraft export amd/PARD-Qwen2.5-0.5B out --format vllm --target "
        "Qwen/Qwen2.5-7B-Instruct --pad"
    )
)
def export(
    source: Annotated[str, typer.Argument(help="Folder or Hub id of a drafter.")],
    output: Annotated[Path, typer.Argument(help="A new folder.")],
    engine: Annotated[
        Engine, typer.Option("--format", help="Who is to load it.")
    ] = Engine.transformers,
    target: Annotated[
        str | None, typer.Option(help="The model it is to serve, for its vocabulary's size.")
    ] = None,
    pad: Annotated[
        bool, typer.Option("--pad", help="Widen the drafter's vocabulary to the target's.")
    ] = False,
) -> None:
    """Write a drafter's folder for another engine, checked, and print how to run it there."""
    from ..integration.export import export as run

    console.print(Text(run(source, output, engine, target, pad)), soft_wrap=True)
