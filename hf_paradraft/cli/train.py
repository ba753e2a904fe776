"""Commands that train a drafter: one for each kind, made of the dataclass of its options."""

import inspect
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, cast, get_type_hints

import torch
import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from ..drafters import KINDS
from .options import Threads, use_threads

# Their options are imported when one of them is asked for: training needs packages that drafting
# does not.
TRAINED = {kind.kind: kind for kind in KINDS if kind.training_options is not None}


def _command(name: str) -> TyperCommand:
    """Make the command that trains a kind of drafter."""
    from ..training.run import TrainingOptions, options_of, train

    kind = options_of(TRAINED[name])
    extras = {item.name for item in fields(kind)} - {item.name for item in fields(TrainingOptions)}

    def order(item: Field) -> tuple[bool, bool]:
        """Sort a field: required ones first, then the kind's own."""
        return item.default is not MISSING, item.name not in extras

    def run(threads: int | None, **options: Any) -> None:
        use_threads(threads)
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


app = typer.Typer()
app.add_typer(
    typer.Typer(
        cls=Kinds, no_args_is_help=True, rich_markup_mode="rich", result_callback=_end_process_group
    ),
    name="train",
    help="Train a drafter.",
)
