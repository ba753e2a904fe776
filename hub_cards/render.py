"""Render the embedded family's card, README's table and the measurements from what was measured: `make card`."""

import json
from pathlib import Path

from jinja2 import Template

from hf_paradraft.report.tables import markdown

HERE = Path(__file__).parent
FAMILY = HERE.parent / "hf_paradraft" / "demo" / "family"
PUBLIC = HERE.parent / "hf_paradraft" / "demo" / "public"


def render_card() -> str:
    """The card, from `family.json` and `bench.json`."""
    bench = json.loads((FAMILY / "bench.json").read_text())
    return Template((HERE / "embedded-family.jinja").read_text(), keep_trailing_newline=True).render(
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
    family, public = (json.loads((folder / "bench.json").read_text()) for folder in (FAMILY, PUBLIC / "parallelspec"))

    def best(records: list[dict], begins: str) -> str:
        return f"{max(record['speedup'] for record in records if record['method'].startswith(begins)):.2f}"

    rows = {
        "plain `generate`": ("plain", "plain"),
        "transformers' assisted generation, at its best": ("assisted", "assisted"),
        "transformers' prompt lookup": ("prompt-lookup", "prompt-lookup"),
        "**hf_paradraft**, as it comes": ("pard-tree-k16-auto", "parallelspec-tree-k3-auto-graft"),
    }
    lines = ["| speed-up | the family | a public model |", "|---|---:|---:|"]
    lines += [f"| {name} | {best(family, ours)} | {best(public, theirs)} |" for name, (ours, theirs) in rows.items()]
    note = f"Greedy, one prompt at a time; {family[0]['environment']}."
    return between(readme, "speed", "\n".join([*lines, "", note]))


def benchmarks_with_tables(page: str) -> str:
    """The page of measurements with all methods."""
    for mark, folder, by_category, tokens in (("measured", FAMILY, True, 128), ("public", PUBLIC / "parallelspec", False, 48)):
        bench = json.loads((folder / "bench.json").read_text())
        note = f"Greedy, batch 1, up to {tokens} new tokens; {bench[0]['environment']}."
        page = between(page, mark, f"{markdown(bench, by_category)}\n{note}")
    return page


if __name__ == "__main__":
    (HERE / "embedded-family.md").write_text(render_card())
    for name, render in (("README.md", readme_with_speeds), ("docs/benchmarks.md", benchmarks_with_tables)):
        file = HERE.parent / name
        file.write_text(render(file.read_text()))
