"""What a drafter's card and `paradraft info` say of it, from its own folder alone; and the recipe
for `custom_generate`.
"""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from loopback import LICENSES, REPO, USER
from lossless import assert_lossless
from tiny import pard_folder, ppd_folder, tiny_model
from typer.testing import CliRunner

import hf_paradraft
from hf_paradraft.cli import app
from hf_paradraft.drafters import kind_of
from hf_paradraft.drafters.formats.folder import DrafterFolder
from hf_paradraft.drafters.mtp.training import MtpTraining
from hf_paradraft.drafters.pard.training import PardTraining
from hf_paradraft.drafters.ppd.training import PpdTraining
from hf_paradraft.files import hub_name
from hf_paradraft.hub.card import render_card
from hf_paradraft.hub.push import push_recipe
from hf_paradraft.integration.publish import describe, push_folder
from hf_paradraft.report.tables import markdown

BENCH = [
    {
        "method": name,
        "batch_size": 1,
        "temperature": 0.0,
        "tokens_per_second": 10.0,
        "speedup": speed,
        "speedup_quartiles": [1, 1, 1],
        "tau": tau,
        "matches_reference": 1.0,
        "by_category": {"code": speed},
        "tau_by_category": {"code": tau},
        "environment": "float32",
    }
    for name, speed, tau in (("plain", 1.0, 1.0), ("pard-chain-k8", 3.25, 4.5))
]


def card_of(folder, repo_id):
    return render_card(folder, repo_id, kind_of(saved := DrafterFolder(folder)).card_fields(saved))


def test_cards_say_what_the_hub_wants_to_know(hub, tmp_path):
    folder = pard_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    acceptance = {"mean_emitted": 4.25, "samples": 10, "acceptance_by_position": [0.9, 0.8]}
    training = {
        "num_depths": 8,
        "cod_ratio": 0.7,
        "cod_min_ratio": 0.2,
        "steps": 3,
        "samples": 4,
        "learning_rate": 1e-4,
    }
    training |= {
        "seed": 0,
        "acceptance": acceptance,
        "base_model": "some/small",
        "target": "some/big",
    }
    config["paradraft"] = {"training": training, "speculation_config": {"num_draft_tokens": 10}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "bench.json").write_text(json.dumps(BENCH))
    push_folder(folder, REPO, license="apache-2.0")
    text = hub.files(REPO)["README.md"].decode()
    card = ModelCard(text)
    assert card.data.base_model == "some/small"
    assert card.data.eval_results[0].metric_value == 3.25
    assert card.data.license in LICENSES
    for part in (
        REPO,
        "some/big",
        '"num_speculative_tokens": 10',
        "decoding_type: PARD",
        "τ = 4.25",
        "90, 80",
        "pard-chain-k8",
    ):
        assert part in text
    assert hub.files(REPO)["tau.png"].startswith(b"\x89PNG")
    assert not (folder / "tau.png").exists()
    with pytest.raises(ValueError, match="license"):
        push_folder(pard_folder(tmp_path / "more"), f"{USER}/other", license="my own")


def test_an_adapters_card_names_no_local_base(hub, tmp_path):
    folder = ppd_folder(tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text())
    for name, published in (("some/base", "some/base"), (str(tmp_path), None)):
        (folder / "adapter_config.json").write_text(
            json.dumps({**config, "base_model_name_or_path": name})
        )
        push_folder(folder, REPO)
        card = ModelCard(hub.files(REPO)["README.md"].decode())
        assert card.data.base_model == published
        assert card.data.library_name == "peft"
        assert str(tmp_path) not in card.text
        assert (
            json.loads(hub.files(REPO)["adapter_config.json"])["base_model_name_or_path"]
            == published
        )


def test_texts_of_a_foreign_config_stay_out_of_a_card(tmp_path):
    evil = "[see](http://evil)"
    acceptance = {"samples": evil, "mean_emitted": 2.5, "acceptance_by_position": [0.5, evil]}
    training = {
        "steps": 7,
        "samples": {"a": evil},
        "style": f"eagle\n# {evil}",
        "seed": evil,
        "acceptance": acceptance,
    }
    (tmp_path / "config.json").write_text(json.dumps({"paradraft": {"training": training}}))
    for kind in (hf_paradraft.ParallelSpecDrafter, hf_paradraft.PardDrafter):
        text = render_card(tmp_path, REPO, kind.card_fields(DrafterFolder(tmp_path))).text
        assert "7 steps" in text
        assert "evil" not in text


@pytest.mark.parametrize(
    "acceptance",
    [{"a": 1}, 3, {"samples": 4, "mean_emitted": "high", "acceptance_by_position": [0.5]}],
)
@pytest.mark.parametrize("rates", [None, "word", {"a": 1}, 2])
def test_an_acceptance_of_another_form_is_left_out_of_a_card(acceptance, rates, tmp_path):
    """It stands in a config that anybody may have edited."""
    if rates is not None:
        acceptance = {"samples": 4, "mean_emitted": 2.5, "acceptance_by_position": rates}
    training = {"steps": 7, "acceptance": acceptance}
    config = {"base_model_name_or_path": -1, "paradraft": {"training": training}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = render_card(
        tmp_path, REPO, hf_paradraft.PardDrafter.card_fields(DrafterFolder(tmp_path))
    ).text
    assert "7 steps" in text
    assert "Against its target" not in text


def test_cards_speak_of_this_drafter_alone(tmp_path):
    folder = pard_folder(tmp_path)
    rows = [*BENCH, {**BENCH[0], "method": "prompt-lookup", "speedup": 9.0}]
    (folder / "bench.json").write_text(json.dumps(rows))
    card = card_of(folder, REPO)
    assert card.data.eval_results[0].metric_value == 3.25
    assert "(id 31)" in card.text
    assert "vllm serve TARGET-MODEL" in card.text


@pytest.mark.parametrize(
    ("other", "headline"),
    [
        ("pard-chain-k8@small", None),
        ("pard-tree-k8-auto@drafter", 9.0),
        ("pard2-chain-k8", 3.25),
        ("pard-ahead-k12-n16", 3.25),
    ],
)
def test_the_headline_is_this_drafters(other, headline, tmp_path):
    """Not another one's of its kind in the same run, nor of a kind that begins alike."""
    folder = pard_folder(tmp_path / "pard")
    rows = [*([BENCH[0]] if "@" in other else BENCH), {**BENCH[1], "method": other, "speedup": 9.0}]
    (folder / "bench.json").write_text(json.dumps(rows))
    results = card_of(folder, REPO).data.eval_results
    assert (results[0].metric_value if results else None) == headline


def test_a_categorys_name_is_one_cell(tmp_path):
    rows = [{**row, "by_category": {"a|b": 1.0, "c": 2.0}} for row in BENCH]
    for by_category, columns in ((True, 8), (False, 8)):
        lines = markdown(rows, by_category).splitlines()
        assert {line.count("|") for line in lines if line} == {columns + 1}


def test_cards_say_what_feature_drafters_read(tmp_path):
    for style, kind, begins in (
        (
            None,
            hf_paradraft.Eagle3Drafter,
            "An **EAGLE-3 drafter** for `TARGET-MODEL`: it reads the target's hidden states, ",
        ),
        (
            "eagle",
            hf_paradraft.ParallelSpecDrafter,
            "A **ParallelSpec drafter** for `TARGET-MODEL`: it reads the target's hidden states, ",
        ),
        (
            "medusa",
            hf_paradraft.ParallelSpecDrafter,
            "A **ParallelSpec drafter** for `TARGET-MODEL`: it reads tokens alone, shares",
        ),
    ):
        (tmp_path / "config.json").write_text(
            json.dumps({"paradraft": {"training": {"style": style} if style else {}}})
        )
        text = render_card(tmp_path, REPO, kind.card_fields(DrafterFolder(tmp_path))).text
        assert begins in text
        assert ("hidden states" in text) == (style != "medusa")


def test_the_headline_is_the_drafters_own_at_batch_1(hub, tmp_path):
    folder = pard_folder(tmp_path)
    common = {
        "tokens_per_second": 1.0,
        "speedup_quartiles": [1, 1, 1],
        "tau": 2.0,
        "by_category": {},
        "tau_by_category": {},
    }
    rows = [
        {
            **common,
            "method": method,
            "batch_size": size,
            "temperature": temperature,
            "speedup": speedup,
            "matches_reference": 1.0,
        }
        for method, size, temperature, speedup in (
            ("plain", 1, 0, 1.0),
            ("pard-chain-k4", 1, 0, 2.0),
            ("pard-tree-k4-n8", 1, 0, 2.5),
            ("pard-chain-k4", 8, 0, 9.0),
            ("pard-chain-k4", 1, 1.0, 8.0),
            ("ppd-auto", 1, 0, 7.0),
        )
    ]
    (folder / "bench.json").write_text(json.dumps(rows))
    results = {result.metric_type: result for result in card_of(folder, REPO).data.eval_results}
    assert results["speedup"].metric_value == 2.5
    assert "greedy, batch 1" in results["speedup"].metric_name


def test_a_license_that_is_asked_for_goes_into_the_folders_own_card(hub, tmp_path):
    folder = pard_folder(tmp_path)
    text = "---\nlicense: mit\ntags:\n- mine\n---\n# Mine\n"
    (folder / "README.md").write_text(text)
    push_folder(folder, REPO, license="apache-2.0")
    card = ModelCard(hub.files(REPO)["README.md"].decode())
    assert (card.data.license, card.data.tags, card.text.strip()) == (
        "apache-2.0",
        ["mine"],
        "# Mine",
    )
    assert (folder / "README.md").read_text() == text


@pytest.mark.parametrize("section", ["text", [1], {"training": "none"}, {"speculation_config": 3}])
def test_a_key_that_is_no_dict_does_not_stop_a_push(hub, tmp_path, section):
    folder = pard_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "paradraft": section}))
    push_folder(folder, REPO)
    assert "README.md" in hub.files(REPO)


def test_local_names_are_not_published(tmp_path):
    assert hub_name("user/name") == "user/name"
    for name in (None, "gpt2-folder", str(tmp_path), "/a/b", "a/b/c", "None"):
        assert hub_name(name) is None


def test_a_name_on_the_hub_may_be_a_path():
    for kind, name in ((MtpTraining, "target"), (PpdTraining, "target"), (PardTraining, "model")):
        options = {name: Path("user/name"), "train_file": "x", "output_dir": "y"}
        assert "user/name" in kind(**options).models.values()


def test_code_in_cards_is_python(tmp_path):
    for folder in (pard_folder(tmp_path), ppd_folder(tmp_path)):
        text = card_of(folder, REPO).text
        blocks = [part.split("```")[0] for part in text.split("```python\n")[1:]]
        assert blocks
        for block in blocks:
            compile(block, "card", "exec")


def test_the_recipe_runs_our_loop(hub, tmp_path, prompt):
    push_recipe(f"{USER}/recipe")
    push_folder(pard_folder(tmp_path), REPO)
    target, options = tiny_model(), {"do_sample": False, "max_new_tokens": 15}
    plain = target.generate(prompt, **options)
    drafter = hf_paradraft.AutoDrafter.from_pretrained(REPO)
    recipe = {"custom_generate": f"{USER}/recipe", "trust_remote_code": True}
    assert_lossless(target, drafter, prompt, plain=plain, **options, **recipe)
    assert drafter.last_stats.num_rounds > 0
    output = target.generate(
        prompt, **options, **recipe, assistant_model=REPO, return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, plain)
    assert output.speculation.num_rounds > 0
    with pytest.raises(ValueError, match="needs a drafter"):
        target.generate(prompt, **options, **recipe)


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_info_shows_odd_configs_or_one_error(tmp_path, name):
    folder = pard_folder(tmp_path) if name == "config.json" else ppd_folder(tmp_path)
    run = CliRunner().invoke
    config = json.loads((folder / name).read_text())
    odd = {**config, "architectures": ["[/b]"], "base_model_name_or_path": "[/x]", "paradraft": "x"}
    (folder / name).write_text(json.dumps(odd))
    result = run(app, ["info", str(folder)])
    assert result.exit_code == 0, result.output
    assert "[/b]" in result.output or "[/x]" in result.output
    (folder / name).write_text("[]")
    assert isinstance(run(app, ["info", str(folder)]).exception, OSError)
    assert isinstance(run(app, ["info", f"{USER}/missing"]).exception, OSError)


def test_info_without_a_network_is_one_sentence(monkeypatch):
    from huggingface_hub.errors import HTTPError

    def no_network(*_, **__):
        raise HTTPError("no route")

    monkeypatch.setattr(HfApi, "list_repo_files", no_network)
    with pytest.raises(OSError, match="neither a folder here nor a drafter"):
        describe("user/name")
