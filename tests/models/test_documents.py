"""Document starts, and what is reset there."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yuan_train.models.attention import DocumentResets, find_resets

EOD = 9


def test_by_hand():
    tokens = torch.tensor([[1, EOD, 2, 3, EOD, EOD, 4]])
    resets = find_resets(tokens, eod_id=EOD, reset_attention=True, reset_filter=True)
    assert resets.positions is not None and resets.document_start is not None
    assert resets.positions.tolist() == [[0, 1, 0, 1, 2, 0, 0]]
    assert resets.document_start.int().tolist() == [[1, 0, 1, 0, 0, 1, 1]]
    assert resets.document_ranges == ((0, 2), (2, 5), (5, 6), (6, 7))


def test_the_published_default_resets_positions_only():
    resets = find_resets(torch.tensor([[1, EOD, 2]]), eod_id=EOD)
    assert resets.positions is not None
    assert resets.document_start is None and resets.document_ranges is None


def test_nothing_to_reset():
    tokens = torch.tensor([[1, EOD, 2]])
    assert find_resets(tokens, eod_id=None, reset_attention=True) == DocumentResets()
    assert find_resets(tokens, eod_id=EOD, reset_position_ids=False) == DocumentResets()


@given(st.lists(st.lists(st.sampled_from([1, 2, EOD]), min_size=6, max_size=6), min_size=0, max_size=4))
@settings(deadline=None, derandomize=True, max_examples=50)
def test_equals_a_loop(rows):
    tokens = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 6)
    resets = find_resets(tokens, eod_id=EOD, reset_attention=True, reset_filter=True)
    positions, starts, ranges = [], [], []
    for b, row in enumerate(rows):
        for t, _ in enumerate(row):
            begins = t == 0 or row[t - 1] == EOD
            positions.append(0 if begins else positions[-1] + 1)
            starts.append(begins)
            if begins:
                ranges.append([b * 6 + t, b * 6 + t])
            ranges[-1][1] += 1
    assert resets.positions is not None and resets.document_start is not None
    assert resets.positions.flatten().tolist() == positions
    assert resets.document_start.flatten().tolist() == starts
    assert resets.document_ranges == tuple(tuple(r) for r in ranges)
