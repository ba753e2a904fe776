"""What is written about the family is what was measured."""

import json
import runpy
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def render():
    return runpy.run_path(str(ROOT / "hub_cards" / "render.py"))


def test_the_card_is_fresh(render):
    assert (ROOT / "hub_cards" / "embedded-family.md").read_text() == render["render_card"]()


def test_the_readmes_table_is_fresh(render):
    text = (ROOT / "README.md").read_text()
    assert text == render["readme_with_speeds"](text)


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "measurements").glob("*.md")), ids=lambda page: page.name
)
def test_tables_of_measurements_are_fresh(page, render):
    text = page.read_text()
    assert text == render["measurements_with_tables"](text)


def test_the_list_of_published_drafters_is_fresh(render):
    text = (ROOT / "docs" / "reference" / "published-drafters.md").read_text()
    assert text == render["published_drafters"](text)


def test_every_table_is_shown(render):
    folder = ROOT / "docs" / "measurements"
    shown = "".join(page.read_text() for page in folder.glob("*.md"))
    names = [
        f"{file.stem}.{name}"
        for file in folder.glob("*.json")
        for name in json.loads(file.read_text())
    ]
    assert [name for name in names if f"<!-- table {name} -->" not in shown] == []


@pytest.mark.parametrize(("made", "top"), [("command_line", "commands"), ("api", "api")])
def test_pages_of_reference_are_fresh(made, top, render):
    pages, folder = render[made](), ROOT / "docs" / "reference"
    assert {f"{top}/{page.stem}" for page in (folder / top).glob("*.md")} == {
        name for name in pages if "/" in name
    }
    for name, page in pages.items():
        assert (folder / f"{name}.md").read_text() == page
        assert "&#" not in page
        assert "&gt;" not in page


def test_metadata():
    data = ModelCard.load(ROOT / "hub_cards" / "embedded-family.md").data
    assert data.license == "apache-2.0"
    assert "paradraft" in data.tags
