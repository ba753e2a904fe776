"""Commands that decode while a person watches: demo, generate."""

import sys
import warnings
from typing import Annotated

import typer

from ..bench.cases import Case, methods_of
from ..bench.measure import Settings
from ..bench.questions import ask, load_questions
from ..chat import whole_characters
from ..demo import GENERAL, QUESTIONS
from ..demo.show import by_turns, compare_within, stream_one
from ..outer_names import is_recurrent_model
from .options import (
    AnyDrafter,
    DrafterName,
    Dtype,
    DtypeOption,
    NewTokens,
    Parent,
    References,
    Target,
    Temperature,
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
    drafter: DrafterName = None,
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
    models = load_public(dtype) if public else load(target, drafter, parent, dtype)
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
    models = load(target, drafter, None, dtype)
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
