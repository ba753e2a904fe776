"""What every kind of drafter has to hold: one suite over all of them, and a new kind in one folder
and one line.
"""

import copy
import dataclasses
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless import assert_lossless
from tiny import EOS, MASK, make_tokenizer, near_copy, tiny_model, with_noise_adapter, with_prompts
from transformers import AutoModelForCausalLM

import hf_paradraft
from hf_paradraft.bench.methods import variants_of
from hf_paradraft.drafters import KINDS, kind_of
from hf_paradraft.drafters.formats.folder import DrafterFolder
from hf_paradraft.integration.publish import describe_kind

NAMES = ["llama", "qwen3", "gpt2", "mistral-sliding"]
TARGETS = {name: tiny_model(name) for name in NAMES}
MAKE = {
    "pard": lambda target: near_copy(target, 0.05),
    "autoregressive": lambda target: hf_paradraft.AutoregressiveDrafter(near_copy(target, 0.05)),
    "ppd": lambda target: hf_paradraft.PpdDrafter.from_model(
        with_prompts(copy.deepcopy(target), 2)
    ),
    "ppd, calibrated": lambda target: hf_paradraft.PpdDrafter.from_model(
        with_prompts(copy.deepcopy(target), 2, calibrated=True)
    ),
    "uno": lambda target: with_noise_adapter(target, std=0.05)[1],
    "prompted": lambda target: hf_paradraft.PromptedDrafter(
        with_prompts(near_copy(target, 0.05), 2)
    ),
    "n-grams": lambda target: hf_paradraft.NgramDrafter(),
    "dspark": lambda target: hf_paradraft.DSparkDrafter.from_target(
        target, MASK, 1, 6, 2, markov_rank=4
    ),
    "dflash": lambda target: hf_paradraft.DFlashDrafter.from_target(target, MASK, 1, 7, 2),
    "parallelspec": lambda target: hf_paradraft.ParallelSpecDrafter.from_target(
        target, "medusa", 5
    ),
    "parallelspec, eagle": lambda target: hf_paradraft.ParallelSpecDrafter.from_target(
        target, "eagle", 5
    ),
}
SERVED = {name: [*NAMES] for name in MAKE} | {
    key: ["llama", "qwen3", "mistral-sliding"] for key in ("dspark", "dflash")
}
DRAFTERS = {
    (kind, name): make(TARGETS[name]) for kind, make in MAKE.items() for name in SERVED[kind]
}


class Clock:
    """Time goes by at random: whatever is decided by it, the output must not change."""

    def __init__(self, seed):
        self.random, self.now = torch.Generator().manual_seed(seed), 0.0

    def __call__(self):
        self.now += float(torch.rand((), generator=self.random)) ** 4
        return self.now


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(DRAFTERS)),
    st.lists(st.lists(st.integers(1, EOS - 1), min_size=1, max_size=9), min_size=1, max_size=3),
    st.sampled_from([None, 9, "auto"]),
    st.integers(1, 40),
    st.booleans(),
    st.integers(0, 10_000),
)
def test_never_slower_by_a_random_clock_changes_nothing(which, prompts, size, new, sampled, seed):
    from hf_paradraft.decoding import drafts, growing, loop

    target, drafter = TARGETS[which[1]], DRAFTERS[which]
    length = drafter.config.num_prompt_tokens if isinstance(drafter, hf_paradraft.PpdDrafter) else 6
    drafter.speculation_config = hf_paradraft.SpeculationConfig(length, size, never_slower=True)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {
        "attention_mask": mask,
        "max_new_tokens": new,
        "pad_token_id": 0,
        "do_sample": sampled and len(prompts) == 1,
    }
    torch.manual_seed(seed)
    plain = target.generate(ids, **options)
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(seed)
        for module in (loop, drafts, growing):
            patch.setattr(module, "perf_counter", clock)
        torch.manual_seed(seed)
        assert_lossless(target, drafter, ids, plain=plain, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["pard", "prompted"])
def test_drafting_with_caches_is_draft_logits(kind, name, prompt):
    """What the engine is given behind every prefix of a call is what a forward without caches
    gives.
    """
    target, drafter = TARGETS[name], DRAFTERS[kind, name]
    drafter.speculation_config = hf_paradraft.SpeculationConfig(3, None, never_slower=False)
    seen, start = [], drafter.start_drafting

    def watched(*args):
        drafting = start(*args)
        propose = drafting.propose

        def both(prefixes):
            guesses = propose(prefixes)
            seen.append((prefixes[0].ids.clone(), prefixes[0].room, guesses[0].logits.clone()))
            return guesses

        drafting.propose = both
        return drafting

    drafter.start_drafting = watched
    try:
        target.generate(
            prompt, do_sample=False, max_new_tokens=24, eos_token_id=None, assistant_model=drafter
        )
    finally:
        del drafter.start_drafting
    assert len(seen) > 3
    for ids, room, logits in seen:
        if room:
            expected = drafter.draft_logits(ids, num_draft_tokens=room)
            assert expected.shape == (1, room, logits.shape[-1])
            torch.testing.assert_close(logits, expected[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "name", ["pard", "autoregressive", "ppd", "uno", "dspark", "dflash", "parallelspec"]
)
def test_every_kind_saves_a_folder_that_is_recognised(name, tmp_path):
    target = TARGETS["llama"]
    drafter = MAKE[name](target)
    folder = tmp_path / "drafter"
    drafter.save_pretrained(folder)
    # weights are as readable as what lies beside them
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1
    make_tokenizer().save_pretrained(folder)
    kind = kind_of(saved := DrafterFolder(folder))
    assert (
        kind.kind == drafter.kind == hf_paradraft.AutoDrafter.from_pretrained(folder).kind == name
    )
    kind.check_folder(saved)
    assert dict(describe_kind(kind, saved))["kind"]
    assert kind.card_fields(saved).template.endswith(".jinja")
    for variant in variants_of(drafter, (2,), (6, "auto")):
        assert variant.name.startswith(name)


def test_a_plain_model_is_of_no_kind(tmp_path):
    TARGETS["llama"].save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="names no mask token"):
        kind_of(DrafterFolder(tmp_path))
    assert len({kind.kind for kind in KINDS}) == len(KINDS)


@pytest.fixture
def bigram(monkeypatch):
    """The kind of docs/add-a-drafter.md, in its folder and in the tuple of kinds."""
    page = (Path(__file__).parents[2] / "docs" / "add-a-drafter.md").read_text()
    _, _, *files, _ = re.findall(r"```python\n(.*?)```", page, re.S)  # the last one is a layout
    package = ModuleType("hf_paradraft.drafters.bigram")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, package.__name__, package)
    for name, code in zip(("model", "training"), files, strict=True):
        module = ModuleType(f"{package.__name__}.{name}")
        module.__package__ = package.__name__
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(code, module.__dict__)
        setattr(package, name, module)
    # the line
    monkeypatch.setattr("hf_paradraft.drafters.KINDS", (*KINDS, package.model.BigramDrafter))
    return package


def test_a_new_kind_is_one_folder_and_one_line(bigram, hub, monkeypatch, tmp_path, prompt):
    """It has weights; it is loaded, described, compared, published."""
    from hf_paradraft.bench import Prompt, Settings, bench
    from hf_paradraft.bench.methods import Case, methods_of
    from hf_paradraft.integration.export import Engine, export
    from hf_paradraft.integration.publish import describe, push_folder

    kind, target = bigram.model.BigramDrafter, tiny_model(dtype=torch.float32)
    made = kind.from_target(target)
    made.record_training({"steps": 3, "target": "user/target"})
    made.speculation_config = hf_paradraft.SpeculationConfig(4, 6)
    made.save_pretrained(tmp_path / "drafter")
    drafter = hf_paradraft.AutoDrafter.from_pretrained(
        tmp_path / "drafter", dtype="auto", device_map="auto"
    )
    assert torch.equal(drafter.logits, made.logits)
    assert drafter.paradraft["training"] == {"steps": 3, "target": "user/target"}
    assert drafter.speculation_config == made.speculation_config
    assert (
        hf_paradraft.AutoDrafter.from_pretrained(
            tmp_path / "drafter", dtype="bfloat16"
        ).logits.dtype
        == torch.bfloat16
    )
    last = prompt[0, -1:]
    guess = drafter.propose([hf_paradraft.Prefix(prompt, 1, 0)])[0].logits
    torch.testing.assert_close(guess, target.lm_head(target.get_input_embeddings()(last)))
    assert dict(describe(str(tmp_path / "drafter")))["vocabulary"] == 32
    for size in (None, 6, "auto"):
        drafter.speculation_config = hf_paradraft.SpeculationConfig(3, size, never_slower=False)
        assert_lossless(target, drafter, prompt.repeat(2, 1), max_new_tokens=12)
        assert drafter.last_stats.num_drafted > 3
    methods = methods_of(Case.methods, drafter, None)
    assert [method.name for method in methods][:3] == ["plain", "prompt-lookup", "bigram-chain-k4"]
    assert all(
        row.same
        for row in bench(target, methods, [Prompt("a", prompt)], Settings(8), progress=False)
    )
    push_folder(tmp_path / "drafter", "user/bigram")
    published = hf_paradraft.AutoDrafter.from_pretrained("user/bigram")
    assert isinstance(published, kind)
    card = ModelCard.load("user/bigram").text
    assert "knows which token follows which" in card
    assert "hidden states" not in card
    with monkeypatch.context() as patch:
        patch.setattr("hf_paradraft.drafters.KINDS", KINDS)
        with pytest.raises(
            ValueError, match="model_type 'bigram', which is no kind of drafter here"
        ):
            hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "drafter")
    with pytest.raises(ValueError, match="of use in transformers alone"):
        export(tmp_path / "drafter", tmp_path / "out", Engine.vllm)
    (tmp_path / "drafter" / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"neither a \.safetensors file"):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "drafter")


def test_a_new_kind_is_trained_by_a_run_of_its_own(bigram, folder):
    """It learns which token follows which, and leaves a folder with its record."""
    from hf_paradraft.training.run import train

    arguments = {
        "target": folder / "target",
        "train_file": folder / "rows.jsonl",
        "eval_file": folder / "rows.jsonl",
    }
    options = {
        "max_steps": 20,
        "learning_rate": 0.5,
        "max_length": 64,
        "use_cpu": True,
        "bf16": False,
        "smoothing": 0.01,
    }
    drafter = train(
        bigram.training.BigramTraining, **arguments, **options, output_dir=folder / "bigram"
    )
    again = bigram.model.BigramDrafter.from_pretrained(folder / "bigram")
    assert torch.equal(again.logits, drafter.logits)
    record = again.paradraft["training"]
    untrained = bigram.model.BigramDrafter.from_target(
        AutoModelForCausalLM.from_pretrained(folder / "target")
    )
    assert (record["steps"], record["smoothing"]) == (20, 0.01)
    assert not torch.equal(again.logits, untrained.logits)
    assert record["acceptance"]["mean_emitted"] > 1.1
    with pytest.raises(ValueError, match="smoothing must be"):
        train(
            bigram.training.BigramTraining, **arguments, smoothing=2.0, output_dir=folder / "other"
        )


def test_benchmarks_leave_models_as_they_were(prompt):
    from hf_paradraft.bench import Prompt, Settings, bench
    from hf_paradraft.bench.methods import Case, methods_of

    target, parent = TARGETS["llama"], tiny_model(seed=3)
    drafter = near_copy(target)
    options, config = copy.copy(drafter.speculation_config), parent.generation_config.to_dict()
    methods = methods_of(Case.methods, drafter, parent, (2,), (6,))
    bench(target, methods, [Prompt("a", prompt)], Settings(6), progress=False)
    assert drafter.speculation_config == options
    assert parent.generation_config.to_dict() == config
    assert dataclasses.asdict(drafter.speculation_config) == dataclasses.asdict(options)


FOREIGN = {
    "DSpark": ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 256}, {}),
    "DFlash": ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 0}, {}),
    "EAGLE-3": ({"architectures": ["Qwen3Eagle3Model"]}, {}),
    "DSpark ": ({}, {"markov_head.markov_w1.weight": torch.zeros(2)}),
    "DFlash ": ({}, {"fc.weight": torch.zeros(2), "hidden_norm.weight": torch.zeros(2)}),
    "EAGLE-3 ": (
        {},
        {"fc.weight": torch.zeros(2), "midlayer.input_layernorm.weight": torch.zeros(2)},
    ),
    "P-EAGLE": ({}, {"mask_hidden": torch.zeros(2)}),
    "MTP": ({"speculators_model_type": "mtp"}, {}),
    "XPress": ({"speculators_model_type": "xpress"}, {}),
    "DSpine": ({"architectures": ["DSpineDraftModel"]}, {}),
    "DSpine ": ({}, {"injection.bias": torch.zeros(2)}),
    "DFlash2": ({}, {"candidate_selector.predecessor_codebook": torch.zeros(2)}),
}
NOT_SERVED = {
    "EAGLE-4": ({"architectures": ["LlamaForCausalLMEagle4"]}, {}),
    "EAGLE-4 ": ({}, {"efficient_lm_head.weight": torch.zeros(2), "fc.weight": torch.zeros(2)}),
    "TreeFlash": ({"dflash_config": {"mask_token_id": 1}, "treeflash_config": {"rank": 2}}, {}),
    "LiLiCorr": (
        {"architectures": ["DFlashDraftModel"], "dflash_config": {"lilicorr_enabled": True}},
        {},
    ),
    "DCOCO": ({"architectures": ["DCOCODraftModel"], "dflash_config": {"mask_token_id": 1}}, {}),
    "Orthrus": ({"architectures": ["OrthrusLM"]}, {}),
    "Orthrus ": ({}, {"model.layers.0.self_attn.q_proj_diff.weight": torch.zeros(2)}),
    "Domino": ({"dflash_config": {"projector_type": "domino"}}, {}),
    "no PARD drafter, which is a plain": ({"architectures": ["SomethingElse"]}, {}),
    "has no place for 1 of": ({}, {"model.extra.weight": torch.zeros(2)}),
}


@pytest.mark.parametrize("what", [*FOREIGN, *NOT_SERVED])
def test_folders_of_other_methods_are_refused_by_name(what, tmp_path):
    import json

    from safetensors.torch import load_file, save_file

    hf_paradraft.PardDrafter.from_causal_lm(
        tiny_model("qwen3"), mask_token_id=MASK
    ).save_pretrained(tmp_path)
    config, tensors = {**FOREIGN, **NOT_SERVED}[what]
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    weights = tmp_path / "model.safetensors"
    save_file({**load_file(weights), **tensors}, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=what.strip()):
        hf_paradraft.PardDrafter.from_pretrained(tmp_path)
    with pytest.raises((ValueError, OSError), match=what.strip() if what in NOT_SERVED else None):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path)


def test_a_model_is_saved_as_the_kind_that_was_made_of_it(tmp_path):
    """A model that was saved as one kind is not taken for it when another is made of it."""
    model = tiny_model()
    hf_paradraft.AutoregressiveDrafter(model, hf_paradraft.SpeculationConfig(3)).save_pretrained(
        tmp_path / "first"
    )
    hf_paradraft.PardDrafter.from_causal_lm(model, mask_token_id=MASK).save_pretrained(
        tmp_path / "second"
    )
    again = hf_paradraft.PardDrafter.from_pretrained(tmp_path / "first", mask_token_id=MASK)
    assert again.speculation_config == hf_paradraft.SpeculationConfig()
    again.save_pretrained(tmp_path / "third")
    kinds = [kind_of(DrafterFolder(tmp_path / name)).kind for name in ("first", "second", "third")]
    assert kinds == ["autoregressive", "pard", "pard"]


@pytest.mark.parametrize("kind", [kind for kind in MAKE if kind not in ("prompted", "n-grams")])
def test_every_kind_knows_the_same_arguments(kind, tmp_path):
    """Adapters took anything; causal LMs raised transformers' own errors, of other types."""
    DRAFTERS[kind, "qwen3"].save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="from_pretrained does not know 'num_draft_tokens'"):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path, num_draft_tokens=2)
    with pytest.raises(ValueError, match=r"dtype.*torch"):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path, dtype="nonsense")
    drafter = hf_paradraft.AutoDrafter.from_pretrained(
        tmp_path, use_safetensors=True, dtype="float16", device_map="cpu"
    )
    assert type(drafter).kind == DRAFTERS[kind, "qwen3"].kind


def test_a_wrong_number_is_told_before_anything_is_read():
    """Layers that the user sets, and guesses that are configured beyond those of a drafter."""
    target = tiny_model("llama", num_hidden_layers=7)
    eagle3 = hf_paradraft.Eagle3Drafter.from_target(target)
    eagle3.features = (1, 3)
    with pytest.raises(ValueError, match="reads 3 layers, not 2"):
        eagle3.attach(target)
    masks = hf_paradraft.ParallelSpecDrafter.from_target(target, num_masks=2)
    masks.attach(target)
    masks.speculation_config = hf_paradraft.SpeculationConfig(8)
    with pytest.raises(ValueError, match="8"):
        masks.draft_logits(torch.tensor([[1, 2, 3]]))


def test_attention_that_a_folder_names_is_not_obeyed(tmp_path):
    drafter = hf_paradraft.ParallelSpecDrafter.from_target(TARGETS["llama"], num_masks=2)
    drafter.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["layers"] |= dict.fromkeys(
        ("attn_implementation", "_attn_implementation"), "flash_attention_2"
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_lossless(
        TARGETS["llama"],
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path),
        torch.tensor([[1, 2, 3]]),
        max_new_tokens=5,
    )
