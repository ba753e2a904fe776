"""Render the embedded family's card, the tables of README and docs, and the command line's page:
`make card`.
"""

import html
import inspect
import json
import re
from pathlib import Path
from typing import Any

import typer
import typer.cli
from jinja2 import Template
from typer.testing import CliRunner

import hf_paradraft
from hf_paradraft import training
from hf_paradraft.cli import app
from hf_paradraft.report.tables import markdown

HERE = Path(__file__).parent
FAMILY = HERE.parent / "hf_paradraft" / "demo" / "family"
PUBLIC = HERE.parent / "hf_paradraft" / "demo" / "public"
MEASUREMENTS = HERE.parent / "docs" / "measurements"


def render_card() -> str:
    """The card, from `family.json` and `bench.json`."""
    bench = json.loads((FAMILY / "bench.json").read_text())
    return Template(
        (HERE / "embedded-family.jinja").read_text(), keep_trailing_newline=True
    ).render(
        family=json.loads((FAMILY / "family.json").read_text()),
        bench=markdown(bench),
        environment=bench[0]["environment"],
    )


def between(text: str, mark: str, new: str) -> str:
    """A text with something new between two marks."""
    before, rest = text.split(f"<!-- {mark} -->\n", 1)
    after = rest.split(f"<!-- /{mark} -->\n", 1)[1]
    return f"{before}<!-- {mark} -->\n{new}\n<!-- /{mark} -->\n{after}"


def readme_with_speeds(readme: str) -> str:
    """The README with one line for each way to generate, of the family and of the public model."""
    family, public = (
        json.loads((folder / "bench.json").read_text()) for folder in (FAMILY, PUBLIC / "eagle3")
    )

    def best(records: list[dict], begins: str) -> str:
        speeds = [record["speedup"] for record in records if record["method"].startswith(begins)]
        return f"{max(speeds):.2f}" if speeds else "–"

    rows = {
        "plain `generate`": ("plain", "plain"),
        "transformers' assisted generation, at its best": ("assisted", "assisted"),
        "transformers' prompt lookup": ("prompt-lookup", "prompt-lookup"),
        "**hf_paradraft**, with its drafter's own settings": (
            "pard-tree-k16-auto",
            "eagle3-tree-k5-auto-lookup",
        ),
    }
    lines = ["| speed-up | the family | a public model |", "|---|---:|---:|"]
    lines += [
        f"| {name} | {best(family, ours)} | {best(public, theirs)} |"
        for name, (ours, theirs) in rows.items()
    ]
    note = (
        f"Greedy, one prompt at a time. The family: {family[0]['environment']}. The public model: "
        f"{public[0]['environment']}."
    )
    return between(readme, "speed", "\n".join([*lines, "", note]))


def cell(value: Any) -> str:
    """A number, a speed-up with its τ, or words."""
    if isinstance(value, list):
        return f"{cell(value[0])} (τ {cell(value[1])})"
    if isinstance(value, float):
        return max(f"{value:.2f}", str(value), key=len)
    return str(value)


def table(columns: list[str], rows: list[list[Any]]) -> str:
    """As Markdown; numbers on the right."""
    numbers = [
        "---|" if all(isinstance(row[place], str) for row in rows) else "---:|"
        for place in range(len(columns))
    ]
    lines = [f"| {' | '.join(columns)} |", "|" + "".join(numbers)]
    return "\n".join([*lines, *(f"| {' | '.join(map(cell, row))} |" for row in rows)])


def measurements_with_tables(page: str) -> str:
    """A page of measurements with its tables: those of a benchmark with all methods, and those of a
    JSON file beside it.
    """
    for mark, folder, by_category, tokens in (
        ("measured", FAMILY, True, 128),
        ("public", PUBLIC / "eagle3", False, 64),
    ):
        if f"<!-- {mark} -->" in page:
            bench = json.loads((folder / "bench.json").read_text())
            note = f"Greedy, batch 1, up to {tokens} new tokens; {bench[0]['environment']}."
            page = between(page, mark, f"{markdown(bench, by_category)}\n{note}")
    for file, name in re.findall(r"<!-- table ([\w-]+)\.([\w-]+) -->", page):
        page = between(
            page,
            f"table {file}.{name}",
            table(**json.loads((MEASUREMENTS / f"{file}.json").read_text())[name]),
        )
    return page


def published_drafters(page: str) -> str:
    """The page of published drafters with its list."""
    rows = [
        [
            ", ".join(name.split("/")[1] for name in row["targets"]),
            f"`{row['drafter']}`",
            row["layout"],
        ]
        for row in json.loads((HERE.parent / "hf_paradraft" / "published.json").read_text())
    ]
    return between(page, "by-target", table(["target", "drafter", "layout"], rows))


def command_line() -> dict[str, str]:
    """Every command's help, a page for each, by its name; `command-line` lists them."""
    command = ["hf_paradraft.cli", "utils", "docs", "--name", "paradraft"]
    text = html.unescape(CliRunner().invoke(typer.cli.app, command, catch_exceptions=False).output)
    top, *parts = re.split(r"^##+ `paradraft ([\w -]+)`\n", text, flags=re.M)
    hidden = {
        name for name, command in typer.main.get_command(app).commands.items() if command.hidden
    }
    pages = {
        name: page for name, page in zip(parts[::2], parts[1::2], strict=True) if name not in hidden
    }
    rows = [
        f"| [`{name}`](commands/{name.replace(' ', '-')}.md) | {first_paragraph(page)} |"
        for name, page in pages.items()
    ]
    usage = top.split("**Commands**")[0].split("\n", 1)[1].strip()
    listed = "\n".join(["# Command line", "", usage, "", "| `paradraft …` | |", "|---|---|", *rows])
    return {
        "command-line": listed + "\n",
        **{
            f"commands/{name.replace(' ', '-')}": f"# paradraft {name}\n\n{page.strip()}\n"
            for name, page in pages.items()
        },
    }


def first_paragraph(text: str) -> str:
    """The first paragraph of a text, in one line."""
    return " ".join(text.strip().split("\n\n")[0].split())


def api() -> dict[str, str]:
    """What the package gives, a page for each name; `api` lists them."""
    pages, rows = {}, []
    for name in sorted({*hf_paradraft.__all__} - {"training"}):
        line = first_paragraph(inspect.getdoc(getattr(hf_paradraft, name)))
        rows.append(f"| [`{name}`](api/{name}.md) | {line} |")
        options = (
            "    options: {show_root_heading: false, show_root_toc_entry: false, show_source: "
            "false, heading_level: 2}"
        )
        pages[f"api/{name}"] = (
            f"# {name}\n\n```pycon\n>>> from hf_paradraft import {name}\n```\n\n::: "
            f"hf_paradraft.{name}\n{options}\n"
        )
    rows += [
        f"| `training.{name}` | {first_paragraph(inspect.getdoc(getattr(training, name)))} |"
        for name in training.__all__
    ]
    listed = "\n".join(["# API", "", "| `from hf_paradraft import …` | |", "|---|---|", *rows])
    return {"api": listed + "\n", **pages}


if __name__ == "__main__":
    (HERE / "embedded-family.md").write_text(render_card())
    for name, page in {**command_line(), **api()}.items():
        (HERE.parent / "docs" / "reference" / f"{name}.md").write_text(page)
    readme = HERE.parent / "README.md"
    readme.write_text(readme_with_speeds(readme.read_text()))
    published = HERE.parent / "docs" / "reference" / "published-drafters.md"
    published.write_text(published_drafters(published.read_text()))
    for file in MEASUREMENTS.glob("*.md"):
        file.write_text(measurements_with_tables(file.read_text()))
