"""Log-ratios split into routing and weights, and clipping told apart by flips: numbers worked out by hand."""

from typing import Any

import numpy as np
import pytest

from moe_rl.drift.attribution import attribution, correlation, layer_flips, parts
from moe_rl.drift.tokens import TokenTable

NAN = float("nan")


def table(**columns: Any) -> TokenTable:
    """Two sequences of two response tokens behind one prompt token each; two layers, one of three experts a token."""
    response = np.array([False, True, True] * 2)
    old = np.array([[[0], [1]]] * 6, dtype=np.int16)
    new = old.copy()
    new[1, 0] = 2  # the first token of the first sequence flips on one layer
    new[2] = [[1], [2]]  # the second on both
    new[0] = 2  # a prompt token, which does not count
    plain: dict[str, Any] = dict(
        sample=np.array([4, 4, 4, 7, 7, 7]),
        position=np.array([0, 1, 2] * 2),
        token=np.arange(6),
        target=np.arange(1, 7),
        response=response,
        advantage=np.ones(6, dtype=np.float32),
        reward=np.ones(6, dtype=np.float32),
        clipped=np.array([False, True, False, False, False, False]),
        rollout_logprob=np.where(response, -1.0, NAN),
        old_logprob=np.where(response, -1.0, NAN),
        train_logprob=np.array([NAN, -0.5, -1.4, NAN, -1.0, -0.9]),
        other_logprob=np.array([NAN, -0.9, -1.0, NAN, -1.0, -0.9]),
        rollout_routes=old,
        old_routes=old,
        new_routes=new,
        free_routes=np.full_like(old, -1),
        old_gates=np.ones((6, 2, 1)),
        new_gates=np.ones((6, 2, 1)),
        old_margin=np.array([[9, 9], [0.3, 0.1], [0.5, 0.2], [9, 9], [0.4, 0.6], [0.7, 0.8]]),
        new_margin=np.ones((6, 2)),
    )
    return TokenTable(**plain | columns)


def test_a_log_ratio_is_its_routing_part_and_its_weight_part() -> None:
    # log r = train - old = 0.5, -0.4, 0, 0.1. The other pass went along old routes: routing = train - other.
    total, routing, weights = parts(table(), replayed=False)
    assert total.tolist() == pytest.approx([0.5, -0.4, 0.0, 0.1])
    assert routing.tolist() == pytest.approx([0.4, -0.4, 0.0, 0.0])
    assert weights.tolist() == pytest.approx([0.1, 0.0, 0.0, 0.1])
    assert (routing + weights).tolist() == pytest.approx(total.tolist(), abs=1e-15)
    found = attribution(table(), replayed=False)
    assert found["attribution/routing_abs"] == pytest.approx(0.2)
    assert found["attribution/weights_abs"] == pytest.approx(0.05)
    assert found["attribution/log_ratio_abs"] == pytest.approx(0.25)
    # means 0.05 and 0: cov = (0.4 x 0.45 + 0.4 x 0.45) / 4 = 0.09; var = (0.45^2 + 0.45^2 + 0.05^2 + 0.05^2) / 4 = 0.1025
    assert found["attribution/routing_share"] == pytest.approx(0.09 / 0.1025)
    assert "replay/forced_gap" not in found


def test_under_replay_the_other_pass_is_the_free_one() -> None:
    free = np.array([[[0], [1]]] * 6, dtype=np.int16)
    free[5, 1] = 0
    replayed = table(free_routes=free)
    total, routing, weights = parts(replayed, replayed=True)
    assert total.tolist() == pytest.approx([0.1, 0.0, 0.0, 0.1])  # free - old
    assert routing.tolist() == pytest.approx([-0.4, 0.4, 0.0, 0.0])  # free - forced
    assert weights.tolist() == pytest.approx([0.5, -0.4, 0.0, 0.1])  # forced - old: what the loss sees
    assert attribution(replayed, replayed=True)["replay/forced_gap"] == pytest.approx(0.2)
    assert layer_flips(replayed, replayed=True)[:, 1].tolist() == [False] * 5 + [True]


def test_clipping_by_flips() -> None:
    found = attribution(table(), replayed=False)
    assert found["attribution/clip_fraction/token/flipped"] == pytest.approx(1 / 2)
    assert found["attribution/clip_fraction/token/steady"] == 0
    assert found["attribution/clip_fraction/sequence/flipped"] == 1  # sequence 4 flipped and has a clipped token
    assert found["attribution/clip_fraction/sequence/steady"] == 0
    assert found["attribution/flip_rate/token"] == 0.5
    # share of layers flipped 1/2, 1, 0, 0 against |log r| 0.5, 0.4, 0, 0.1
    assert found["attribution/flip_correlation/token"] == pytest.approx(np.corrcoef([0.5, 1, 0, 0], [0.5, 0.4, 0, 0.1])[0, 1])
    # by sequence: 3/4 and 0 against |mean log r| 0.05 and 0.15: two points, falling
    other = table(train_logprob=np.array([NAN, -0.5, -1.4, NAN, -1.0, -0.7]))
    assert attribution(other, replayed=False)["attribution/flip_correlation/sequence"] == pytest.approx(-1)


def test_margin_bins_hold_equal_shares_from_the_nearest_tie_on() -> None:
    # smallest margins 0.1, 0.2, 0.4, 0.7 in five bins: 1, 1, 1, 1 and none
    found = attribution(table(), replayed=False)
    assert [found[f"attribution/flip_rate/margin_{i}"] for i in range(4)] == [1, 1, 0, 0]
    assert [found[f"attribution/clip_fraction/margin_{i}"] for i in range(4)] == [1, 0, 0, 0]
    assert "attribution/flip_rate/margin_4" not in found
    assert not [key for key in attribution(table(old_margin=np.full((6, 2), np.inf)), False) if "margin" in key]  # K = E


def test_what_has_no_value_is_left_out() -> None:
    still = table(train_logprob=table().old_logprob, other_logprob=table().old_logprob, new_routes=table().old_routes)
    found = attribution(still, replayed=False)
    assert found["attribution/routing_abs"] == found["attribution/weights_abs"] == 0
    for key in ("routing_share", "flip_correlation/token", "clip_fraction/token/flipped"):
        assert f"attribution/{key}" not in found
    without = attribution(table(other_logprob=np.full(6, NAN)), replayed=False)
    assert "attribution/routing_abs" not in without and "attribution/clip_fraction/token/flipped" in without


def test_correlation() -> None:
    assert correlation(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0])) == pytest.approx(1)
    assert correlation(np.array([1.0, 2.0]), np.array([3.0, 3.0])) is None
    assert correlation(np.array([1.0]), np.array([3.0])) is None
