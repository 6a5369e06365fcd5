"""What the losses report, by hand, and how ranks add it up."""

import math

import pytest
import torch

from moe_rl.algorithms.base import Denominators
from moe_rl.algorithms.diagnostics import derived_ratio_metrics
from moe_rl.algorithms.loss import policy_loss
from moe_rl.algorithms.table import ALGORITHMS
from moe_rl.metrics import Metrics
from tests.losses import counts, logs, make_inputs, settings


def test_the_moments_and_sides_of_token_ratios() -> None:
    # Range [0.8, 1.27]. Advantage 1: ratios 0.45, 1.5, 1. -1: 0.7, 2.5. 0: 1.5. Masked: 9.
    inputs = make_inputs([logs(0.45, 1.5, 1.0, 9.0), logs(0.7, 2.5), logs(1.5)], [1.0, -1.0, 0.0], masked=[3])
    loss, metrics = policy_loss(inputs, settings("grpo"), Denominators(3, 6))
    means = metrics.means()
    assert means["ratio/mean"] == pytest.approx(7.65 / 6)
    assert means["ratio/second_moment"] == pytest.approx(12.4425 / 6)  # 0.2025 + 2.25 + 1 + 0.49 + 6.25 + 2.25
    assert means["ratio/log_abs_mean"] == pytest.approx(
        (math.log(1 / 0.45) + 2 * math.log(1.5) + math.log(1 / 0.7) + math.log(2.5)) / 6
    )
    assert means["ratio/tail_fraction"] == pytest.approx(2 / 6)  # 0.45 and 2.5
    assert metrics.maxima()["ratio/max"] == pytest.approx(2.5)
    # cut: 1.5 of advantage 1, and 0.7
    assert means["ratio/clip_fraction"] == pytest.approx(2 / 6)
    assert means["ratio/clip_fraction_high"] == means["ratio/clip_fraction_low"] == pytest.approx(1 / 6)
    # outside, whether or not it cuts: shares of the 3 positive and the 2 negative
    sides = {key: value for key, value in means.items() if key.startswith("ratio/outside/")}
    assert sides == pytest.approx(
        {
            "ratio/outside/low/positive": 1 / 3,
            "ratio/outside/high/positive": 1 / 3,
            "ratio/outside/low/negative": 1 / 2,
            "ratio/outside/high/negative": 1 / 2,
        }
    )
    derived = derived_ratio_metrics(means)
    assert derived["ratio/variance"] == pytest.approx(12.4425 / 6 - (7.65 / 6) ** 2)
    assert derived["ratio/effective_sample_share"] == pytest.approx(7.65**2 / (6 * 12.4425))


def test_clip_fractions_name_the_side() -> None:
    # Three tokens cut above (A > 0), one cut below (A < 0), of 8.
    inputs = make_inputs([logs(1.3, 1.4, 1.5, 1.0), logs(0.7, 0.9, 1.0, 1.5)], [1.0, -1.0])
    means = policy_loss(inputs, settings("grpo"), Denominators(2, 8))[1].means()
    assert means["ratio/clip_fraction_high"] == pytest.approx(3 / 8)
    assert means["ratio/clip_fraction_low"] == pytest.approx(1 / 8)
    assert means["ratio/clip_fraction"] == pytest.approx(4 / 8)
    assert means["ratio/outside/high/negative"] == pytest.approx(1 / 4)
    assert means["ratio/outside/low/positive"] == 0


def test_tails_are_ratios_beyond_two_either_way() -> None:
    inputs = make_inputs([logs(1.9, 2.1, 1.0), logs(0.48, 0.52)], [1.0, 1.0])
    assert policy_loss(inputs, settings("grpo"), Denominators(2, 5))[1].means()["ratio/tail_fraction"] == pytest.approx(2 / 5)


def test_a_sequence_ratio_counts_once_and_an_empty_sequence_not() -> None:
    # s = e^0.001 (3 tokens), e^-0.002 (1 token), one sequence masked away; A = 1, -1
    inputs = make_inputs([[0.003, 0.0, 0.0], [-0.002], [5.0]], [1.0, -1.0, 1.0], masked=[4])
    means = policy_loss(inputs, settings("gspo"), Denominators(2, 4))[1].means()
    assert means["ratio/mean"] == pytest.approx((math.exp(0.001) + math.exp(-0.002)) / 2)
    assert means["ratio/second_moment"] == pytest.approx((math.exp(0.002) + math.exp(-0.004)) / 2)
    assert means["ratio/clip_fraction_high"] == means["ratio/clip_fraction_low"] == 1 / 2
    assert means["ratio/outside/high/positive"] == means["ratio/outside/low/negative"] == 1


@pytest.mark.parametrize(
    ("ratios", "variance", "share"),
    [([1.0, 1.0, 1.0], 0.0, 1.0), ([2.0, 2.0], 0.0, 1.0), ([1.0, 3.0], 1.0, 0.8), ([1e-9, 1.0], 0.25, 0.5)],
)
def test_effective_sample_share(ratios: list[float], variance: float, share: float) -> None:
    # (sum r)^2 / (n sum r^2): 4^2 / (2 x 10) = 0.8; one of two counts: 0.5
    inputs = make_inputs([logs(*ratios)], [1.0])
    derived = derived_ratio_metrics(policy_loss(inputs, settings("grpo"), counts(inputs))[1].means())
    assert derived == pytest.approx({"ratio/variance": variance, "ratio/effective_sample_share": share}, abs=1e-8)


def test_nothing_is_derived_from_nothing() -> None:
    assert derived_ratio_metrics({}) == {}
    assert derived_ratio_metrics({"ratio/mean": 0.0, "ratio/second_moment": 0.0})["ratio/effective_sample_share"] == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_token_metrics(name: str) -> None:
    # Token 1 is masked. |old - rollout| = 0.1, 0.3 | entropy 1, 3 | factor 0.9, 0.8.
    inputs = make_inputs(
        [[0.0, 0.0], [0.0]],
        [1.0, 1.0],
        masked=[1],
        rollout_logprobs=[-1.6, -9.0, -1.2],
        entropy=[1.0, 50.0, 3.0],
        log_router_shift=logs(0.9, 0.1, 0.8),
    )
    metrics = policy_loss(inputs, settings(name), Denominators(2, 2))[1]
    means = metrics.means()
    assert means["rollout/logprob_gap_mean"] == pytest.approx(0.2)
    assert metrics.maxima()["rollout/logprob_gap_max"] == pytest.approx(0.3)
    assert means["entropy/mean"] == pytest.approx(2.0)
    assert means["router_shift/factor_mean"] == pytest.approx(0.85)
    assert means["kl/old_new"] == 0
    assert not {"loss/kl", "loss/entropy", "kl/ref"} & means.keys()
    bare = policy_loss(make_inputs([[0.0]], [1.0]), settings(name), Denominators(1, 1))[1]
    absent = ("rollout/", "entropy/", "router_shift/", "kl/ref")
    assert not [key for key in bare.means() | bare.maxima() if key.startswith(absent)]


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_ranks_with_unequal_counts_add_sums_and_counts(name: str) -> None:
    """Case 24: one rank has 3 of 4 responses. Means of means, and a mean of variances, would be something else."""
    first = make_inputs([[0.5], [0.0], [0.0]], [1.0, 1.0, 1.0])  # one of 3 is cut
    second = make_inputs([[0.5]], [1.0])  # the only one is cut
    ranks = [policy_loss(inputs, settings(name), Denominators(4, 4))[1] for inputs in (first, second)]
    sums, maxima = zip(*(metrics.vector() for metrics in ranks), strict=True)
    reduced = Metrics()
    reduced.merge(ranks[0])  # as after all-reduces with SUM and MAX
    reduced.load_vector(torch.stack(sums).sum(0), torch.stack(maxima).amax(0))
    means = reduced.means()
    assert means["ratio/clip_fraction"] == pytest.approx(2 / 4)  # not (1 / 3 + 1) / 2
    mean, second_moment = (2 + 2 * math.exp(0.5)) / 4, (2 + 2 * math.exp(1.0)) / 4
    assert means["ratio/mean"] == pytest.approx(mean)
    assert derived_ratio_metrics(means)["ratio/variance"] == pytest.approx(second_moment - mean**2)
    high = 1 + (0.27 if name == "grpo" else 4e-4)
    assert means["loss/total"] == pytest.approx(-(2 + 2 * high) / 4)
