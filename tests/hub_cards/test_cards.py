"""What is written about the family is what was measured."""

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


@pytest.mark.parametrize(
    ("page", "with_tables"), [("README.md", "readme_with_speeds"), ("docs/benchmarks.md", "benchmarks_with_tables")]
)
def test_tables_are_fresh(page, with_tables, render):
    text = (ROOT / page).read_text()
    assert text == render[with_tables](text)


def test_metadata():
    data = ModelCard.load(ROOT / "hub_cards" / "embedded-family.md").data
    assert data.license == "apache-2.0"
    assert "paradraft" in data.tags
