"""Drafters that others publish: every layout loads, guesses what other implementations guess, and changes nothing."""

import functools
import json
from pathlib import Path

import pytest
import torch
from layouts import DRAFTED, KV, LAYERS, LAYOUTS, MASK, D, V, deepspec, nvidia, safeai, specforge_peagle, speculators, write, zlab
from reference import block_logits, eagle_logits
from safetensors.torch import load_file
from tiny import EOS, tiny_model
from transformers import MuseGlimmerAssistantConfig
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

import hf_paradraft as pd
from hf_paradraft.decoding.features import Features
from hf_paradraft.drafters.kinds import kind_of_folder

EXPECTED = load_file(Path(__file__).parent / "expected" / "expected.safetensors")
TARGET = tiny_model("llama", num_hidden_layers=LAYERS)
LENGTH = 12


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """The drafter of a layout, changed before it is written; attached to a target whose embedding and head are the expected."""
    target = tiny_model("llama", num_hidden_layers=LAYERS, tie_word_embeddings=False)
    with torch.no_grad():
        target.get_input_embeddings().weight.copy_(EXPECTED["embedding"])
        target.get_output_embeddings().weight.copy_(EXPECTED["head"])

    def make(name, attach=True):
        folder = write(tmp_path_factory.mktemp("drafter"), *(LAYOUTS[name]() if isinstance(name, str) else name))
        drafter = pd.AutoDrafter.from_pretrained(folder)
        if attach:
            drafter.attach(target)
        return drafter

    return make


def features_of(drafter, length=LENGTH - 1, layers=None):
    """The expected text's features, by the keys that the drafter asks for; further ones at random."""
    rows = EXPECTED["features"][:length].split(D, dim=-1)
    return {key: rows[place % 3][None] + place // 3 for place, key in enumerate(drafter.features)}


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


SPECULATORS = [name for name in LAYOUTS if name.startswith("speculators")]


@pytest.mark.parametrize("name", [name for name in SPECULATORS if f"{name}: second" not in EXPECTED and "P-EAGLE" not in name])
@torch.no_grad()
def test_blocks_are_those_of_speculators(name, load):
    drafter = load(name)
    ids, features = EXPECTED["ids"], features_of(drafter)
    states = drafter.block_states(ids[None, :LENGTH], features)
    skipped = 1 if drafter.block.fill_in else 0
    close(drafter.base_logits(states)[0], EXPECTED[f"{name}: logits"][skipped:])
    if drafter.kind == "dspark":
        before = ids[LENGTH - 1 : LENGTH - 1 + states.shape[1]]
        biases, memory = [], drafter.first_memory(ids[LENGTH - 1], drafter.all_states(ids[None, :LENGTH], features)[0])
        for token, state in zip(before, states[0], strict=True):
            bias, memory = drafter.markov(token, state, memory)
            biases.append(bias)
        close(torch.stack(biases), EXPECTED[f"{name}: bias"][skipped:])
        close(drafter.confidence_logits(states[0], before), EXPECTED[f"{name}: confidence"][skipped:])


@pytest.mark.parametrize("name", [name for name in SPECULATORS if f"{name}: second" in EXPECTED])
@torch.no_grad()
def test_eagle_is_that_of_speculators(name, load):
    """Behind every pair, and one step further behind the true next token."""
    from hf_paradraft.drafters.pairs import read_whole

    drafter = load(name)
    for length in (2, 5, LENGTH):
        ids, features = EXPECTED["ids"][None], features_of(drafter, length - 1)
        reader, logits = read_whole(drafter, ids[:, :length], drafter.fuse(features), 1)
        close(logits[0, 0], EXPECTED[f"{name}: logits"][length - 2])
        further = reader.read_nodes([ids[0, length : length + 1]], [[-1]])
        if "sliding" not in name or length < 5:  # in training their windows stay behind with the row that a step began at
            close(further[0][0], EXPECTED[f"{name}: second"][length - 2])


@torch.no_grad()
def test_p_eagle_is_that_of_speculators(load):
    drafter = load("speculators P-EAGLE")
    logits = drafter.draft_logits(EXPECTED["ids"][None, :LENGTH], features_of(drafter), 4)
    close(logits[0], EXPECTED["speculators P-EAGLE: logits"])


@torch.no_grad()
def test_dflash_is_that_of_transformers(load):
    """Its own class, but for windows, which it counts from the cache."""
    config, tensors = LAYOUTS["transformers"]()
    config |= {"layer_types": ["full_attention"] * 2}
    own = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **{name: value for name, value in config.items() if name not in ("architectures", "model_type", "rope_theta")},
            rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
        )
    ).eval()
    own.load_state_dict(tensors)
    drafter = load((config, tensors))
    ids, features = EXPECTED["ids"][None, :LENGTH], features_of(drafter)
    block = drafter.embed(torch.tensor([[int(ids[0, -1]), MASK, MASK, MASK, MASK]]))
    context = torch.cat([features[key] for key in drafter.features], dim=-1)
    states = own(noise_embeds=block, context_hidden_states=context, use_cache=False).last_hidden_state
    close(drafter.draft_logits(ids, features), states[:, 1:] @ EXPECTED["head"].T)


BLOCKS = [
    name for name in LAYOUTS if name.startswith(("z-lab", "SpecForge DSpark", "DeepSpec D", "DeepSpec g", "DeepSpec r", "trans"))
]


@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_blocks_are_the_formulas(name, load):
    drafter = load(name)
    config, tensors = LAYOUTS[name]()
    features = features_of(drafter)
    context = torch.cat([features[key][0] for key in drafter.features], dim=-1)
    logits = block_logits(config, tensors, EXPECTED["ids"][:LENGTH], context, EXPECTED["embedding"], EXPECTED["head"])
    close(drafter.draft_logits(EXPECTED["ids"][None, :LENGTH], features)[0], logits)


@pytest.mark.parametrize("name", ["SafeAI", "SafeAI, whole", "NVIDIA", "DeepSpec EAGLE-3", "speculators EAGLE-3.1"])
@torch.no_grad()
def test_eagle_is_the_formulas(name, load):
    drafter = load(name)
    config, tensors = LAYOUTS[name]()
    features = features_of(drafter)
    context = torch.cat([features[key][0] for key in drafter.features], dim=-1)
    logits = eagle_logits(config, tensors, EXPECTED["ids"][:LENGTH], context, EXPECTED["embedding"], 3)
    close(drafter.draft_logits(EXPECTED["ids"][None, :LENGTH], features, 3)[0], logits)


READS = {
    "z-lab": (1, 3, 5),
    "z-lab, default layers": (1, 5),
    "DeepSpec DSpark": (-1, 2, 6),
    "speculators DFlash": (1, 3, 7),
    "transformers": (1, 3, 5),
    "SafeAI": (1, 3, 4),
    "NVIDIA": (1, 3, 4),
    "NVIDIA, inputs": (1, 3, 4),
    "DeepSpec EAGLE-3": (1, 2, 3, 5, 6),
    "speculators EAGLE-3": (1, 3, 4),
    "SpecForge P-EAGLE": (1, 3, 4),
}


@pytest.mark.parametrize("name", READS)
def test_which_layers_are_read(name, load):
    drafter = load(name)
    assert drafter.features == drafter.needs(TARGET) == READS[name]


PROMPTS = torch.tensor([[0, 0, 0, 1, 2], [1, 2, 3, 4, 5], [0, 9, 8, 7, 6]])
SEEN = (PROMPTS != 0).long()


SOME = ("z-lab, sliding", "DeepSpec rnn", "SafeAI", "speculators P-EAGLE")
SLOW = pytest.mark.slow
CHANGED = [
    *(pytest.param(name, None, marks=() if name in SOME else SLOW) for name in LAYOUTS),
    *(pytest.param(name, 9, marks=() if name in SOME else SLOW) for name in LAYOUTS),
    *((name, "auto") for name in SOME),
]


@functools.cache
def plain_text(rows):
    """What the target says behind the prompts, and how it was asked."""
    options = {
        "do_sample": False,
        "max_new_tokens": 16,
        "pad_token_id": 0,
        "attention_mask": SEEN[list(rows)],
        "eos_token_id": None,
    }
    return TARGET.generate(PROMPTS[list(rows)], **options), options


@pytest.mark.parametrize(("name", "size"), CHANGED)
def test_every_layout_changes_nothing(name, size, load):
    """A ragged batch; a row alone in trees."""
    drafter = load(name, attach=False)
    drafter.speculation_config = pd.SpeculationConfig(3, size, never_slower=size == "auto")
    for rows in [(0, 1, 2)] if size is None else [(1,)] if name not in SOME else [(1,), (0, 1, 2)]:
        plain, options = plain_text(rows)
        assert torch.equal(plain, TARGET.generate(PROMPTS[list(rows)], **options, assistant_model=drafter))
        assert drafter.last_stats.num_drafted > 0


def guesses_of_a_call(drafter, target, ids, **options):
    """What the engine was given, with the prefixes that it had asked about."""
    seen, start = [], drafter.start_drafting

    def watched(*args):
        drafting = start(*args)
        propose = drafting.propose

        def both(prefixes):
            guesses = propose(prefixes)
            seen.extend((prefix.ids.clone(), prefix.room, guess) for prefix, guess in zip(prefixes, guesses, strict=True))
            return guesses

        drafting.propose = both
        return drafting

    drafter.start_drafting = watched
    try:
        options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0, **options}
        target.generate(ids, assistant_model=drafter, **options)
    finally:
        del drafter.start_drafting
    return seen


@torch.no_grad()
def features_behind(drafter, target, ids):
    features = Features(target, drafter.needs(target))
    with features:
        target(ids, use_cache=False)
        return {key: states[:, :-1] for key, states in features.rows.items()}


PIECES = [*(pytest.param(name, None, marks=() if name in SOME else SLOW) for name in LAYOUTS), *((name, 2) for name in SOME)]


@pytest.mark.parametrize(("name", "piece"), PIECES)
def test_caches_give_what_whole_prefixes_give(name, piece, load):
    """Over rounds, rejections, trees and ragged rows, with prompts in pieces."""
    drafter = load(name, attach=False)
    drafter.speculation_config = pd.SpeculationConfig(3, 7, never_slower=False)
    more = {"attention_mask": SEEN, "max_new_tokens": 10} if piece is None else {"prefill_chunk_size": piece}
    seen = guesses_of_a_call(drafter, TARGET, PROMPTS if piece is None else PROMPTS[1:2], **more)
    checked = 0
    for ids, room, guess in seen:
        if not room or not len(guess.logits):
            continue
        count = 1 if guess.extend is not None else room
        with torch.no_grad():
            features = features_behind(drafter, TARGET, ids)
            expected = drafter.draft_logits(ids, features, count)[0]
        given = guess.logits[:count]
        if guess.bias is not None:  # draft_logits goes along the most probable tokens
            token, states = ids[0, -1:], [None]
            for place in range(len(given)):
                bias, states = guess.bias(torch.tensor([place]), token, states)
                row = guess.logits[place] + bias[0]
                torch.testing.assert_close(row, expected[place], rtol=1e-3, atol=1e-3)
                best = row.argmax()
                token = (best if guess.vocabulary is None else guess.vocabulary[best])[None]
        else:
            torch.testing.assert_close(given, expected[: len(given)], rtol=1e-3, atol=1e-3)
        checked += 1
    assert checked > 10


def changed(name, what):
    """A layout with one of the silent errors of the field in it."""
    config, tensors = LAYOUTS[name]()
    what(config)
    return config, tensors


WRONG = {
    "a layer off by one": ("z-lab", lambda config: config["dflash_config"].update(target_layer_ids=[2, 4, 6])),
    "inputs taken for outputs": ("speculators DFlash", lambda config: config.update(aux_hidden_state_layer_ids=[3, 5, 8])),
    "features in another order": ("z-lab", lambda config: config["dflash_config"].update(target_layer_ids=[3, 1, 5])),
    "another anchor": ("speculators DSpark", lambda config: config.update(sample_from_anchor=False)),
    "no window": ("z-lab, sliding", lambda config: config.update(layer_types=["full_attention"] * 2)),
    "a causal block": ("z-lab", lambda config: config.update(is_causal=True)),
    "a longer block": ("z-lab", lambda config: config["dflash_config"].update(block_size=6)),
    "the raw state fed back": ("speculators EAGLE-3.1", lambda config: config.update(norm_output=False)),
    "another residual": ("speculators EAGLE-3", lambda config: config.update(norm_before_residual=False)),
}


@pytest.mark.parametrize("error", WRONG)
@torch.no_grad()
def test_silent_errors_change_logits(error, load):
    name, what = WRONG[error]
    right, wrong = load(name, attach=False), load(changed(name, what), attach=False)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])
    rows = []
    for drafter in (right, wrong):
        drafter.attach(TARGET)
        rows.append(drafter.draft_logits(ids, features_behind(drafter, TARGET, ids), 3))
    assert (rows[0] - rows[1]).abs().max() > 0.05


@torch.no_grad()
def test_features_of_another_position_change_logits(load):
    for name in ("z-lab", "speculators EAGLE-3", "speculators P-EAGLE"):
        drafter = load(name, attach=False)
        drafter.attach(TARGET)
        ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
        features = features_behind(drafter, TARGET, ids)
        rolled = {key: states.roll(1, 1) for key, states in features.items()}
        assert (drafter.draft_logits(ids, features, 2) - drafter.draft_logits(ids, rolled, 2)).abs().max() > 0.05


@pytest.mark.parametrize("name", LAYOUTS)
def test_saved_in_the_layout_of_speculators(name, load, tmp_path):
    drafter = load(name)
    ids, features = EXPECTED["ids"][None, :LENGTH], features_of(drafter)
    if name in ("z-lab, sliding", "z-lab, use_swa", "z-lab, causal", "transformers"):
        with pytest.raises(ValueError, match="cannot say"):
            drafter.save_pretrained(tmp_path)
        return
    drafter.save_pretrained(tmp_path)
    again = pd.AutoDrafter.from_pretrained(tmp_path)
    again.borrowed, again.features = drafter.borrowed, drafter.features
    assert again.speculation_config == drafter.speculation_config
    assert torch.equal(drafter.draft_logits(ids, features, 3), again.draft_logits(ids, features, 3))
    kind = kind_of_folder(tmp_path)
    kind.check(tmp_path)
    assert dict(kind.describe(tmp_path))["kind"]
    assert not {"embed_tokens.weight"} & load_file(tmp_path / "model.safetensors").keys() or drafter.embedding is not None


def test_an_anchor_that_is_not_written_is_probed(load, caplog, tmp_path):
    config, tensors = LAYOUTS["speculators DSpark"]()
    del config["sample_from_anchor"]
    drafter = load((config, tensors), attach=False)
    assert drafter.block.fill_in is None
    drafter.attach(TARGET)
    assert drafter.block.fill_in in (True, False)
    assert any("probed" in value for _, value in drafter.notes)
    verdict = drafter.block.fill_in
    drafter.save_pretrained(tmp_path)
    assert pd.AutoDrafter.from_pretrained(tmp_path).block.fill_in is verdict


def test_the_usual_pickle(load, tmp_path, monkeypatch):
    config, tensors = LAYOUTS["SafeAI"]()
    write(tmp_path / "pickled", config, tensors, pickled=True)
    drafter, plain = pd.AutoDrafter.from_pretrained(tmp_path / "pickled"), load("SafeAI")
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, drafter.state_dict()[name])

    class Evil:
        def __reduce__(self):
            return print, ("ran",)

    write(tmp_path / "evil", config, {})
    (tmp_path / "evil" / "model.safetensors").unlink()
    torch.save({"a": Evil()}, tmp_path / "evil" / "pytorch_model.bin")
    with pytest.raises(OSError, match="can be read safely"):
        pd.Eagle3Drafter.from_pretrained(tmp_path / "evil")
    with pytest.raises(OSError, match="save_pretrained it"):
        kind_of_folder(tmp_path / "pickled").check(tmp_path / "pickled")


def without(name, *tensors, config=None):
    made, weights = LAYOUTS[name]()
    return {**made, **(config or {})}, {key: value for key, value in weights.items() if key not in tensors}


def with_tensors(name, **tensors):
    config, weights = LAYOUTS[name]()
    return config, {**weights, **{key.replace("__", "."): value for key, value in tensors.items()}}


REFUSED = {
    "lacks 1 of its weights": (lambda: without("z-lab", "norm.weight"), OSError),
    "no place in it": (lambda: with_tensors("z-lab", aux__weight=torch.zeros(2)), ValueError),
    "fc reads 96 numbers": (lambda: zlab({"target_layer_ids": [1, 3]}), ValueError),
    "fc reads 96 numbers, and 2": (
        lambda: without("speculators EAGLE-3", config={"eagle_aux_hidden_state_layer_ids": [1, 2]}),
        ValueError,
    ),
    "no table of offsets": (lambda: with_tensors("speculators EAGLE-3", d2t=torch.tensor(DRAFTED)), ValueError),
    "d2t and t2d": (lambda: with_tensors("SafeAI", t2d=torch.ones(V, dtype=torch.bool)), ValueError),
    "has no table of them": (lambda: without("speculators DFlash", "d2t", "t2d"), OSError),
    "names no mask token": (lambda: zlab({"mask_token_id": None}), ValueError),
    "P-EAGLE drafter's config names no mask": (
        lambda: without("speculators P-EAGLE", config={"mask_token_id": None}),
        ValueError,
    ),
    "no layers \\(aux_hidden": (lambda: without("speculators DFlash", config={"aux_hidden_state_layer_ids": None}), ValueError),
    "neither its layers": (
        lambda: without("z-lab, default layers", config={"num_target_layers": None}),
        ValueError,
    ),
    "is interleaved": (lambda: zlab(is_neox_style=False), ValueError),
    "Domino": (lambda: zlab({"projector_type": "domino"}), ValueError),
    "DFlash2": (lambda: with_tensors("z-lab", candidate_selector__predecessor_codebook=torch.zeros(2)), ValueError),
    "XPress": (lambda: without("speculators DFlash", config={"speculators_model_type": "xpress"}), ValueError),
    "Gemma4": (lambda: without("DeepSpec DSpark", config={"architectures": ["Gemma4DSparkModel"]}), ValueError),
    "markov_rank=0": (lambda: without("speculators DSpark", config={"markov_rank": 0}), ValueError),
    "no block_size": (lambda: zlab({"block_size": None}), ValueError),
    "use_aux_hidden_state": (lambda: safeai(eagle_config={"use_aux_hidden_state": False}), ValueError),
    "EAGLE-1 or EAGLE-2": (lambda: ({"architectures": ["X"]}, {"fc.weight": torch.zeros(D, 2 * D)}), ValueError),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused_when_it_is_loaded(message, load):
    made, error = REFUSED[message]
    with pytest.raises(error, match=message):
        load(made(), attach=False)


def test_what_is_refused_when_it_is_attached(load):
    drafter = load("z-lab", attach=False)
    with pytest.raises(ValueError, match="hidden states of 32 numbers"):
        drafter.attach(tiny_model("llama", num_hidden_layers=LAYERS, hidden_size=64))
    with pytest.raises(ValueError, match="target of 8 layers, and this one has 4"):
        drafter.attach(tiny_model("llama", num_hidden_layers=4))
    with pytest.raises(ValueError, match="more than 7 layers"):
        load("speculators DFlash", attach=False).attach(tiny_model("llama", num_hidden_layers=6))
    with pytest.raises(ValueError, match="count outputs"):
        load(nvidia([0, 2, 7]), attach=False).attach(TARGET)
    with pytest.raises(ValueError, match="ids up to"):
        load("SafeAI", attach=False).attach(tiny_model("llama", num_hidden_layers=LAYERS, vocab_size=20))
    drafter.speculation_config.num_draft_tokens = 9
    with pytest.raises(ValueError, match="guesses 4 tokens at most"):
        TARGET.generate(torch.tensor([[1, 2]]), assistant_model=drafter, max_new_tokens=4)
    with pytest.raises(ValueError, match="attach"):
        load("z-lab", attach=False).draft_logits(torch.tensor([[1, 2]]), {key: torch.zeros(1, 1, D) for key in (1, 3, 5)})
    with pytest.raises(ValueError, match="pass features"):
        drafter.draft_logits(torch.tensor([[1, 2]]))


def test_never_with_remote_code(load, tmp_path):
    write(tmp_path, *zlab())
    with pytest.raises(ValueError, match="remote code"):
        pd.AutoDrafter.from_pretrained(tmp_path, trust_remote_code=True)


def test_the_target_is_not_copied(load):
    drafter = load("z-lab")
    assert sum(parameter.numel() for parameter in drafter.parameters()) == sum(t.numel() for t in zlab()[1].values())
    assert drafter.borrowed.head.weight.data_ptr() != 0
    assert not any("borrowed" in name for name, _ in drafter.named_modules())


@pytest.mark.parametrize(
    "make",
    [lambda: tiny_model("qwen3", num_hidden_layers=LAYERS), lambda: tiny_model("mistral-sliding", num_hidden_layers=LAYERS)],
)
@pytest.mark.parametrize("name", ["DeepSpec DSpark", "speculators EAGLE-3"])
def test_other_targets(make, name, load):
    target, drafter = make(), load(name, attach=False)
    drafter.speculation_config = pd.SpeculationConfig(3, 8, never_slower=False)
    ids = torch.tensor([list(range(1, 25))])
    options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": EOS}
    assert torch.equal(target.generate(ids, **options), target.generate(ids, **options, assistant_model=drafter))


@pytest.mark.slow
def test_confidences_cut_chains(load):
    """A drafter that is sure of nothing drafts little, where never_slower asks for it; the output stays."""
    config, tensors = LAYOUTS["DeepSpec DSpark"]()
    lengths = {}
    for bias in (-20.0, 20.0):
        tensors["confidence_head.proj.bias"] = torch.tensor([bias])
        tensors["confidence_head.proj.weight"] = torch.zeros_like(tensors["confidence_head.proj.weight"])
        drafter = load((config, tensors), attach=False)
        drafter.speculation_config = pd.SpeculationConfig(4, None, trace=True)
        options = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": None}
        plain = TARGET.generate(PROMPTS[1:2], **options)
        assert torch.equal(plain, TARGET.generate(PROMPTS[1:2], **options, assistant_model=drafter))
        guess = drafter.start_drafting(TARGET, 60).guess(torch.zeros(4, D), torch.tensor(1), 4)
        assert guess.confidences(torch.arange(4)) == pytest.approx([1 / (1 + 2.718281828**-bias)] * 4)
        lengths[bias] = drafter.last_stats.num_drafted
    assert lengths[-20.0] <= lengths[20.0]


def test_sizes_of_the_tiny_drafters():
    """The layouts' tensors have the shapes that publishers write."""
    assert deepspec()[1]["markov_head.markov_w1.weight"].shape == (V, 4)
    assert speculators()[1]["lm_head.weight"].shape == (len(DRAFTED), D)
    assert safeai()[1]["midlayer.self_attn.k_proj.weight"].shape == (KV * 8, 2 * D)
    assert specforge_peagle()[1]["mask_hidden"].shape == (1, 3 * D)
    assert json.dumps(zlab()[0])
