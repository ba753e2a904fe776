"""What could hide a target from the look: arguments, images, its own generation config, barred
logits, later changes.
"""

import pytest
import torch
from lossless import assert_lossless
from test_look import paligemma
from tiny import near_copy, tiny_model


def steer(part):
    """Move the last row of what a part gives: other rows are another text's."""
    push = 3 * torch.randn(64, generator=torch.Generator().manual_seed(9))

    def hook(module, inputs, output):
        output = output.clone()
        output[:, -1] += push[: output.shape[-1]].to(output)
        return output

    return part.register_forward_hook(hook)


def misread(target, prompt, **options):
    with pytest.raises(ValueError, match="as it reads tokens one by one"):
        target.generate(
            prompt,
            assistant_model=near_copy(tiny_model()),
            max_new_tokens=8,
            do_sample=False,
            **options,
        )


def test_more_arguments_do_not_hide_a_target_from_the_look(prompt):
    target = tiny_model("gpt2")
    steer(target.transformer.ln_f)
    misread(target, prompt, token_type_ids=torch.zeros_like(prompt))


def test_a_target_with_images_is_looked_at_where_it_reads_text(prompt):
    misread(paligemma("gemma"), prompt)


def test_logits_that_are_barred_are_compared_too(prompt):
    target = tiny_model()

    def bar(module, inputs, output):
        output = output.clone()
        output[:, -1, 10:14] = -torch.inf
        return output

    target.lm_head.register_forward_hook(bar)
    misread(target, prompt)


@pytest.mark.parametrize(
    "own", [{"stop_strings": ["zz"]}, {"num_return_sequences": 2, "do_sample": True}]
)
def test_what_a_target_says_of_decoding_does_not_hide_it_from_the_look(own, prompt):
    target = tiny_model()
    steer(target.model.norm)
    for name, value in own.items():
        setattr(target.generation_config, name, value)
    misread(target, prompt, num_return_sequences=1, stop_strings=None)


def test_a_class_that_is_changed_between_calls(prompt, monkeypatch):
    target = tiny_model()
    assert_lossless(target, near_copy(tiny_model()), prompt)
    kind = type(target.model.norm)

    def forward(self, states, own=kind.forward):
        states = own(self, states)
        return (
            torch.cat([states[:, :-1], 3 * states[:, -1:].flip(-1)], dim=1)
            if self is target.model.norm
            else states
        )

    monkeypatch.setattr(kind, "forward", forward)
    misread(target, prompt)


def test_a_target_that_cannot_decode_a_short_text(prompt):
    target = tiny_model()
    target.model.register_forward_pre_hook(
        lambda module, args, kwargs: 1 / (kwargs["input_ids"].shape[1] > 7), with_kwargs=True
    )
    with pytest.raises(ValueError, match="cannot decode a short text"):
        target.generate(
            prompt[:, :4],
            assistant_model=near_copy(tiny_model()),
            max_new_tokens=4,
            do_sample=False,
        )
