"""Weights for the gap between engine and trainer: every mode by hand, decided in log space."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_rl.algorithms.config import CorrectionSection
from moe_rl.corrections import correction_weights
from moe_rl.metrics import Metrics

# Ratios old / rollout of six tokens: three sequences of 3, 1 and 2
RATIOS = [0.25, 3.0, 1.0, 1.9, 0.4, 6.0]
SEQUENCE = [0, 0, 0, 1, 2, 2]


def weigh(
    log_ratios: Sequence[float],
    section: CorrectionSection,
    sequence: Sequence[int] = (),
    masked: Sequence[int] = (),
    rollout: float = -3.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Metrics]:
    """All in one sequence unless said otherwise."""
    belongs = torch.tensor(list(sequence) or [0] * len(log_ratios), dtype=torch.int64)
    mask = torch.ones(len(log_ratios), dtype=torch.bool)
    mask[list(masked)] = False
    engine = torch.full((len(log_ratios),), rollout, dtype=dtype)
    old = engine + torch.tensor(list(log_ratios), dtype=dtype)
    return correction_weights(old, engine, belongs, int(belongs.max()) + 1 if len(belongs) else 0, mask, section)


def by_hand(section: CorrectionSection, masked: Sequence[int] = ()) -> tuple[list[float], dict[str, float]]:
    weights, metrics = weigh([math.log(r) for r in RATIOS], section, SEQUENCE, masked)
    return weights.tolist(), metrics.means() | metrics.maxima()


def close(*values: float) -> Any:
    return pytest.approx(values, abs=1e-9)


def test_off_is_1_for_all_and_0_where_masked() -> None:
    weights, metrics = weigh([5.0, -5.0, 0.3], CorrectionSection(), masked=[1])
    assert weights.tolist() == [1, 0, 1] and metrics.means() == metrics.maxima() == {}


def test_tis_of_tokens_cuts_at_high_and_leaves_small_ratios() -> None:
    weights, found = by_hand(CorrectionSection(mode="tis"))  # at 2
    assert weights == close(0.25, 2, 1, 1.9, 0.4, 2)
    assert found["correction/touched_fraction"] == pytest.approx(2 / 6)  # 3 and 6
    assert found["correction/weight_mean"] == pytest.approx(7.55 / 6)
    assert found["correction/ratio_max"] == pytest.approx(6)


def test_mis_of_tokens_drops_what_is_above_high() -> None:
    weights, found = by_hand(CorrectionSection(mode="mis", high=2.5))
    assert weights == close(0.25, 0, 1, 1.9, 0.4, 0)
    assert found["correction/touched_fraction"] == pytest.approx(2 / 6)
    assert found["correction/weight_mean"] == pytest.approx(3.55 / 6)


def test_icepop_drops_either_side() -> None:
    weights, found = by_hand(CorrectionSection(mode="icepop"))  # 0.5 to 5
    assert weights == close(0, 3, 1, 1.9, 0, 0)
    assert found["correction/touched_fraction"] == pytest.approx(0.5)
    assert found["correction/weight_mean"] == pytest.approx(5.9 / 6)


@pytest.mark.parametrize(("mode", "last"), [("tis", 2.0), ("mis", 0.0)])
def test_of_a_sequence_the_product_weighs_every_token(mode: Any, last: float) -> None:
    # Products 0.25 x 3 x 1 = 0.75, 1.9, 0.4 x 6 = 2.4
    weights, found = by_hand(CorrectionSection(mode=mode, level="sequence"))
    assert weights == close(0.75, 0.75, 0.75, 1.9, last, last)
    assert found["correction/touched_fraction"] == pytest.approx(1 / 3)  # of sequences
    assert found["correction/weight_mean"] == pytest.approx((3 * 0.75 + 1.9 + 2 * last) / 6)  # of tokens
    assert found["correction/ratio_max"] == pytest.approx(2.4)


def test_a_sequence_is_masked_by_its_geometric_mean() -> None:
    # 0.75^(1/3) = 0.909, 1.9, sqrt(2.4) = 1.549: with [0.9, 1.6] the second goes; those that stay weigh 1
    weights, found = by_hand(CorrectionSection(mode="sequence_mask", low=0.9, high=1.6))
    assert weights == [1, 1, 1, 0, 1, 1]
    assert found["correction/touched_fraction"] == pytest.approx(1 / 3)
    assert found["correction/weight_mean"] == pytest.approx(5 / 6)
    assert found["correction/ratio_max"] == pytest.approx(1.9)
    assert by_hand(CorrectionSection(mode="sequence_mask", low=0.92, high=1.6))[0] == [0, 0, 0, 0, 1, 1]
    assert by_hand(CorrectionSection(mode="sequence_mask"))[0] == [0] * 6  # 0.999 to 1.001


def test_the_geometric_mean_does_not_grow_with_length_and_the_product_does() -> None:
    """A gap of 5e-4 a token over 10,000 tokens: the mean ratio is 1.0005, the product e^5."""
    gap = [5e-4] * 10_000
    assert weigh(gap, CorrectionSection(mode="sequence_mask"))[0].sum() == 10_000
    assert weigh(gap, CorrectionSection(mode="mis", level="sequence"))[0].sum() == 0


def test_masked_tokens_weigh_0_and_count_in_nothing() -> None:
    weights, found = by_hand(CorrectionSection(mode="tis", level="sequence"), masked=[1, 3, 4])
    # products 0.25 x 1, none, 6 -> 2; the second sequence has no token left
    assert weights == close(0.25, 0, 0.25, 0, 0, 2)
    assert found["correction/touched_fraction"] == pytest.approx(1 / 2)
    assert found["correction/weight_mean"] == pytest.approx(2.5 / 3)
    assert found["correction/ratio_max"] == pytest.approx(6)
    # geometric means over what is there: sqrt(0.25) = 0.5 and 6
    assert by_hand(CorrectionSection(mode="sequence_mask", low=0.49, high=1.6), [1, 3, 4])[0] == [1, 0, 1, 0, 0, 0]


MODES = [
    CorrectionSection(mode="tis"),
    CorrectionSection(mode="tis", level="sequence"),
    CorrectionSection(mode="mis"),
    CorrectionSection(mode="mis", level="sequence"),
    CorrectionSection(mode="icepop"),
    CorrectionSection(mode="sequence_mask"),
]
each_mode = pytest.mark.parametrize("section", MODES, ids=lambda s: f"{s.mode}-{s.level}")


@each_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_engine_that_agrees_gives_exactly_1(section: CorrectionSection, dtype: torch.dtype) -> None:
    weights, metrics = weigh([0.0] * 6, section, SEQUENCE, rollout=-0.1, dtype=dtype)
    assert weights.tolist() == [1.0] * 6 and weights.dtype == dtype
    assert metrics.means() == {"correction/touched_fraction": 0, "correction/weight_mean": 1}
    assert metrics.maxima() == {"correction/ratio_max": 1}


@each_mode
def test_infinities_and_nans_behind_the_mask_reach_nothing(section: CorrectionSection) -> None:
    """Case 20."""
    weights, metrics = weigh([math.inf, 0.0, -math.inf, math.nan], section, [0, 0, 1, 1], masked=[0, 2, 3])
    assert weights.tolist() == [0, 1, 0, 0]
    assert metrics.means() == {"correction/touched_fraction": 0, "correction/weight_mean": 1}
    assert metrics.maxima() == {"correction/ratio_max": 1}


@pytest.mark.parametrize(
    ("section", "above", "below"),
    [
        (MODES[0], 2, 0),
        (MODES[1], 2, 0),
        (MODES[2], 0, 0),
        (MODES[3], 0, 0),
        (MODES[4], 0, 0),
        (MODES[5], 0, 0),
    ],
    ids=lambda s: f"{s.mode}-{s.level}" if isinstance(s, CorrectionSection) else None,
)
@pytest.mark.parametrize("size", [1e4, math.inf])
def test_a_huge_gap_is_decided_without_overflow(section: CorrectionSection, above: float, below: float, size: float) -> None:
    """Case 20. Each token in a sequence of its own."""
    weights, metrics = weigh([size, -size, 0.0], section, [0, 1, 2])
    assert weights.tolist() == close(above, below, 1)
    assert metrics.maxima()["correction/ratio_max"] == pytest.approx(math.exp(20))
    assert all(math.isfinite(value) for value in metrics.means().values())


@pytest.mark.parametrize(
    ("section", "log_ratio", "weight"),
    [
        (CorrectionSection(mode="icepop"), math.log(0.5), 0.5),
        (CorrectionSection(mode="icepop"), math.log(0.5) - 1e-9, 0),
        (CorrectionSection(mode="icepop"), math.log(5), 5),
        (CorrectionSection(mode="icepop"), math.log(5) + 1e-9, 0),
        (CorrectionSection(mode="mis"), math.log(2), 2),
        (CorrectionSection(mode="mis"), math.log(2) + 1e-9, 0),
        (CorrectionSection(mode="sequence_mask"), math.log(1.001), 1),
        (CorrectionSection(mode="sequence_mask"), math.log(1.001) + 1e-9, 0),
        (CorrectionSection(mode="sequence_mask"), math.log(0.999), 1),
        (CorrectionSection(mode="sequence_mask"), math.log(0.999) - 1e-9, 0),
    ],
)
def test_what_lies_on_a_bound_is_inside(section: CorrectionSection, log_ratio: float, weight: float) -> None:
    weights, metrics = weigh([log_ratio], section, rollout=0.0)
    assert float(weights) == pytest.approx(weight, abs=1e-8)
    assert metrics.means()["correction/touched_fraction"] == (weight == 0)


@each_mode
def test_no_tokens_and_no_sequences(section: CorrectionSection) -> None:
    """A data-parallel rank that has nothing left brings every key."""
    weights, metrics = weigh([], section)
    full = weigh([0.1], section)[1]
    assert weights.tolist() == [] and metrics.means() == metrics.maxima() == {}
    metrics.merge(full)
    assert metrics.means() == full.means() and metrics.maxima() == full.maxima()


@each_mode
def test_split_into_microbatches_the_weights_and_the_counts_are_the_same(section: CorrectionSection) -> None:
    """Case 24: sums and counts add up."""
    logs = [math.log(r) for r in RATIOS]
    whole, metrics = weigh(logs, section, SEQUENCE)
    first, second = weigh(logs[:3], section, [0, 0, 0]), weigh(logs[3:], section, [0, 1, 1])
    assert torch.cat([first[0], second[0]]).tolist() == whole.tolist()
    first[1].merge(second[1])
    assert first[1].means() == pytest.approx(metrics.means()) and first[1].maxima() == metrics.maxima()


def test_weights_have_no_gradient() -> None:
    old = torch.tensor([-1.0, -2.0], requires_grad=True)
    section, mask = CorrectionSection(mode="tis"), torch.ones(2, dtype=torch.bool)
    weights, _ = correction_weights(old, torch.tensor([-1.5, -2.0]), torch.tensor([0, 0]), 1, mask, section)
    assert not weights.requires_grad and weights.tolist() == pytest.approx([math.exp(0.5), 1])
