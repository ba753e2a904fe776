"""The hook acts on our drafters only, installs once, and steps aside for a transformers it does not know."""

import inspect

import pytest
from transformers import GenerationMixin

from hf_paradraft.integration import hook


def test_installing_again_changes_nothing():
    before = GenerationMixin._assisted_decoding
    assert hook.install()
    assert GenerationMixin._assisted_decoding is before


def test_signatures_are_kept():
    """`generate` inspects them to decide what to pass."""
    for name, parameters in hook.EXPECTED.items():
        assert set(inspect.signature(getattr(GenerationMixin, name)).parameters) == parameters


def test_an_unknown_transformers_is_left_alone(monkeypatch):
    def another(self, input_ids, something_new):
        pass

    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", another)
    monkeypatch.setattr(GenerationMixin, "_validate_generation_mode", GenerationMixin._validate_generation_mode.__wrapped__)
    with pytest.warns(UserWarning, match="has changed GenerationMixin._assisted_decoding"):
        assert not hook.install()
    assert GenerationMixin._assisted_decoding is another
