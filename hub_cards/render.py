"""Render the embedded family's card and README table from what was measured: `make card`."""

import json
from pathlib import Path

from jinja2 import Template

from hf_paradraft.report.tables import markdown

HERE = Path(__file__).parent
FAMILY = HERE.parent / "hf_paradraft" / "demo" / "family"


def render_card() -> str:
    """The card, from `family.json` and `bench.json`."""
    bench = json.loads((FAMILY / "bench.json").read_text())
    return Template((HERE / "embedded-family.jinja").read_text(), keep_trailing_newline=True).render(
        family=json.loads((FAMILY / "family.json").read_text()),
        bench=markdown(bench),
        environment=bench[0]["environment"],
    )


def readme_with_table(readme: str) -> str:
    """The README with the measured table between its two marks."""
    bench = json.loads((FAMILY / "bench.json").read_text())
    before, rest = readme.split("<!-- measured -->\n", 1)
    after = rest.split("<!-- /measured -->\n", 1)[1]
    note = f"Greedy, batch 1, up to 128 new tokens; {bench[0]['environment']}."
    return f"{before}<!-- measured -->\n{markdown(bench)}\n{note}\n<!-- /measured -->\n{after}"


if __name__ == "__main__":
    (HERE / "embedded-family.md").write_text(render_card())
    file = HERE.parent / "README.md"
    file.write_text(readme_with_table(file.read_text()))
