"""Prompt tokens draft without a second model, and change nothing but the number of forwards."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless import assert_lossless
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import EOS, tiny_model, with_prompts
from transformers import AutoModelForCausalLM, BloomConfig, GenerationConfig

import hf_paradraft
from hf_paradraft.drafters.ppd import PpdConfig
from hf_paradraft.drafters.ppd.model import PpdDrafter
from hf_paradraft.integration.look import check_reads
from hf_paradraft.notes import notes_on

NAMES = ["llama", "qwen3", "gpt2", "mistral-sliding"]
TARGETS = {name: tiny_model(name) for name in NAMES}


def adapter_for(name, m=3, e=1, calibrated=False):
    drafter = PpdDrafter.from_model(with_prompts(tiny_model(name), m, e, calibrated))
    drafter.speculation_config.never_slower = False
    return drafter


@pytest.mark.slow
@settings(max_examples=24, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.lists(st.lists(st.integers(1, EOS - 1), min_size=1, max_size=10), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 24),
    st.sampled_from([None, "static"]),
    st.booleans(),
)
def test_output_is_plain_generates(name, prompts, m, e, more, cache, calibrated):
    target, drafter = TARGETS[name], adapter_for(name, m, e, calibrated)
    if not calibrated or more % 2:
        drafter.speculation_config.tree_size = m * e + more
    for ids in [torch.tensor([prompt]) for prompt in prompts] if len(prompts) == 1 else []:
        options = {"do_sample": False, "max_new_tokens": 25}
        plain = target.generate(ids, **options)
        assert_lossless(target, drafter, ids, plain=plain, **options, cache_implementation=cache)
    if len(prompts) > 1:
        width = min(map(len, prompts))
        ids = torch.tensor([prompt[:width] for prompt in prompts])
        options = {
            "do_sample": False,
            "max_new_tokens": 25,
            "attention_mask": torch.ones_like(ids),
            "pad_token_id": 0,
        }
        plain = target.generate(ids, **options)
        assert_lossless(target, drafter, ids, plain=plain, **options, cache_implementation=cache)


def test_peft_models_draft_by_themselves(tmp_path, prompt):
    base = tiny_model()
    plain = base.generate(prompt, do_sample=False, max_new_tokens=20)
    get_peft_model(tiny_model(), PpdConfig()).save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(tiny_model(), tmp_path).eval()
    output = model.generate(
        input_ids=prompt, do_sample=False, max_new_tokens=20, return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, plain)
    assert output.speculation.num_drafted > 0
    with model.disable_adapter():
        output = model.generate(
            input_ids=prompt, do_sample=False, max_new_tokens=20, return_dict_in_generate=True
        )
        assert torch.equal(output.sequences, plain)
        assert "speculation" not in output
    loaded = hf_paradraft.AutoDrafter.from_pretrained(tmp_path)
    assert_lossless(base, loaded, prompt, max_new_tokens=20)


def test_adapters_swapped_under_one_name_leave_one_drafter():
    model, made = with_prompts(tiny_model(), 2), []
    for seed in range(5):
        model.delete_adapter("default")
        torch.manual_seed(seed)
        model.add_adapter("default", PpdConfig(num_prompt_tokens=2))
        model.set_adapter("default")
        base = model.get_base_model()
        made.append(PpdDrafter.adopt(base, model))
        assert PpdDrafter.adopt(base, model) is made[-1]
        assert torch.equal(made[-1].prompts, base.get_input_embeddings().prompts())
    assert len({*map(id, made)}) == 5
    assert len(notes_on(model)) == 1


def test_one_forward_per_round(prompt):
    target, drafter = TARGETS["llama"], adapter_for("llama")
    forwards = []
    handle = target.register_forward_pre_hook(lambda *_: forwards.append(1))
    check_reads(target, several=False)  # once for each target as it is hooked
    forwards.clear()
    target.generate(
        prompt, do_sample=False, max_new_tokens=20, eos_token_id=None, assistant_model=drafter
    )
    handle.remove()
    assert len(forwards) == drafter.last_stats.num_rounds


@pytest.mark.parametrize("e", [1, 3])
def test_prompts_see_their_node_and_their_own_ensemble(e):
    """A round's guesses are those of a forward over the text and the prompts of one ensemble alone,
    averaged.
    """
    target = TARGETS["llama"]
    drafter = adapter_for("llama", m=3, e=e)
    drafter.speculation_config.tree_size = 40
    seen, start = [], drafter.start_drafting

    def started(*args):
        drafting = start(*args)
        observe = drafting.observe
        drafting.observe = lambda observations: (
            observe(observations),
            seen.append(drafting.guesses[0]),
        )
        return drafting

    drafter.start_drafting = started
    ids = torch.tensor([[4, 5, 6, 7]])
    output = target.generate(
        ids, do_sample=False, max_new_tokens=16, eos_token_id=None, assistant_model=drafter
    )
    emitted = drafter.last_stats.emitted_per_round
    length = ids.shape[1] + emitted[0]
    embed = target.get_input_embeddings()
    for guess, new in zip(seen[1:-1], emitted[1:-1], strict=True):
        length += new
        # up to the node where the round ended; the last token is its bonus
        text = embed(output[:, : length - 1])
        expected = []
        for ensemble in range(e):
            prompts = drafter.prompts[ensemble::e][None]
            with torch.no_grad():
                expected.append(
                    target(inputs_embeds=torch.cat([text, prompts], dim=1)).logits[0, -3:]
                )
        if len(guess):
            expected = torch.stack(expected).mean(0)[: len(guess)]
            torch.testing.assert_close(guess, expected.float(), rtol=1e-3, atol=1e-3)
            drafter.attach(target)
            behind = drafter.draft_logits(output[:, :length])[0]
            torch.testing.assert_close(guess, behind[: len(guess)].float(), rtol=1e-3, atol=1e-3)
    assert sum(len(guess) > 0 for guess in seen) > 3


def test_another_target_is_refused(prompt):
    with pytest.raises(ValueError, match="belongs to a model"):
        tiny_model(vocab_size=40).generate(
            prompt, max_new_tokens=3, assistant_model=adapter_for("llama")
        )


def test_too_few_rows_for_the_prompts(prompt):
    drafter = adapter_for("llama")
    drafter.speculation_config = hf_paradraft.SpeculationConfig(3, tree_size=3)
    with pytest.raises(ValueError, match="here 4 at least"):
        TARGETS["llama"].generate(
            prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, assistant_model=drafter
        )


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("tree_size", [None, "auto"])
def test_chains_and_automatic_trees_are_lossless(tree_size, calibrated, prompt):
    """A chain has one guess at each distance; an automatic size without calibration is a usual
    one.
    """
    drafter = adapter_for("llama", calibrated=calibrated)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        3, tree_size=tree_size, never_slower=False, trace=True
    )
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    assert_lossless(TARGETS["llama"], drafter, prompt, **options)
    assert drafter.last_stats.num_drafted > 0
    if tree_size is None:
        assert all(
            record.parents == list(range(-1, len(record.parents) - 1))
            for record in drafter.last_stats.trace
        )


def test_targets_that_take_no_masks_are_refused(prompt):
    drafter = adapter_for("llama")
    target = AutoModelForCausalLM.from_config(
        BloomConfig(vocab_size=32, hidden_size=32, n_layer=1, n_head=4)
    )
    with pytest.raises(ValueError, match="takes a mask"):
        target.generate(prompt, max_new_tokens=3, assistant_model=drafter)


def test_another_kind_of_adapter_is_no_drafter(tmp_path):
    get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="LORA"):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_prompts_that_are_no_numbers_never_reach_the_target(bad, prompt):
    drafter = adapter_for("llama")
    drafter.prompts = drafter.prompts.clone()
    drafter.prompts[0, 0] = bad
    for door in (
        {"assistant_model": drafter},
        {"custom_generate": hf_paradraft.speculative_decoding, "drafter": drafter},
    ):
        with pytest.raises(ValueError, match="not finite"):
            TARGETS["llama"].generate(prompt, max_new_tokens=4, **door)


def test_prompts_that_overflow_the_targets_dtype(prompt):
    drafter = adapter_for("llama")
    drafter.prompts = drafter.prompts * 1e6
    with pytest.raises(ValueError, match=r"not finite numbers in torch\.float16"):
        tiny_model().half().generate(prompt, max_new_tokens=4, assistant_model=drafter)


def test_a_calibrated_adapter_where_only_chains_are_verified():
    drafter = adapter_for("gpt2", calibrated=True)
    ids = torch.tensor([[1, 2, 3, 4]])
    options = {"do_sample": False, "max_new_tokens": 12, "token_type_ids": torch.zeros_like(ids)}
    assert_lossless(TARGETS["gpt2"], drafter, ids, **options)


def test_a_peft_model_searches_beams_without_drafts(prompt):
    beams = GenerationConfig(num_beams=2, max_new_tokens=8, do_sample=False, pad_token_id=0)
    plain = tiny_model().generate(prompt, beams)
    model = get_peft_model(tiny_model(), PpdConfig())
    assert torch.equal(model.generate(prompt, beams), plain)
    assert torch.equal(model.generate(input_ids=prompt, generation_config=beams), plain)


def test_lora_on_top_of_prompts(prompt):
    torch.manual_seed(0)
    model = get_peft_model(
        get_peft_model(tiny_model(), PpdConfig()), LoraConfig(target_modules=["q_proj"])
    )
    assert (
        hf_paradraft.PpdDrafter.from_model(model.get_base_model().model).config.num_prompt_tokens
        == 3
    )


def test_the_smallest_tree_drafts(prompt):
    drafter = adapter_for("llama")
    drafter.speculation_config.tree_size = 4
    TARGETS["llama"].generate(
        prompt, do_sample=False, max_new_tokens=20, eos_token_id=None, assistant_model=drafter
    )
    assert drafter.last_stats.num_drafted > 0


@pytest.mark.parametrize("damage", [b"", b"{broken", b"[]"])
def test_damaged_adapters(tmp_path, damage):
    get_peft_model(tiny_model(), PpdConfig()).save_pretrained(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OSError, match="truncated or damaged"):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path)
    weights.unlink()
    with pytest.raises(OSError, match=r"no \.safetensors"):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path)
    weights.write_bytes(whole)
    (tmp_path / "adapter_config.json").write_bytes(damage)
    with pytest.raises(OSError, match=r"adapter_config\.json"):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "options",
    [{"cache_implementation": "quantized", "cache_config": {"backend": "quanto", "nbits": 4}}, {}],
)
def test_where_prompts_cannot_ride_a_peft_model_decodes_plainly(options, prompt):
    """A quantised cache; attention that takes no mask."""
    if options:
        pytest.importorskip("optimum.quanto")
        base = tiny_model(hidden_size=128)
        model = get_peft_model(tiny_model(hidden_size=128), PpdConfig())
    else:
        config = BloomConfig(vocab_size=32, hidden_size=32, n_layer=1, n_head=4)
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_config(config).eval()
        torch.manual_seed(0)
        model = get_peft_model(AutoModelForCausalLM.from_config(config).eval(), PpdConfig())
    plain = base.generate(prompt, do_sample=False, max_new_tokens=8, **options)
    assert torch.equal(
        plain, model.generate(input_ids=prompt, do_sample=False, max_new_tokens=8, **options)
    )


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize(
    ("m", "e", "tree_size"), [(3, 1, None), (3, 8, "auto"), (8, 8, "auto"), (2, 2, 40)]
)
def test_static_caches_have_room_for_all_rows(m, e, tree_size, calibrated):
    """A round's rows are more than its tokens, whatever size was asked for."""
    drafter = PpdDrafter.from_model(with_prompts(tiny_model("llama"), m, e, calibrated))
    drafter.speculation_config = hf_paradraft.SpeculationConfig(m, tree_size, never_slower=False)
    ids = torch.arange(1, 8)[None]
    options = {
        "do_sample": False,
        "max_new_tokens": 14,
        "eos_token_id": None,
        "cache_implementation": "static",
    }
    assert_lossless(TARGETS["llama"], drafter, ids, **options)


def test_too_few_rows_are_refused_before_work_starts(prompt):
    drafter = adapter_for("llama")
    drafter.speculation_config = hf_paradraft.SpeculationConfig(3, tree_size=3)
    forwards = []
    handle = TARGETS["llama"].register_forward_pre_hook(lambda *_: forwards.append(1))
    check_reads(TARGETS["llama"], several=False)  # once for each target as it is hooked
    forwards.clear()
    with pytest.raises(ValueError, match="here 4 at least"):
        TARGETS["llama"].generate(
            prompt, max_new_tokens=1, do_sample=False, assistant_model=drafter
        )
    handle.remove()
    assert not forwards


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
def test_prompts_that_are_no_numbers_are_left_out(options, prompt):
    """They are refused as any drafter is, and the model decodes plainly."""
    model = with_prompts(tiny_model(), 2)
    options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, **options}
    plain = model.base_model.model.generate(prompt, **options)
    for embeddings in model.base_model.model.get_input_embeddings().ppd_prompts.values():
        embeddings.data.fill_(torch.nan)
    assert torch.equal(model.generate(prompt, **options), plain)
