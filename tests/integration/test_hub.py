"""Drafters on a Hub: the real client, real HTTP, and a server that fails on demand."""

import contextlib
import json

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.utils import disable_progress_bars
from loopback import LICENSES, USER
from peft import PeftModel, get_peft_model
from tiny import make_tokenizer, near_copy, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import hf_paradraft as pd
from hf_paradraft.cli import app
from hf_paradraft.drafters.ppd import PpdConfig
from hf_paradraft.hub.card import hub_name
from hf_paradraft.hub.push import push_recipe
from hf_paradraft.integration.publish import card_of, push_folder

disable_progress_bars()
REPO = f"{USER}/tiny"


def pard_folder(tmp_path):
    folder = tmp_path / "drafter"
    near_copy(tiny_model()).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def ppd_folder(tmp_path):
    folder = tmp_path / "adapter"
    model = get_peft_model(tiny_model(), PpdConfig(num_prompt_tokens=2, accuracy=[[0.5, 0.2], [0.3, 0.1]]))
    model.save_pretrained(folder)
    return folder


def test_a_pard_drafter_comes_back_bit_for_bit(hub, tmp_path):
    drafter = near_copy(tiny_model())
    with pytest.raises(ValueError, match="pass tokenizer="):
        drafter.push_to_hub(REPO)
    drafter.push_to_hub(REPO, tokenizer=make_tokenizer())
    assert len(hub.repos["models", REPO].commits) == 2  # the empty repository's, and ours
    back = pd.AutoDrafter.from_pretrained(REPO)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[name])
    assert back.mask_token_id == drafter.mask_token_id
    assert {"generation_config.json", "tokenizer.json", "README.md"} <= set(hub.files(REPO))
    stock = AutoModelForCausalLM.from_pretrained(REPO)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(stock(ids).logits, back(ids).logits)
    assert AutoTokenizer.from_pretrained(REPO).get_vocab() == make_tokenizer().get_vocab()
    back.push_to_hub(f"{USER}/again")  # its tokenizer is where it came from
    assert hub.files(f"{USER}/again")["model.safetensors"] == hub.files(REPO)["model.safetensors"]
    hub.reset()
    offline = pd.AutoDrafter.from_pretrained(REPO, local_files_only=True)
    assert torch.equal(offline(ids).logits, back(ids).logits)
    assert hub.calls == []


def test_a_ppd_adapter_comes_back_bit_for_bit(hub, tmp_path, prompt):
    push_folder(ppd_folder(tmp_path), REPO)
    drafter = pd.AutoDrafter.from_pretrained(REPO)
    assert drafter.config.accuracy == [[0.5, 0.2], [0.3, 0.1]]
    model = PeftModel.from_pretrained(tiny_model(), REPO)
    own = pd.PpdDrafter.from_model(model)
    assert torch.equal(own.prompts, drafter.prompts)
    own.push_to_hub(f"{USER}/again")
    drafter.push_to_hub(f"{USER}/third")
    files = [hub.files(name)["adapter_model.safetensors"] for name in (REPO, f"{USER}/again", f"{USER}/third")]
    assert files[0] == files[1] == files[2]
    target, options = tiny_model(), {"do_sample": False, "max_new_tokens": 12}
    plain = target.generate(prompt, **options)
    assert torch.equal(target.generate(prompt, **options, assistant_model=drafter), plain)
    assert torch.equal(model.generate(input_ids=prompt, **options), plain)


def test_a_license_that_is_asked_for_goes_into_the_folders_own_card(hub, tmp_path):
    folder = pard_folder(tmp_path)
    own = "---\nlicense: mit\ntags:\n- mine\n---\n# Mine\n"
    (folder / "README.md").write_text(own)
    push_folder(folder, REPO, license="apache-2.0")
    card = ModelCard(hub.files(REPO)["README.md"].decode())
    assert (card.data.license, card.data.tags, card.text.strip()) == ("apache-2.0", ["mine"], "# Mine")
    assert (folder / "README.md").read_text() == own


@pytest.mark.slow
@pytest.mark.parametrize("folder_of", [pard_folder, ppd_folder])
def test_a_cut_connection_leaves_what_was_there(hub, tmp_path, folder_of, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's own attempts
    folder = folder_of(tmp_path)
    push_folder(folder, REPO)
    calls, before = len(hub.calls), dict(hub.files(REPO))
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")  # other weights
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# New\n")
    push_folder(folder, REPO)
    after = dict(hub.files(REPO))
    assert after != before
    for cut in range(calls):
        hub.blobs.clear()
        hub.repos["models", REPO].add("main", dict(before), set(before), "back")
        hub.drop_at = len(hub.calls) + cut
        with contextlib.suppress(OSError):  # the client tries some calls twice by itself
            push_folder(folder, REPO)
        assert hub.files(REPO) in (before, after)
        hub.drop_at = None
        push_folder(folder, REPO)
        assert hub.files(REPO) == after


def test_large_files_are_not_sent_twice(hub, tmp_path):
    folder = pard_folder(tmp_path)
    push_folder(folder, REPO)
    push_folder(folder, f"{USER}/other")
    assert sum(call.startswith("PUT") for call in hub.calls) == 1


def test_private_branches_and_proposals(hub, tmp_path):
    folder = pard_folder(tmp_path)
    assert "discussions/1" in push_folder(folder, REPO, private=True, create_pr=True).pr_url
    assert hub.repos["models", REPO].private
    assert set(hub.files(REPO)) == {".gitattributes"}
    push_folder(folder, REPO, revision="next")
    assert set(hub.files(REPO)) == {".gitattributes"}
    assert "model.safetensors" in hub.files(REPO, "next")
    assert pd.AutoDrafter.from_pretrained(REPO, revision="next").mask_token_id == 31
    with pytest.raises(OSError, match="neither a folder here nor a model"):
        pd.AutoDrafter.from_pretrained(REPO, revision="next", token=False, cache_dir=tmp_path / "cache")


def test_repositories_that_are_no_drafters(hub, tmp_path):
    with pytest.raises(OSError, match="neither a folder here nor a model"):
        pd.AutoDrafter.from_pretrained(f"{USER}/missing")
    with pytest.raises(OSError, match="neither a folder here nor a model"):
        pd.AutoDrafter.from_pretrained(f"{USER}/missing", local_files_only=True)
    push_folder(pard_folder(tmp_path), REPO)
    hub.repos["models", REPO].gated = True
    with pytest.raises(OSError, match=r"403|[gG]ated"):
        pd.AutoDrafter.from_pretrained(REPO, cache_dir=tmp_path / "cache")
    plain = tmp_path / "plain"
    tiny_model().save_pretrained(plain)
    HfApi().create_repo(f"{USER}/plain")
    HfApi().upload_folder(repo_id=f"{USER}/plain", folder_path=plain)
    with pytest.raises(ValueError, match="not a PARD drafter yet"):
        pd.AutoDrafter.from_pretrained(f"{USER}/plain")


def test_folders_that_cannot_be_published(hub, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match="no drafter"):
        push_folder(tmp_path / "empty", REPO)
    folder = pard_folder(tmp_path)
    for name in ("secrets.json", ".env.json", "notes.txt", "optimizer.safetensors"):
        (folder / name).write_bytes((folder / "model.safetensors").read_bytes() if name.endswith("s") else b"{}")
    push_folder(folder, f"{USER}/clean")
    assert not {"secrets.json", ".env.json", "notes.txt", "optimizer.safetensors"} & set(hub.files(f"{USER}/clean"))
    hub.reset()
    (folder / "optimizer.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    plain = {key: value for key, value in config.items() if key not in ("pard_token", "mask_token_id", "ptd_token_id")}
    for other, message in (
        (plain, "no mask token"),
        ({**config, "pard2": True}, "PARD-2"),
        ({**config, "dflash_config": {}}, "DFlash"),
    ):
        (folder / "config.json").write_text(json.dumps(other))
        with pytest.raises(ValueError, match=message):
            push_folder(folder, REPO)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "bench.json").write_text("[{}]")
    with pytest.raises(ValueError, match="measure again"):
        push_folder(folder, REPO)
    (folder / "bench.json").unlink()
    (folder / "tokenizer_config.json").rename(folder / "elsewhere")
    with pytest.raises(OSError, match=r"no tokenizer_config\.json"):
        push_folder(folder, REPO)
    (folder / "elsewhere").rename(folder / "tokenizer_config.json")
    (folder / "model.safetensors").write_bytes(b"half")
    with pytest.raises(OSError, match="truncated or damaged"):
        push_folder(folder, REPO)
    assert hub.calls == []


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


def test_cards_say_what_the_hub_wants_to_know(hub, tmp_path):
    folder = pard_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    acceptance = {"mean_emitted": 4.25, "samples": 10, "acceptance_by_position": [0.9, 0.8]}
    training = {"num_depths": 8, "cod_ratio": 0.7, "cod_min_ratio": 0.2, "steps": 3, "samples": 4, "learning_rate": 1e-4}
    training |= {"seed": 0, "acceptance": acceptance, "base_model": "some/small", "target": "some/big"}
    config["paradraft"] = {"training": training, "speculation_config": {"num_draft_tokens": 10}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "bench.json").write_text(json.dumps(BENCH))
    push_folder(folder, REPO, license="apache-2.0")
    text = hub.files(REPO)["README.md"].decode()
    card = ModelCard(text)
    assert card.data.base_model == "some/small"
    assert card.data.eval_results[0].metric_value == 3.25
    assert card.data.license in LICENSES
    for part in (REPO, "some/big", '"num_speculative_tokens": 10', "decoding_type: PARD", "τ = 4.25", "90, 80", "pard-chain-k8"):
        assert part in text
    assert hub.files(REPO)["tau.png"].startswith(b"\x89PNG")
    assert not (folder / "tau.png").exists()
    with pytest.raises(ValueError, match="license"):
        push_folder(pard_folder(tmp_path / "more"), f"{USER}/other", license="my own")


def test_an_adapters_card(hub, tmp_path):
    folder = ppd_folder(tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text())
    for name, published in (("some/base", "some/base"), (str(tmp_path), None)):
        (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": name}))
        push_folder(folder, REPO)
        card = ModelCard(hub.files(REPO)["README.md"].decode())
        assert card.data.base_model == published
        assert card.data.library_name == "peft"
        assert str(tmp_path) not in card.text
        assert json.loads(hub.files(REPO)["adapter_config.json"])["base_model_name_or_path"] == published


def test_names_that_only_mean_something_here(tmp_path):
    assert hub_name("user/name") == "user/name"
    for name in (None, "gpt2-folder", str(tmp_path), "/a/b", "a/b/c", "None"):
        assert hub_name(name) is None


def test_cards_speak_of_this_drafter_alone(tmp_path):
    folder = pard_folder(tmp_path)
    rows = [*BENCH, {**BENCH[0], "method": "prompt-lookup", "speedup": 9.0}]
    (folder / "bench.json").write_text(json.dumps(rows))
    card = card_of(folder, REPO)
    assert card.data.eval_results[0].metric_value == 3.25
    assert "(id 31)" in card.text
    assert "vllm serve TARGET-MODEL" in card.text


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_info_of_odd_folders(tmp_path, name):
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


def test_a_repositorys_code_is_never_run(hub, tmp_path, monkeypatch):
    folder = pard_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    odd = {**config, "model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.EvilConfig"}}
    (folder / "config.json").write_text(json.dumps(odd))
    (folder / "configuration_evil.py").write_text("raise SystemExit('ran')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for load in (lambda: pd.AutoDrafter.from_pretrained(folder), lambda: push_folder(folder, REPO)):
        with pytest.raises((ValueError, OSError)):
            load()
    assert isinstance(CliRunner().invoke(app, ["info", str(folder)]).exception, (ValueError, OSError))


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
    drafter = pd.AutoDrafter.from_pretrained(REPO)
    recipe = {"custom_generate": f"{USER}/recipe", "trust_remote_code": True}
    assert torch.equal(target.generate(prompt, **options, **recipe, assistant_model=drafter), plain)
    assert drafter.last_stats.num_rounds > 0
    output = target.generate(prompt, **options, **recipe, assistant_model=REPO, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    assert output.speculation.num_rounds > 0
    with pytest.raises(ValueError, match="needs a drafter"):
        target.generate(prompt, **options, **recipe)


def test_commands(hub, tmp_path):
    run = CliRunner().invoke
    result = run(app, ["push", str(pard_folder(tmp_path)), REPO, "--private", "--license", "mit"])
    assert result.exit_code == 0, result.output
    assert REPO in result.output
    result = run(app, ["info", REPO])
    assert "PARD drafter" in result.output
    assert not any("model.safetensors" in call for call in hub.calls if "resolve" in call)
    run(app, ["push", str(ppd_folder(tmp_path)), f"{USER}/adapter"])
    assert "50 %, 30 %" in run(app, ["info", f"{USER}/adapter"]).output
    assert run(app, ["push", "--recipe", f"{USER}/recipe"]).exit_code == 0
    assert "custom_generate/generate.py" in hub.files(f"{USER}/recipe")
    assert run(app, ["push", str(tmp_path)]).exit_code == 2


def test_a_failed_push_leaves_no_empty_repository(hub, tmp_path, monkeypatch):
    folder = pard_folder(tmp_path)

    def fails(*_, **__):
        raise RuntimeError("the line broke")

    with monkeypatch.context() as patch:
        patch.setattr(HfApi, "create_commit", fails)
        with pytest.raises(OSError, match="was not published"):
            push_folder(folder, REPO)
    assert not HfApi().repo_exists(REPO)
    push_folder(folder, REPO)
    with monkeypatch.context() as patch:
        patch.setattr(HfApi, "create_commit", fails)
        with pytest.raises(OSError, match="as it was"):
            push_folder(folder, REPO)
    assert HfApi().repo_exists(REPO)  # what was there before stays


def test_a_reply_lost_after_the_hub_did_its_work(hub, tmp_path, monkeypatch):
    """The commit is there, and its repository is not taken for an empty one."""
    folder, upload = pard_folder(tmp_path), HfApi.create_commit

    def loses_the_reply(self, **kwargs):
        upload(self, **kwargs)
        raise RuntimeError("the line broke")

    monkeypatch.setattr(HfApi, "create_commit", loses_the_reply)
    with pytest.raises(OSError, match="push again"):
        push_folder(folder, REPO)
    assert "model.safetensors" in hub.files(REPO)


def test_weights_in_pieces_and_whole_replace_each_other(hub, tmp_path):
    """One commit each; whoever pulls never finds the weights of two drafters."""
    for number, size in enumerate(("5GB", "20KB", "5GB")):
        torch.manual_seed(number)
        drafter = near_copy(tiny_model(seed=number))
        drafter.save_pretrained(tmp_path / str(number), max_shard_size=size)
        make_tokenizer().save_pretrained(tmp_path / str(number))
        before = len(hub.repos["models", REPO].commits) if number else 0
        push_folder(tmp_path / str(number), REPO)
        assert len(hub.repos["models", REPO].commits) - before <= 2  # an empty one where it was made
        names = set(hub.files(REPO))
        assert ("model.safetensors" in names) == (size == "5GB")
        assert any(name.startswith("model-0") for name in names) == ("model.safetensors.index.json" in names) == (size != "5GB")
        pulled = pd.AutoDrafter.from_pretrained(REPO).state_dict()
        assert all(torch.equal(pulled[name], tensor) for name, tensor in drafter.state_dict().items())


def test_a_whole_drafter_replaces_an_adapter(hub, tmp_path):
    push_folder(ppd_folder(tmp_path), REPO)
    push_folder(pard_folder(tmp_path), REPO)
    assert not {"adapter_config.json", "adapter_model.safetensors"} & set(hub.files(REPO))
    assert isinstance(pd.AutoDrafter.from_pretrained(REPO), pd.PardDrafter)
    with pytest.raises(ValueError, match="made for main"):
        push_folder(tmp_path / "drafter", REPO, create_pr=True, revision="next")


def test_a_card_that_is_refused_leaves_no_empty_repository(hub, tmp_path, monkeypatch):
    def refuses(*_, **__):
        raise ValueError("Invalid metadata in README.md.")

    monkeypatch.setattr(HfApi, "create_commit", refuses)
    with pytest.raises(ValueError, match="Invalid metadata"):
        push_folder(pard_folder(tmp_path), REPO)
    assert not HfApi().repo_exists(REPO)


def test_the_headline_is_the_drafters_own_at_batch_1(hub, tmp_path):
    folder = pard_folder(tmp_path)
    common = {"tokens_per_second": 1.0, "speedup_quartiles": [1, 1, 1], "tau": 2.0, "by_category": {}, "tau_by_category": {}}
    rows = [
        {**common, "method": method, "batch_size": size, "temperature": temperature, "speedup": speedup, "matches_reference": 1.0}
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


@pytest.mark.parametrize("kept", ["text", [1], {"training": "none"}, {"speculation_config": 3}])
def test_a_key_that_is_no_dict_does_not_stop_a_push(hub, tmp_path, kept):
    folder = pard_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "paradraft": kept}))
    push_folder(folder, REPO)
    assert "README.md" in hub.files(REPO)


def test_info_without_a_network_is_one_sentence(monkeypatch):
    from huggingface_hub.errors import HTTPError

    from hf_paradraft.integration.info import describe

    def no_network(*_, **__):
        raise HTTPError("no route")

    monkeypatch.setattr(HfApi, "list_repo_files", no_network)
    with pytest.raises(OSError, match="neither a folder here nor a drafter"):
        describe("user/name")
