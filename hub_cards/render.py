"""Render the embedded family's card and README's tables from what was measured: `make card`."""

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


def readme_with_tables(readme: str) -> str:
    """The README with the measured tables between their marks."""
    for mark, folder, by_category, tokens in (("measured", FAMILY, True, 128), ("public", PUBLIC / "parallelspec", False, 48)):
        bench = json.loads((folder / "bench.json").read_text())
        before, rest = readme.split(f"<!-- {mark} -->\n", 1)
        after = rest.split(f"<!-- /{mark} -->\n", 1)[1]
        note = f"Greedy, batch 1, up to {tokens} new tokens; {bench[0]['environment']}."
        readme = f"{before}<!-- {mark} -->\n{markdown(bench, by_category)}\n{note}\n<!-- /{mark} -->\n{after}"
    return readme


if __name__ == "__main__":
    (HERE / "embedded-family.md").write_text(render_card())
    file = HERE.parent / "README.md"
    file.write_text(readme_with_tables(file.read_text()))
