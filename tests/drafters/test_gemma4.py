"""Gemma 4 assistants: guesses against transformers' own generator, and whatever a round may
bring.
"""

import inspect
import json

import pytest
import torch
from checkpoints import gemma4_assistant, gemma4_target
from lossless import assert_lossless
from published import check_guesses, guesses_of_a_call
from tiny import EOS, tiny_model
from transformers import AutoModelForCausalLM, Gemma4AssistantForCausalLM
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

import hf_paradraft
from hf_paradraft import AutoDrafter, Gemma4Drafter, SpeculationConfig
from hf_paradraft.integration.publish import describe
from hf_paradraft.protocol.drafter import KeyValues

OLDER = "model_kwargs" in inspect.signature(SinglePositionMultiTokenCandidateGenerator).parameters
compared = pytest.mark.skipif(
    OLDER,
    reason="this transformers makes its generator of other things: 5.24's is what is compared with",
)
PROMPTS = torch.tensor([[0, 0, 0, 5, 9], [1, 2, 3, 4, 5], [0, 9, 8, 7, 6]])
SEEN = (PROMPTS != 0).long()


@torch.no_grad()
def behind(target, drafter, ids):
    """What the target's own forward over all but the newest token brings: for transformers'
    generator, and as features.
    """
    outputs = target(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
    features = {"normed": outputs.hidden_states[-1]}
    for kind, layer in drafter.sources(target).items():
        keys, values = outputs.shared_kv_states[kind]
        features[KeyValues(layer)] = torch.cat(
            [keys.transpose(1, 2).flatten(2), values.transpose(1, 2).flatten(2)], dim=-1
        )
    return outputs, features


def theirs(target, model, ids, outputs, count):
    model.generation_config.num_assistant_tokens = count
    generation_config = target.generation_config
    generation_config.max_length = 64
    generator = SinglePositionMultiTokenCandidateGenerator(
        model, target.get_input_embeddings(), generation_config
    )
    return generator.get_candidates(
        ids, {"attention_mask": torch.ones_like(ids)}, outputs, False, 0
    )


@compared
@pytest.mark.parametrize("centroids", [False, True])
@pytest.mark.parametrize("window", [64, 4])
@pytest.mark.parametrize("length", [2, 5, 14])
@torch.no_grad()
def test_guesses_are_those_of_transformers(length, window, centroids):
    """Logits, and the tokens of a chain, also where windows end within the text."""
    target, model = gemma4_target(window), gemma4_assistant(centroids, window)
    drafter = Gemma4Drafter(model)
    drafter.attach(target)
    ids = torch.randint(1, EOS, (1, length), generator=torch.Generator().manual_seed(length))
    outputs, features = behind(target, drafter, ids)
    chain, expected = theirs(target, model, ids, outputs, 5)
    logits = drafter.draft_logits(ids, features, 5)
    guessed = logits.isfinite()
    # three of eight centroids, of four tokens each
    assert guessed.all() or (centroids and guessed.sum(-1).eq(12).all())
    torch.testing.assert_close(logits[guessed], expected[guessed])
    assert logits.argmax(-1).tolist() == chain[:, length:].tolist()


@compared
@pytest.mark.parametrize("wrong", ["position", "window", "state", "order"])
@torch.no_grad()
def test_another_reading_is_told_apart(wrong):
    target, model = gemma4_target(4), gemma4_assistant(False, 4)
    drafter = Gemma4Drafter(model)
    drafter.attach(target)
    ids = torch.randint(1, EOS, (1, 14), generator=torch.Generator().manual_seed(1))
    outputs, features = behind(target, drafter, ids)
    _, expected = theirs(target, model, ids, outputs, 3)
    if wrong == "window":
        model.config.text_config.sliding_window = 3
    if wrong == "state":
        features["normed"] = features["normed"].roll(1, 1)
    if wrong == "order":
        key = next(key for key in features if isinstance(key, KeyValues))
        features[key] = features[key].roll(1, 1)
    if wrong == "position":
        model.model.register_forward_pre_hook(
            lambda _, args, given: (args, given | {"position_ids": given["position_ids"] + 1}),
            with_kwargs=True,
        )
    assert (drafter.draft_logits(ids, features, 3) - expected).abs().max() > 1e-3


# any two of them together; all three at night
SHAPES = [
    pytest.param(
        window, shared, size, marks=pytest.mark.nightly if (row + column + place) % 2 else ()
    )
    for row, window in enumerate((64, 6))
    for column, shared in enumerate((0, 2))
    for place, size in enumerate((None, 7, "auto"))
]


@pytest.mark.parametrize(("window", "shared", "size"), SHAPES)
def test_outputs_are_the_targets_and_guesses_those_of_whole_texts(window, shared, size):
    """In ragged batches, chains and trees, over rejections; caches of rounds keep what a window
    would drop.
    """
    target, drafter = gemma4_target(window, shared), Gemma4Drafter(gemma4_assistant(window=window))
    drafter.speculation_config = SpeculationConfig(4, size, never_slower=False)
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "attention_mask": SEEN}
    assert_lossless(target, drafter, PROMPTS, max_new_tokens=24, **options)
    assert drafter.last_stats.num_drafted > 0
    if window == 64:
        assert (
            check_guesses(drafter, target, guesses_of_a_call(drafter, target, PROMPTS, **options))
            > 10
        )
    target.generation_config.prefill_chunk_size = (
        2  # of which one is padding alone in the first row
    )
    assert_lossless(target, drafter, PROMPTS, max_new_tokens=12, **options)


@pytest.mark.parametrize("size", [None, 7])
def test_static_caches_show_what_was_written(size):
    target, drafter = gemma4_target(), Gemma4Drafter(gemma4_assistant())
    drafter.speculation_config = SpeculationConfig(4, size, never_slower=False)
    options = {"attention_mask": SEEN, "cache_implementation": "static"}
    assert (
        check_guesses(drafter, target, guesses_of_a_call(drafter, target, PROMPTS, **options)) > 10
    )


def test_a_processor_may_run_the_target_for_its_own_ends():
    target, drafter = gemma4_target(), Gemma4Drafter(gemma4_assistant())
    drafter.speculation_config = SpeculationConfig(4, 7, never_slower=False)
    options = {
        "do_sample": False,
        "max_new_tokens": 12,
        "pad_token_id": 0,
        "eos_token_id": None,
        "guidance_scale": 1.5,
    }
    assert_lossless(target, drafter, PROMPTS[1:2], **options)


def test_a_seed_writes_its_own_text():
    target, drafter = gemma4_target(), Gemma4Drafter(gemma4_assistant())
    drafter.speculation_config = SpeculationConfig(3, 5, never_slower=False)
    assert_lossless(
        target,
        drafter,
        PROMPTS,
        seed=5,
        do_sample=True,
        max_new_tokens=16,
        attention_mask=SEEN,
        pad_token_id=0,
    )


@pytest.mark.parametrize("centroids", [False, True])
def test_it_is_loaded_saved_and_described(centroids, tmp_path):
    target, model = gemma4_target(), gemma4_assistant(centroids)
    model.save_pretrained(tmp_path / "first")
    drafter = AutoDrafter.from_pretrained(tmp_path / "first", dtype=torch.float64)
    assert isinstance(drafter, Gemma4Drafter)
    assert dict(describe(tmp_path / "first"))["kind"] == "Gemma 4 assistant"
    drafter.speculation_config = SpeculationConfig(6, None)
    drafter.save_pretrained(tmp_path / "second")
    again = AutoDrafter.from_pretrained(tmp_path / "second", dtype=torch.float64)
    assert again.speculation_config.num_draft_tokens == 6
    # a plain one still
    assert (
        type(AutoModelForCausalLM.from_pretrained(tmp_path / "second"))
        is Gemma4AssistantForCausalLM
    )
    ids = torch.randint(1, EOS, (1, 6))
    rows = []
    for one in (Gemma4Drafter(model), drafter, again):
        one.attach(target)
        rows.append(one.draft_logits(ids, behind(target, one, ids)[1], 3))
    # its scale is kept in float32
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rows[1], rows[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny_model(), "keys and values of Gemma 4, and the target is of type llama"),
        (
            lambda: tiny_model("gemma4", hidden_size=48),
            "states of 32 numbers, and the target's have 48",
        ),
        (
            lambda: tiny_model("gemma4", num_key_value_heads=4),
            "2 heads of 8 numbers in sliding_attention layers",
        ),
        (lambda: tiny_model("gemma4", vocab_size=900), "guesses 32 ids, and the target has 900"),
    ],
)
def test_another_target_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        Gemma4Drafter(gemma4_assistant()).attach(make())


@pytest.mark.parametrize(
    ("changes", "tokens", "message"),
    [
        (
            {"text_config": "x"},
            None,
            "text_config is 'x', and has to be null, or an object with names|an object with names",
        ),
        ({"num_centroids": 0}, None, "num_centroids is 0"),
        ({"centroid_intermediate_top_k": 30}, None, "more centroids than it has"),
        ({}, 999, "token_ordering does not name every token once"),
    ],
)
def test_what_cannot_be_is_refused_first(changes, tokens, message, tmp_path):
    model = gemma4_assistant(True)
    if tokens is not None:
        model.masked_embedding.token_ordering[3] = tokens
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises((ValueError, OSError), match=message):
        AutoDrafter.from_pretrained(tmp_path)


def test_layers_without_end_are_refused_first(tmp_path):
    gemma4_assistant().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 10**9
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"text_config\.num_hidden_layers is 1000000000"):
        AutoDrafter.from_pretrained(tmp_path)


def test_compiling_is_refused():
    drafter = Gemma4Drafter(gemma4_assistant())
    drafter.speculation_config = SpeculationConfig(3, compile=True)
    with pytest.raises(ValueError, match="leave compile off"):
        drafter.attach(gemma4_target())


def test_two_targets_never_share_an_embedding():
    one, other = gemma4_target(), tiny_model("gemma4", seed=9, sliding_window=64)
    drafter = Gemma4Drafter(gemma4_assistant())
    drafter.speculation_config = SpeculationConfig(3, 5, never_slower=False)
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}
    for target in (one, other, one):
        assert_lossless(target, drafter, PROMPTS[1:2], **options)
    assert hf_paradraft.notes.pair(drafter, one).table is one.get_input_embeddings()
