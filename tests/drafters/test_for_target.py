"""The drafter that fits a target, without a choice."""

import json
import logging

import pytest
from checkpoints import with_mtp
from huggingface_hub import HfApi
from layouts import LAYOUTS
from tiny import near_copy, tiny_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import hf_paradraft
from hf_paradraft import AutoDrafter, auto, set_drafter
from hf_paradraft.integration.setting import drafter_on

LAYOUT_OF = {  # the words of the list, and the tests' layout
    "DFlash, JetSpec": "JetSpec",
    "DFlash, z-lab": "z-lab",
    "DFlash2, speculators": "speculators DFlash2",
    "DFlash2, z-lab": "z-lab DFlash2",
    "DSpark, DeepSpec": "DeepSpec DSpark",
    "DSpark, LiquidAI": "LFM2 DSpark",
    "DSpark, speculators": "speculators DSpark",
    "DSpine, SpecForge": "DSpine",
    "EAGLE-3, DeepSpec": "DeepSpec EAGLE-3",
    "EAGLE-3, NVIDIA": "NVIDIA",
    "EAGLE-3, SafeAI": "SafeAI",
    "EAGLE-3, speculators": "speculators EAGLE-3",
    "P-EAGLE, speculators": "speculators P-EAGLE",
}
# which tests of their own load
NO_FEATURES = (
    "Gemma 4 assistant, Google",
    "PARD, AMD",
    "PARD-2, AMD",
)


@pytest.mark.parametrize("row", auto.PUBLISHED, ids=lambda row: row["drafter"])
def test_every_entry_is_of_a_layout_that_loads(row):
    assert row.keys() == {"targets", "drafter", "layout"}
    assert all(name.count("/") == 1 for name in (*row["targets"], row["drafter"]))
    assert row["layout"] in NO_FEATURES or LAYOUT_OF[row["layout"]] in LAYOUTS


@pytest.fixture
def published(hub, monkeypatch, tmp_path):
    """A target, one finetuned from it, one quantised from that, and a drafter for the first; the
    list names a lost one first.
    """
    api = HfApi()

    def upload(name, base=None):
        folder = tmp_path / name
        card = (
            f"---\nlicense: mit\n{'' if base is None else f'base_model: user/{base}'}\n---\n# "
            f"{name}\n"
        )
        (folder / "README.md").write_text(card)
        api.create_repo(f"user/{name}")
        api.upload_folder(repo_id=f"user/{name}", folder_path=folder)

    target = tiny_model()
    for name in ("target", "finetuned", "quantised"):
        target.save_pretrained(tmp_path / name)
    near_copy(target).save_pretrained(tmp_path / "drafter")
    upload("target")
    upload("finetuned", "target")
    upload("quantised", "finetuned")
    upload("drafter")
    rows = [{"targets": ["user/target"], "drafter": f"user/{name}"} for name in ("lost", "drafter")]
    monkeypatch.setattr(auto, "PUBLISHED", rows)


@pytest.fixture
def said(caplog):
    """What was said about the choice."""
    logger = logging.getLogger("transformers")
    logger.propagate, before = True, logger.propagate
    yield lambda: [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("Drafting with")
    ]
    logger.propagate = before


@pytest.mark.parametrize("name", ["user/target", "user/finetuned", "user/quantised"])
def test_a_published_one_also_for_what_was_made_of_its_target(name, published, said):
    logger = logging.getLogger("hf_paradraft.auto")
    logger.propagate = True
    model = AutoModelForCausalLM.from_pretrained(name)
    for given in (name, model):
        drafter = AutoDrafter.for_target(given)
        assert drafter.name_or_path == "user/drafter"
        assert drafter.dtype == model.dtype
    assert said() == ["Drafting with user/drafter, which is published for user/target."] * 2


def test_one_that_does_not_fit_is_passed_over(published, monkeypatch):
    # a plain model is no drafter by itself
    rows = [
        {"targets": ["user/target"], "drafter": "user/target"},
        *auto.PUBLISHED,
    ]
    monkeypatch.setattr(auto, "PUBLISHED", rows)
    assert AutoDrafter.for_target("user/target").name_or_path == "user/drafter"


def test_layers_that_the_target_brings():
    folder, _ = with_mtp("deepseek", 1)
    drafter, why = auto.fitting(AutoModelForCausalLM.from_pretrained(folder))
    assert isinstance(drafter, hf_paradraft.MtpDrafter)
    assert why.startswith("Drafting with the MTP layers that")


@pytest.mark.parametrize(
    "card",
    [
        "---\nbase_model: [3, 4]\n---",
        "---\n: : [\n---",
        "---\nbase_model: ../../etc\n---",
        "no card",
    ],
)
def test_copies_where_there_is_nothing(card, tmp_path, hub):
    target = tiny_model()
    assert isinstance(AutoDrafter.for_target(target), hf_paradraft.NgramDrafter)  # of no name
    target.save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text(card)
    drafter, why = auto.fitting(str(tmp_path))
    assert isinstance(drafter, hf_paradraft.NgramDrafter)
    assert "copies from the text itself" in why


def test_set_without_a_choice(hub, prompt):
    target = tiny_model()
    plain = target.generate(prompt, max_new_tokens=20, do_sample=False)
    with set_drafter(target):
        assert isinstance(drafter_on(target), hf_paradraft.NgramDrafter)
        assert target.generate(prompt, max_new_tokens=20, do_sample=False).equal(plain)


@pytest.mark.slow
def test_commands_that_name_a_target_alone(tmp_path, hub):
    from hf_paradraft.cli import app
    from hf_paradraft.demo import FAMILY, QUESTIONS

    file, question = tmp_path / "bench.json", tmp_path / "one.jsonl"
    question.write_text(QUESTIONS.read_text().splitlines(keepends=True)[0])
    line = [
        "bench",
        "--target",
        str(FAMILY / "target"),
        "--questions",
        str(question),
        "--max-new-tokens",
        "8",
        "--no-equality",
    ]
    done = CliRunner().invoke(
        app, [*line, "--repeats", "1", "--json", str(file), "--only", "ngram"]
    )
    assert done.exit_code == 0, done.output
    assert {row["method"].partition("-")[0] for row in json.loads(file.read_text())} == {
        "plain",
        "ngram",
    }
