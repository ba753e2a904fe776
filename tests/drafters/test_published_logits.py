"""Published drafters guess what other implementations guess, and read what their layouts name."""

import pytest
import torch
from layouts import LAYOUTS
from layouts.eagle import safeai
from layouts.parts import LAYERS, MASK, D, V
from published import EXPECTED, LENGTH, TARGET, block_states, features_of
from reference.blocks import block_logits
from reference.eagle import eagle_logits
from reference.gemma4 import gemma4_block_logits, gemma4_eagle_logits
from transformers import Gemma2Config, Gemma2ForCausalLM, MuseGlimmerAssistantConfig
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import (
    MuseGlimmerAssistantModel,
)

import hf_paradraft


def close(logits, expected):
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4, check_dtype=False)


SPECULATORS = [name for name in LAYOUTS if name.startswith("speculators")]


@pytest.mark.parametrize(
    "name",
    [name for name in SPECULATORS if f"{name}: second" not in EXPECTED and "P-EAGLE" not in name],
)
@torch.no_grad()
def test_blocks_are_those_of_speculators(name, load):
    drafter = load(name)
    ids, features = EXPECTED["ids"], features_of(drafter)
    whole = block_states(drafter, ids[None, :LENGTH], features)[0]
    states = drafter.guesses(whole)[None]
    skipped = 1 if drafter.config.fill_in else 0
    close(drafter.base_logits(states)[0], EXPECTED[f"{name}: logits"][skipped:])
    if drafter.kind == "dflash2":
        before = ids[LENGTH - 1 : LENGTH - 1 + states.shape[1]]
        candidates, scores = (
            EXPECTED[f"{name}: {what}"][skipped:] for what in ("candidates", "scores")
        )
        given = drafter.base_logits(states)[0]
        close(
            given.gather(-1, candidates) + drafter.selector(before, states[0], candidates), scores
        )
        assert sorted(candidates[0].tolist()) == sorted(given[0].topk(6).indices.tolist())
    if drafter.kind == "xpress":
        known = ids[LENGTH - 1 : LENGTH - 1 + states.shape[1]]
        bias = drafter.bias_after(ids[LENGTH - 2 : LENGTH], whole, drafter.base_logits(states)[0])
        memories, rows = [None], []
        for depth, token in enumerate(known):
            row, memories = bias(torch.tensor([depth]), token[None], memories)
            rows.append(row[0])
        close(torch.stack(rows), EXPECTED[f"{name}: bias"][skipped:])
    if drafter.kind == "dspark":
        before = ids[LENGTH - 1 : LENGTH - 1 + states.shape[1]]
        biases = []
        memory = drafter.first_memory(ids[LENGTH - 1], whole)
        for token, state in zip(before, states[0], strict=True):
            bias, memory = drafter.markov(token, state, memory)
            biases.append(bias)
        close(torch.stack(biases), EXPECTED[f"{name}: bias"][skipped:])
        close(
            drafter.confidence_logits(states[0], before), EXPECTED[f"{name}: confidence"][skipped:]
        )


@pytest.mark.parametrize("name", [name for name in SPECULATORS if f"{name}: second" in EXPECTED])
@torch.no_grad()
def test_eagle_is_that_of_speculators(name, load):
    """Behind every pair, and one step further behind the true next token."""
    drafter = load(name)
    for length in (2, 5, LENGTH):
        ids, features = EXPECTED["ids"][None], features_of(drafter, length - 1)
        drafting = drafter.drafting(hf_paradraft.SpeculationConfig(), 0)
        logits = drafting.logits_after_texts(ids[:, :length], features, 1)
        close(logits[0, 0], EXPECTED[f"{name}: logits"][length - 2])
        further = drafting.extend([ids[0, length : length + 1]], [[-1]])
        # in training their windows stay behind with the row that a step began at
        if "sliding" not in name or length < 5:
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
    theirs = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **{
                name: value
                for name, value in config.items()
                if name not in ("architectures", "model_type", "rope_theta")
            },
            rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
        )
    ).eval()
    theirs.load_state_dict(tensors)
    drafter = load((config, tensors))
    ids, features = EXPECTED["ids"][None, :LENGTH], features_of(drafter)
    block = drafter.embed(torch.tensor([[int(ids[0, -1]), MASK, MASK, MASK, MASK]]))
    context = torch.cat([features[key] for key in drafter.features], dim=-1)
    states = theirs(
        noise_embeds=block, context_hidden_states=context, use_cache=False
    ).last_hidden_state
    close(drafter.draft_logits(ids, features), states[:, 1:] @ EXPECTED["head"].T)


FAMILIES = ("z-lab", "DSpine", "XPress", "SpecForge DS", "LFM2", "JetSpec", "DeepSpec", "trans")
BLOCKS = [
    name
    for name in LAYOUTS
    if name.startswith(FAMILIES) and "EAGLE" not in name and "Gemma" not in name
]


@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_blocks_are_the_formulas(name, load):
    drafter = load(name)
    config, tensors = LAYOUTS[name]()
    features = features_of(drafter)
    context = torch.cat([features[key][0] for key in drafter.features], dim=-1)
    logits = block_logits(
        config, tensors, EXPECTED["ids"][:LENGTH], context, EXPECTED["embedding"], EXPECTED["head"]
    )
    close(drafter.draft_logits(EXPECTED["ids"][None, :LENGTH], features)[0], logits)


@pytest.mark.parametrize(
    "name",
    [
        "SafeAI",
        "SafeAI, interleaved",
        "SafeAI, whole",
        "NVIDIA",
        "DeepSpec EAGLE-3",
        "speculators EAGLE-3.1",
    ],
)
@torch.no_grad()
def test_eagle_is_the_formulas(name, load):
    drafter = load(name)
    config, tensors = LAYOUTS[name]()
    features = features_of(drafter)
    context = torch.cat([features[key][0] for key in drafter.features], dim=-1)
    logits = eagle_logits(
        config, tensors, EXPECTED["ids"][:LENGTH], context, EXPECTED["embedding"], 3
    )
    close(drafter.draft_logits(EXPECTED["ids"][None, :LENGTH], features, 3)[0], logits)


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if "Gemma 4" in name])
@torch.no_grad()
def test_layers_of_gemma_4_are_the_formulas(name, attach, load):
    """By itself, and attached to a target without a cap."""
    drafter = load(name, attach)
    config, tensors = LAYOUTS[name]()
    features = features_of(drafter)
    context = torch.cat([features[key][0] for key in drafter.features], dim=-1)
    if "EAGLE" in name:
        logits = gemma4_eagle_logits(config, tensors, EXPECTED["ids"][:LENGTH], context, 4)
    else:
        logits = gemma4_block_logits(config, tensors, EXPECTED["ids"][:LENGTH], context)
    close(drafter.draft_logits(EXPECTED["ids"][None, :LENGTH], features, 4)[0], logits)


@pytest.mark.parametrize("name", ["DeepSpec Gemma 4 DSpark", "DeepSpec Gemma 4 EAGLE-3"])
def test_newer_configs_of_gemma_4_list_layers(name, load):
    """transformers writes sizes of full layers by layer, of the target's layers here."""
    config, tensors = LAYOUTS[name]()
    wide = {
        "head_dim": config.pop("global_head_dim"),
        "num_key_value_heads": config.pop("num_global_key_value_heads"),
    }
    newer = load(({**config, "per_layer_config": {"5": wide, "7": wide}}, tensors))
    older = load(name)
    ids, features = EXPECTED["ids"][None, :LENGTH], features_of(older)
    close(newer.draft_logits(ids, features, 3), older.draft_logits(ids, features, 3))


@torch.no_grad()
def test_other_heads_are_capped_as_the_target_is(load):
    """SafeAI's configs may repeat a target's cap; the target's own counts."""
    plain, named = load("SafeAI"), load(safeai(final_logit_softcapping=3.0))
    ids, features = EXPECTED["ids"][None, :LENGTH], features_of(plain)
    close(plain.draft_logits(ids, features, 3), named.draft_logits(ids, features, 3))


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
def test_each_layout_reads_the_layers_that_it_names(name, load):
    drafter = load(name)
    assert drafter.features == drafter.needs(TARGET) == READS[name]


@torch.no_grad()
def test_whose_embedding_and_whose_cap_is_said_by_the_layout(load, tmp_path):
    """speculators copies the table of its verifier as it is, and caps nothing; others ask the
    target's own module.
    """
    config = Gemma2Config(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=2.0,
    )
    target, ids, states = Gemma2ForCausalLM(config).eval(), torch.arange(6), torch.randn(3, D)
    scaled, raw = target.get_input_embeddings()(ids), target.get_input_embeddings().weight[ids]
    assert not torch.allclose(scaled, raw)
    for name, embedded, softcap in (
        ("speculators DFlash", raw, None),
        ("speculators DFlash2", raw, None),
        ("speculators EAGLE-3", raw, None),
        ("z-lab DFlash2", raw, None),
        ("z-lab", scaled, 2.0),
    ):
        drafter = load(name, attach=False)
        drafter.attach(target)
        head = drafter.head or target.get_output_embeddings()
        for again in range(2):
            close(drafter.embed(ids), embedded)
            plain, cap = head(states) * (drafter.logit_scale or 1), drafter.softcap or softcap
            expected = plain if cap is None else cap * torch.tanh(plain / cap)
            close(drafter.logits(states)[:, : expected.shape[1]], expected)
            if again == 0 and name != "z-lab DFlash2":  # whose windows no other layout can say
                drafter.save_pretrained(tmp_path / name)
                drafter = hf_paradraft.AutoDrafter.from_pretrained(tmp_path / name)
                drafter.attach(target)
