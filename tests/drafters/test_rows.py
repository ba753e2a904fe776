"""Rows and COD against the definitions of METHODS, written out slowly."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_paradraft.training import cod_keep_mask, parallel_draft_rows
from hf_paradraft.training.rows import places_in, useful_rows

ratios = st.floats(0.05, 1.0)


@given(st.integers(1, 40), st.integers(1, 10), ratios, ratios, st.integers(0, 2**31))
def test_cod_keeps_the_right_number_of_whole_chains(seq_len, num_depths, ratio, min_ratio, seed):
    keep = cod_keep_mask(seq_len, num_depths, ratio, min_ratio, torch.Generator().manual_seed(seed))
    assert keep.shape == (num_depths, seq_len)
    assert keep.dtype == torch.bool
    assert keep[0].all()
    for depth in range(1, num_depths):
        positions = set(keep[depth].nonzero()[:, 0].tolist())
        possible = {t + 1 for t in keep[depth - 1].nonzero()[:, 0].tolist() if t + 1 < seq_len}
        assert positions <= possible
        assert len(positions) == min(
            len(possible), math.floor(seq_len * max(ratio**depth, min_ratio))
        )


def test_cod_is_random_and_repeatable():
    def draw(seed):
        return cod_keep_mask(200, 8, 0.7, 0.2, torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert draw(1).sum() < 200 / (1 - 0.7) * 1.05


@given(st.integers(2, 12), st.integers(1, 5), ratios, st.integers(0, 1000))
def test_rows_follow_their_definition(seq_len, num_depths, ratio, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (seq_len,), generator=generator)
    labels = ids.where(torch.rand(seq_len, generator=generator) < 0.7, -100)
    keep = cod_keep_mask(seq_len, num_depths, ratio, ratio, generator)
    rows = parallel_draft_rows(ids, labels, 99, keep)
    expected = [(d, t) for d in range(num_depths) for t in range(seq_len) if keep[d, t]]
    assert rows["position_ids"].tolist() == [t for _, t in expected]
    assert rows["input_ids"].tolist() == [int(ids[t]) if d == 0 else 99 for d, t in expected]
    assert rows["labels"].tolist() == [
        int(labels[t + 1]) if t + 1 < seq_len else -100 for _, t in expected
    ]
    assert rows["attention_mask"].dtype == torch.bool
    for i, (d, t) in enumerate(expected):
        chain = {(e, t - d + e) for e in range(1, d + 1)}
        visible = {
            j for j, (e, s) in enumerate(expected) if (e == 0 and s <= t - d) or (e, s) in chain
        }
        assert set(rows["attention_mask"][i].nonzero()[:, 0].tolist()) == visible


def test_a_row_sees_its_text_and_its_own_chain():
    rows = parallel_draft_rows(
        torch.arange(7), torch.arange(7), 9, torch.ones(3, 7, dtype=torch.bool)
    )
    row = 2 * 7 + 5
    assert rows["attention_mask"][row].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 7 + 4, row]
    assert rows["labels"][row] == 6


@given(st.integers(2, 20), st.integers(0, 1000))
def test_useful_rows_keep_every_label_and_its_chain(seq_len, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(seq_len).where(torch.rand(seq_len, generator=generator) < 0.3, -100)
    keep = cod_keep_mask(seq_len, 5, 0.7, 0.2, generator)
    useful = useful_rows(keep, labels)
    assert not (useful & ~keep).any()
    for depth, t in keep.nonzero().tolist():
        if t + 1 < seq_len and labels[t + 1] != -100:
            assert all(useful[e, t - depth + e] for e in range(depth + 1))


@pytest.mark.parametrize(
    "arguments",
    [(8, 4, 0.0, 0.2), (8, 4, 1.1, 0.2), (8, 4, 0.7, 0.0), (8, 4, 0.7, -1), (0, 4, 0.7, 0.2)],
)
def test_cod_refuses_what_is_out_of_range(arguments):
    with pytest.raises(ValueError, match=r"in \(0, 1\]|at least 1"):
        cod_keep_mask(*arguments)


def test_rows_refuse_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="must be"):
        parallel_draft_rows(torch.arange(3), torch.arange(4), 0, torch.ones(2, 3, dtype=torch.bool))


def test_places_in_a_vocabulary_of_any_order():
    """Published drafters need not sort their ids; what is not among them is not learned."""
    vocabulary, ids = torch.tensor([7, 2, 9]), torch.tensor([[9, 2, 3], [7, -100, 100]])
    assert places_in(vocabulary, ids).tolist() == [[2, 1, -100], [0, -100, -100]]
