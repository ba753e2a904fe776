"""The command that answers other programs: serve."""

import ipaddress
from pathlib import Path
from typing import Annotated

import typer

from ..hardware import pack
from ..integration.look import check_reads, reads_exactly
from ..integration.pairing import check_same_tokenizer
from .options import Dtype, DtypeOption, Target, Threads, console, load, use_threads

app = typer.Typer()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@app.command(
    epilog=(
        "Example: paradraft serve --port 8000, then point any OpenAI client at "
        "http://127.0.0.1:8000/v1"
    )
)
def serve(
    target: Target = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help=(
                "A drafter's folder or Hub id; ngram: copies; mtp: layers that the target brings; "
                "none: no drafts."
            )
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Another one than loopback wants --api-key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8000,
    dtype: DtypeOption = Dtype.auto,
    max_batch_size: Annotated[
        int, typer.Option(min=1, help="Requests that are answered together.")
    ] = 8,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Requests that wait; more are told to come back.")
    ] = 64,
    prefix_cache: Annotated[
        float,
        typer.Option(
            min=0, help="GiB of texts' beginnings that are kept, which are not read again; 0: none."
        ),
    ] = 1.0,
    threads: Threads = None,
    packed: Annotated[
        bool, typer.Option("--packed", help="On a CPU: faster products; weights are held twice.")
    ] = False,
    api_key: Annotated[
        str | None, typer.Option(envvar="PARADRAFT_API_KEY", help="Clients have to send it.")
    ] = None,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Serve other hosts without a key.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=1, help="For one request, at most.")] = 600.0,
    grace: Annotated[
        int, typer.Option(min=0, help="Seconds for running requests when it is stopped.")
    ] = 5,
    follow: Annotated[
        Path | None,
        typer.Option(
            help=(
                "The drafter learns from what is asked when no request waits, and is saved in this "
                "folder."
            )
        ),
    ] = None,
) -> None:
    """Answer OpenAI clients, several at a time, each with the text that the target writes alone."""
    if api_key == "":
        raise typer.BadParameter("--api-key is empty: give a key, or leave it out.")
    if api_key is None and not no_auth and not _is_loopback(host):
        raise typer.BadParameter(
            f"--host {host} lets others in: give an --api-key, or say --no-auth."
        )
    try:
        from ..serve.answer import Service
        from ..serve.app import run
        from ..serve.lessons import Lessons
        from ..serve.scheduler import Scheduler
    except ImportError as error:
        raise typer.BadParameter(f"{error}: pip install 'hf-paradraft[serve]'.") from error
    use_threads(threads)
    models = load(target, "ngram" if drafter == "none" else drafter, None, dtype)
    name = (
        "paradraft-family"
        if target is None
        else Path(target).resolve().name
        if Path(target).is_dir()
        else target
    )
    if packed:
        try:
            pack(models.target)
        except ValueError as error:
            raise typer.BadParameter(f"--packed: {error}") from error
    drafting = None if drafter == "none" else models.drafter
    if drafting is not None:
        check_reads(models.target, False)
        try:
            check_same_tokenizer(models.target, drafting)
            drafting.attach(models.target)
        except ValueError as error:
            raise typer.BadParameter(f"--drafter: {error}") from error
    if max_batch_size > 1 and not reads_exactly(models.target, True):
        console.print(
            f"{type(models.target).__name__} does not read texts side by side: requests are "
            "answered one by one."
        )
        max_batch_size = 1
    lesson = None
    if follow is not None:
        try:
            lesson = Lessons(models.target, drafting, models.tokenizer, follow)
        except (ValueError, ImportError) as error:
            raise typer.BadParameter(f"--follow: {error}") from error
    scheduler = Scheduler(
        models.target, drafting, max_batch_size, max_queue, lesson, int(prefix_cache * 2**30)
    )
    run(Service(scheduler, models.tokenizer, name, api_key, seconds), host, port, grace)
