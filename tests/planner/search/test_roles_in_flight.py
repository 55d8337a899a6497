"""What the search of roles knows of engines that go on over the border of batches, of several passes, and of
weights of which few are sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.bench.roles import drawn
from yuan_train.planner.roles.search import search_roles


def test_in_flight_no_batch_ends_with_its_longest_answer_and_passes_are_trained() -> None:
    problem = drawn(0, most_cards=4)
    load = replace(problem.load, expected_new_tokens=problem.load.new_tokens / 4)
    batches = replace(problem, modes=("async",), placements=("apart",), load=load)
    best = {
        name: search_roles(case).best
        for name, case in {
            "batches": batches,
            "flight": replace(batches, in_flight=True),
            "passes": replace(batches, epochs=3),
            "few bits": replace(batches, sync_share=0.1),
        }.items()
    }
    assert best["batches"].tail_seconds > 0
    assert best["flight"].step_seconds < best["batches"].step_seconds
    assert best["passes"].step_seconds >= best["batches"].step_seconds
    assert best["few bits"].step_seconds <= best["batches"].step_seconds
    assert best["few bits"].sync_bytes == pytest.approx(0.1 * best["batches"].sync_bytes)
