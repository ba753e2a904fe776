"""Commands that decode while a person watches: demo, generate."""

from typing import Annotated

import typer

from .options import DrafterName, Dtype, DtypeOption, NewTokens, Parent, Target, Temperature, console, load

app = typer.Typer()


@app.command(epilog="Example: paradraft demo --per-category 2")
def demo(
    target: Target = None,
    drafter: DrafterName = None,
    parent: Parent = None,
    per_category: Annotated[int, typer.Option(min=1, help="Questions of each category.")] = 4,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Watch one answer being drafted, then compare plain, assisted, prompt lookup and PARD. Downloads nothing by itself."""
    from ..bench.cases import Case, methods_of
    from ..bench.compare import compare
    from ..bench.measure import Settings
    from ..bench.questions import ask, load_questions
    from ..demo import GENERAL, QUESTIONS
    from ..demo.show import stream_one

    models = load(target, drafter, parent, dtype)
    questions = load_questions(GENERAL if target else QUESTIONS, per_category)
    stream_one(models.target, models.drafter, models.tokenizer, questions[0].turns[0], console, max_new_tokens)
    methods = methods_of(
        Case.methods,
        models.drafter,
        models.parent,
        tree_sizes=("auto",),
        others=models.others,
        recurrent=models.target._is_stateful,
    )
    prompts = ask(questions, models.tokenizer, models.target, max_new_tokens)
    compare(models.target, methods, prompts, console, Settings(max_new_tokens, temperatures=(temperature,)))


@app.command(epilog="Example: paradraft generate 'Write as JSON: name is Mia' --target DIR --drafter DIR")
def generate(
    prompt: str,
    target: Target = None,
    drafter: DrafterName = None,
    max_new_tokens: NewTokens = 128,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Answer one prompt, streamed, with accepted drafts coloured, and compare with plain generate."""
    from ..demo.show import stream_one

    models = load(target, drafter, None, dtype)
    stream_one(models.target, models.drafter, models.tokenizer, prompt, console, max_new_tokens)
