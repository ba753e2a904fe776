"""Commands around training: regenerate, calibrate, and train, with a command for each kind, made of
the dataclass of its options.
"""

import inspect
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import torch
import typer
from rich.table import Table
from transformers import PreTrainedModel
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from ..auto import AutoDrafter
from ..drafters import KINDS
from ..drafters.eagle3.config import Eagle3Config
from ..files import check_rows_there
from ..integration.look import reads_exactly
from ..protocol import Drafter
from ..protocol.drafter import FeatureKey, KeyValues
from .options import (
    Dtype,
    DtypeOption,
    MaxLength,
    NewTokens,
    Temperature,
    Threads,
    console,
    open_target,
)

app = typer.Typer()
# Their options are imported when one of them is asked for: training needs packages that drafting
# does not.
TRAINED = {kind.kind: kind for kind in KINDS if kind.training_options is not None}


@app.command(
    epilog=(
        "Example: paradraft regenerate --target DIR --prompts prompts.jsonl --output "
        "answers.jsonl, or with --invent 5000"
    ),
)
def regenerate(
    target: Annotated[
        str,
        typer.Option(help="The model that answers: folder or Hub id, or its name at --base-url."),
    ],
    output: Annotated[
        Path, typer.Option(help="JSON lines to write; an unfinished file is continued.")
    ],
    prompts: Annotated[
        str | None, typer.Option(help="JSON lines with 'messages' or 'text', or a Hub dataset.")
    ] = None,
    invent: Annotated[
        int | None,
        typer.Option(
            min=1, help="Let the target write so many prompts itself, instead of --prompts."
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            help="A server that speaks OpenAI's protocol answers: http://localhost:8000/v1, say."
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="For --base-url, if it wants one.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="A drafter for the target, which makes it faster.")
    ] = None,
    states: Annotated[
        Path | None,
        typer.Option(
            help="Keep the target's states of the answers here too, for --cache-dir of a training."
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Of --states: tokens of a text at most, as that training has.  [default: 512]",
        ),
    ] = None,
    avoid: Annotated[
        str | None,
        typer.Option(
            help=(
                "What drafters are measured on: prompts that share 13 words in a row with it are "
                "left out."
            )
        ),
    ] = None,
    max_new_tokens: NewTokens = 256,
    batch_size: Annotated[
        int,
        typer.Option(min=1, help="Prompts answered together, or requests that are open at a time."),
    ] = 64,
    temperature: Temperature = 0.0,
    dtype: DtypeOption = Dtype.auto,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1)] = 0,
    overwrite: Annotated[
        bool, typer.Option(help="Begin anew where the file has answers of another run.")
    ] = False,
    threads: Threads = None,
) -> None:
    """Rewrite the answers of a dataset with the target, to train a drafter on.

    A drafter then learns from the texts that it will be judged by.
    """
    from ..training.answers import Server, Target
    from ..training.journal import check_output_file
    from ..training.regenerate import invent as write_prompts
    from ..training.regenerate import regenerate as run
    from ..training.target_states import TargetStates

    if (prompts is None) == (invent is None):
        raise typer.BadParameter("give --prompts FILE, or --invent N.")
    if base_url is not None and (invent or drafter or states):
        raise typer.BadParameter(
            "--invent, --drafter and --states need the target in this process: leave out "
            "--base-url."
        )
    if states is None and max_length is not None:
        raise typer.BadParameter("--max-length says how much of a text --states keeps: pass both.")
    if states is not None and dtype.chosen != Dtype.auto.chosen:
        raise typer.BadParameter(
            f"trainings run the target in {Dtype.auto.chosen} here, so --states need no other "
            "--dtype."
        )
    check_output_file(output, prompts, avoid)
    for file in (prompts, avoid):
        check_rows_there(file)
    how = max_new_tokens, batch_size, temperature, seed
    if base_url is not None:
        writer: Server | Target = Server(base_url, target, *how, api_key)
    else:
        # with states, as trainings open it
        placement = {**dtype.placement, "whole": states is not None}
        model, tokenizer = open_target(target, placement)
        helper = AutoDrafter.from_pretrained(drafter, **dtype.placement) if drafter else None
        if states is not None:
            kept = TargetStates(model, layers_read(helper, model), folder=states)
        writer = Target(model, tokenizer, *how, helper, reads_exactly(model, True))
    source: str | Path = prompts
    if invent is not None:
        source = output.with_name(f"{output.name}.prompts.jsonl")
        write_prompts(
            model,
            tokenizer,
            invent,
            source,
            batch_size=batch_size,
            seed=seed,
            overwrite=overwrite,
        )
    rows = run(writer, source, output, overwrite=overwrite, avoid=avoid, count=invent)
    if states is not None:
        kept.keep(output, tokenizer, max_length or 512)
    console.print(f"{rows} rows written to {output}")


def layers_read(drafter: Drafter | None, target: PreTrainedModel) -> tuple[FeatureKey, ...]:
    """Choose the layers whose hidden states are kept, in addition to the last.

    They are those that the drafter reads; without one, or if it reads none, those of a new EAGLE-3
    layer.
    """
    read = (
        ()
        if drafter is None
        else tuple(key for key in drafter.needs(target) if not isinstance(key, KeyValues))
    )
    try:
        return read or Eagle3Config.for_target(target, 1).features or ()
    except ValueError:  # it has too few, or none of the usual kind
        return ("normed",)


@app.command(epilog="Example: paradraft calibrate my-adapter --eval-file answers.jsonl")
def calibrate(
    adapter: Annotated[
        Path,
        typer.Argument(help="Folder of a PPD adapter; its adapter_config.json is written anew."),
    ],
    eval_file: Annotated[
        str, typer.Option(help="Rows it was not trained on, best answered by the model itself.")
    ],
    target: Annotated[
        str | None, typer.Option(help="The base model; default: the one that the adapter names.")
    ] = None,
    max_length: MaxLength = 512,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Count how often prompt tokens guess right, and save it with the adapter."""
    from ..drafters.ppd.training import calibrate_folder

    adapted = calibrate_folder(adapter, eval_file, target, max_length, **dtype.placement)
    right = Table("distance", *(f"rank {rank}" for rank in range(1, 6)), title="Right guesses, %")
    for distance, rates in enumerate(adapted.active_peft_config.accuracy, 1):
        right.add_row(str(distance), *(f"{100 * rate:.1f}" for rate in rates[:5]))
    console.print(right)


def _command(name: str) -> TyperCommand:
    """Make the command that trains a kind of drafter."""
    from ..training.run import TrainingOptions, options_of, train

    kind = options_of(TRAINED[name])
    extras = {item.name for item in fields(kind)} - {item.name for item in fields(TrainingOptions)}

    def order(item: Field) -> tuple[bool, bool]:
        """Sort a field: required ones first, then the kind's own."""
        return item.default is not MISSING, item.name not in extras

    def run(threads: int | None, **options: Any) -> None:
        train(kind, **options)

    hints = get_type_hints(kind)
    parameters = [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if item.default is MISSING else item.default,
            annotation=Annotated[hints[item.name], typer.Option(help=item.metadata["help"])],
        )
        for item in sorted(fields(kind), key=order)
    ]
    parameters.append(
        inspect.Parameter(
            "threads", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Threads
        )
    )
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    # plain help: every name whole at 80 columns
    program = typer.Typer(rich_markup_mode=None, add_completion=False)
    example = f"Example: paradraft train {name} {kind.example}"
    program.command(name, help=kind.__doc__, epilog=example)(run)
    return cast(TyperCommand, get_command(program))


class Kinds(TyperGroup):
    """The kinds' commands, each made when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """List the names of the kinds that can be trained."""
        return list(TRAINED)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        """Make the command of that name; None if there is no such kind."""
        return _command(cmd_name) if cmd_name in TRAINED else None


def _end_process_group(*_: Any, **__: Any) -> None:
    """Destroy the process group, if there is one: a process that just leaves may abort."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


app.add_typer(
    typer.Typer(
        cls=Kinds, no_args_is_help=True, rich_markup_mode="rich", result_callback=_end_process_group
    ),
    name="train",
    help="Train a drafter.",
)
