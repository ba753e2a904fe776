"""Commands that decode, for a person who watches or for other programs: demo, generate, serve."""

import ipaddress
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from ..bench.measure import Settings
from ..bench.methods import Case, methods_of
from ..bench.questions import ask, load_questions
from ..chat import whole_characters
from ..demo import GENERAL, QUESTIONS
from ..demo.show import by_turns, compare_within, stream_one
from ..hardware import pack
from ..integration.look import check_reads, reads_exactly
from ..integration.setting import check_same_tokenizer
from ..outer_names import is_recurrent_model
from .options import (
    AnyDrafter,
    Dtype,
    DtypeOption,
    NewTokens,
    Parent,
    References,
    Target,
    Temperature,
    Threads,
    console,
    copy_from,
    load,
    load_public,
)

app = typer.Typer()
# of the demo, for time
LEFT_OUT = (
    "assisted-k3",
    "assisted-k8",
    "ppd-drafter",
    "ngram",
    "mtp-chain",
    "ppd-auto-lookup",
)


def _quiet() -> None:
    """Keep other libraries' warnings and progress bars off the screen: a person is watching."""
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()


@app.command(epilog="Example: paradraft demo --seconds 600")
def demo(
    target: Target = None,
    drafter: AnyDrafter = None,
    parent: Parent = None,
    public: Annotated[
        bool,
        typer.Option(
            "--public",
            help="A public chat model on ordinary questions; fetched once, 140 to 270 MB.",
        ),
    ] = False,
    per_category: Annotated[
        int, typer.Option(min=1, help="Questions of each category, at most.")
    ] = 4,
    seconds: Annotated[
        float,
        typer.Option(min=1, help="Time for the comparison: as many questions as fit into it."),
    ] = 120,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Watch one answer being drafted, then compare methods.

    Needs the network only with --public.
    """
    if public and (target, drafter, parent) != (None, None, None):
        raise typer.BadParameter(
            "--public has models of its own: leave out --target, --drafter and --parent."
        )
    _quiet()
    models = load_public(dtype) if public else load(target, drafter, dtype, parent)
    questions = by_turns(load_questions(GENERAL if target or public else QUESTIONS, per_category))
    question = questions[0].turns[0]
    plain_rate = stream_one(
        models.target, models.drafter, models.tokenizer, question, console, max_new_tokens
    )
    recurrent = is_recurrent_model(models.target)
    saved = models.drafter.speculation_config
    length, size = (saved.num_draft_tokens, saved.tree_size) if public else (12, "auto")
    methods = methods_of(
        Case.methods,
        models.drafter,
        models.parent,
        (length,),
        (size,),
        models.others,
        recurrent,
        public,
    )
    shown = [method for method in methods if not method.name.startswith(LEFT_OUT)]
    prompts = ask(questions, models.tokenizer, models.target, max_new_tokens)
    settings = Settings(max_new_tokens, temperatures=(temperature,))
    compare_within(models.target, shown, prompts, console, settings, seconds, plain_rate)


def _prompt(text: str) -> str:
    """Read a prompt from the command line, or from standard input if it is `-`.

    Raises:
        ValueError: it is no text in UTF-8, or empty.
    """
    try:
        if text == "-":
            text = "" if sys.stdin is None else sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"Standard input is no text in UTF-8 ({error}).") from None
    if not text.strip():
        raise ValueError(
            "The prompt is empty: write what the model is asked, or - for standard input."
        )
    return whole_characters(text)


@app.command(
    epilog=(
        "Example: paradraft generate 'Write as JSON: name is Mia' --target DIR --drafter DIR, or … "
        "| paradraft generate -"
    )
)
def generate(
    prompt: Annotated[str, typer.Argument(help="What the model is asked; - reads standard input.")],
    target: Target = None,
    drafter: AnyDrafter = None,
    reference: References = None,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Stream the answer to a prompt, accepted drafts coloured; compare with plain generate."""
    prompt = _prompt(prompt)
    _quiet()
    models = load(target, drafter, dtype)
    copy_from(reference, models)
    stream_one(
        models.target,
        models.drafter,
        models.tokenizer,
        prompt,
        console,
        max_new_tokens,
        temperature,
    )


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
    from ..serve.answer import Service
    from ..serve.app import run
    from ..serve.lessons import Lessons
    from ..serve.scheduler import Scheduler

    models = load(target, "ngram" if drafter == "none" else drafter, dtype)
    name = (
        "paradraft-family"
        if target is None
        else Path(target).resolve().name
        if Path(target).is_dir()
        else target
    )
    if packed:
        pack(models.target)
    drafting = None if drafter == "none" else models.drafter
    if drafting is not None:
        check_reads(models.target, False)
        check_same_tokenizer(models.target, drafting)
        drafting.attach(models.target)
    if max_batch_size > 1 and not reads_exactly(models.target, True):
        console.print(
            f"{type(models.target).__name__} does not read texts side by side: requests are "
            "answered one by one."
        )
        max_batch_size = 1
    lesson = None
    if follow is not None:
        lesson = Lessons(models.target, drafting, models.tokenizer, follow)
    scheduler = Scheduler(
        models.target, drafting, max_batch_size, max_queue, lesson, int(prefix_cache * 2**30)
    )
    run(Service(scheduler, models.tokenizer, name, api_key, seconds), host, port, grace)
