"""Targets with code of others: plain decoding's text, or a refusal, and plain decoding where a
drafter is set.
"""

import pytest
import torch
from tiny import CACHE, near_copy, tiny_model
from transformers import AttentionInterface, DynamicCache, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

import hf_paradraft

SHORT, LONG = torch.tensor([[1, 2, 3, 4, 1, 2, 3]]), (torch.arange(40)[None] * 7) % 29


def of_class(kind, target=None):
    """A target of a class of others, with the weights of another one."""
    target = target or tiny_model()
    made = kind(target.config).to(target.dtype).eval()
    made.load_state_dict(target.state_dict())
    return made


def same_or_refused(target, prompt, size=9, before=lambda: None, **options):
    """Whether a drafted call was answered; its text, and that of a call with a drafter that is set,
    are plain decoding's.
    """
    drafter = near_copy(tiny_model())
    drafter.speculation_config.tree_size = size
    options = {
        "max_new_tokens": 24,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        **options,
    }

    def text(**more):
        before()
        torch.manual_seed(3)
        own = {name: value() if callable(value) else value for name, value in options.items()}
        return target.generate(prompt, **own, **more)

    plain, refusal = text(), ""
    try:
        assert torch.equal(text(assistant_model=drafter), plain)
    except ValueError as error:
        refusal = str(error)
    assert not refusal or any(
        advice in refusal for advice in ("generate without", "generate once", "unset")
    )
    with hf_paradraft.set_drafter(target, drafter):
        assert torch.equal(text(), plain)
    return not refusal


class OwnMask(LlamaForCausalLM):
    """Makes a causal mask itself, and leaves aside the one that it is given."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        return super().forward(input_ids=input_ids, attention_mask=None, **kwargs)


class Restarts(LlamaForCausalLM):
    """Positions begin anew after a separator."""

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        places = torch.arange(input_ids.shape[1])
        begins = torch.where(input_ids[0] == 3, places, 0).cummax(0).values
        inputs["position_ids"] = (places - begins)[None, -inputs["input_ids"].shape[1] :]
        return inputs


@pytest.mark.parametrize("kind", [OwnMask, Restarts])
@pytest.mark.parametrize("prompt", [SHORT, LONG])
def test_masks_and_positions_of_a_class_of_others_are_asked_for_in_every_round(kind, prompt):
    assert same_or_refused(of_class(kind), prompt)


class Counts(LlamaForCausalLM):
    """Has a counter of steps among the arguments of its forward."""

    def prepare_inputs_for_generation(self, input_ids, steps=0, **kwargs):
        return {**super().prepare_inputs_for_generation(input_ids, **kwargs), "steps": steps}

    def forward(self, *args, steps=0, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.roll(steps // 5, -1)
        return output

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, **kwargs):
        updated = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)
        return {**updated, "steps": updated.get("steps", 0) + 1}


class Marks(LlamaForCausalLM):
    """Takes an argument for each token."""

    def forward(self, *args, marks=None, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + marks[:, -output.logits.shape[1] :, None] * torch.arange(
            output.logits.shape[-1]
        )
        return output

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, **kwargs):
        updated = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)
        return {
            **updated,
            "marks": torch.cat([updated["marks"], updated["marks"][:, -1:] * 0.9], 1),
        }


def test_a_class_that_updates_its_arguments_itself_is_refused():
    assert not same_or_refused(of_class(Counts), SHORT)
    marks = 0.1 * torch.arange(7.0).double()[None]
    assert not same_or_refused(of_class(Marks), SHORT, marks=marks)


class OwnMasks(LlamaForCausalLM):
    """Makes the masks of compiled decoding: every third token is hidden."""

    @staticmethod
    def create_masks_for_generate(
        config, inputs_embeds, attention_mask, position_ids=None, **kwargs
    ):
        cache = next(
            kwargs[name]
            for name in (CACHE, "past_key_values", "cache")
            if kwargs.get(name) is not None
        )
        before, rows = int(cache.get_seq_length()), inputs_embeds.shape[1]
        slots = cache.layers[0].max_cache_len
        here, there = torch.arange(before, before + rows)[:, None], torch.arange(slots)[None]
        seen = (there <= here) & ((there % 3 != 2) | (there == here))
        return torch.zeros(seen.shape, dtype=inputs_embeds.dtype).masked_fill(~seen, -torch.inf)[
            None, None
        ]


def test_masks_of_a_class_of_others_for_a_static_cache():
    assert not same_or_refused(
        of_class(OwnMasks), SHORT, cache_implementation="static", disable_compile=True
    )


def rounded(keys, since):
    keys = keys.clone()
    keys[:, :, :since] = (keys[:, :, :since] * 2).round() / 2
    return keys


def rounds_old_keys(module, args, kwargs, output):
    layer = kwargs[CACHE].layers[module.layer_idx]
    layer.keys = rounded(layer.keys, max(0, layer.keys.shape[2] - 24))


def presses_long_reads(module, args, kwargs, output):
    rows = kwargs["hidden_states"].shape[1]
    if rows > 4:
        layer = kwargs[CACHE].layers[module.layer_idx]
        layer.keys = torch.cat([layer.keys[:, :, :-rows], layer.keys[:, :, -rows:].roll(1, 2)], 2)


class Press:
    """Goes back to 16 tokens every eight steps."""

    def __init__(self):
        self.steps = 0

    def __call__(self, module, args, kwargs, output):
        layer = kwargs[CACHE].layers[module.layer_idx]
        self.steps += module.layer_idx == 0
        if self.steps % 8 == 0 and layer.keys.shape[2] > 16:
            layer.keys, layer.values = layer.keys[:, :, -16:], layer.values[:, :, -16:]


class Counter:
    """Acts after so many forwards."""

    def __init__(self):
        self.count = 0

    def __call__(self, module, args, kwargs, output):
        self.count += 1
        return (output[0] * (1.5 if self.count > 40 else 1.0), *output[1:])


@pytest.mark.parametrize("prompt", [SHORT, LONG])
@pytest.mark.parametrize("hook", [rounds_old_keys, presses_long_reads, Press(), Counter()])
def test_hooks_that_begin_to_act_after_some_tokens(hook, prompt):
    target = tiny_model()
    for layer in target.model.layers:
        layer.self_attn.register_forward_hook(hook, with_kwargs=True)

    def anew():
        for name in vars(hook) if isinstance(hook, Press | Counter) else ():
            setattr(hook, name, 0)

    assert not same_or_refused(target, prompt, before=anew)


@pytest.mark.parametrize("prompt", [SHORT, LONG])
def test_attention_that_is_sparse_for_one_row_over_many_keys(prompt):
    usual = AttentionInterface()["sdpa"]

    def sparse(module, query, key, value, attention_mask, **kwargs):
        if query.shape[2] == 1 and key.shape[2] > 20:
            key, value = (torch.cat([part[:, :, :4], part[:, :, -12:]], 2) for part in (key, value))
            attention_mask = None
        return usual(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("sdpa", sparse)
    try:
        assert not same_or_refused(tiny_model(), prompt)
    finally:
        AttentionInterface.register("sdpa", usual)


def test_layers_of_a_cache_that_are_of_others():
    class Rounds(DynamicLayer):
        def update(self, *args, **kwargs):
            keys, values = super().update(*args, **kwargs)
            self.keys = rounded(keys, max(0, keys.shape[2] - 16))
            return self.keys, values

    target = tiny_model()

    def cache():
        made = DynamicCache(config=target.config)
        made.layers = [Rounds() for _ in made.layers]
        return made

    assert not same_or_refused(target, SHORT, **{CACHE: cache})


def test_a_layer_of_transformers_that_was_patched(monkeypatch):
    usual = DynamicLayer.update

    def update(self, *args, **kwargs):
        keys, values = usual(self, *args, **kwargs)
        self.keys = rounded(keys, max(0, keys.shape[2] - 16))
        return self.keys, values

    monkeypatch.setattr(DynamicLayer, "update", update)
    assert not same_or_refused(tiny_model(), SHORT)


@pytest.mark.parametrize("options", [{"num_return_sequences": 3}, {}])
def test_a_head_that_is_narrower_than_the_config_says(options):
    target = tiny_model()
    target.lm_head = torch.nn.Linear(32, 27, bias=False).double()
    ids = SHORT if options else SHORT.repeat(3, 1)
    assert same_or_refused(target, ids, do_sample=True, **options)


class Steered(torch.nn.Module):
    """A block with a push on its last row, which an attribute turns on."""

    def __init__(self, block):
        super().__init__()
        self.block, self.steer, self.push = block, False, None

    def forward(self, *args, **kwargs):
        states = self.block(*args, **kwargs)
        if self.steer:
            states = torch.cat([states[:, :-1], states[:, -1:] + self.push], 1)
        return states

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "block" else getattr(self.block, name)


def test_a_part_that_is_switched_on_after_the_first_call():
    target = tiny_model()
    target.model.layers[1] = block = Steered(target.model.layers[1])
    assert same_or_refused(target, SHORT)
    block.push, block.steer = 2 * torch.randn(32, dtype=torch.float64), True
    assert not same_or_refused(target, SHORT)
    block.steer = False
    assert same_or_refused(target, SHORT)


class Int8(torch.nn.Linear):
    """Activations of eight bits, with a scale for each forward."""

    def forward(self, states):
        scale = states.abs().amax() / 127
        return super().forward((states / scale).round() * scale)


@pytest.mark.parametrize("rows", [1, 2])
def test_activations_that_are_quantised_with_a_scale_for_each_forward(rows):
    target = tiny_model()
    for layer in target.model.layers:
        layer.mlp.down_proj.__class__ = Int8
    target.config.quantization_config = {"quant_method": "own"}
    assert not same_or_refused(target, SHORT.repeat(rows, 1) + torch.arange(rows)[:, None])
