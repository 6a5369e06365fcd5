"""What holds for every algorithm with every aggregation."""

import math
from collections.abc import Sequence
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from moe_rl.algorithms.base import Denominators, LossInputs
from moe_rl.algorithms.loss import KLTerm, LossSettings, policy_loss
from moe_rl.algorithms.table import ALGORITHMS, KLEstimator
from moe_rl.metrics import Metrics
from tests.losses import EVERY, INF, changed, full_inputs, gradient, make_inputs, mild, of_places, select

every_loss = pytest.mark.parametrize(("name", "kind"), EVERY)
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)
GLOBAL = Denominators(4, 9)
BONUS = {"entropy_coefficient": 0.2}


@every_loss
def test_microbatches_and_ranks_sum_to_the_whole(name: str, kind: str) -> None:
    """Case 21: any split, and a rank with nothing."""
    inputs, kl, given = full_inputs(), KLTerm("k3", 0.3), mild(name, aggregation=kind, **BONUS)
    whole, whole_metrics = policy_loss(inputs, given, GLOBAL, kl)
    whole_gradient = gradient(whole, inputs)
    for split in ([[0, 1], [2, 3, 4]], [[0], [1], [2], [3], [4]], [[0, 1, 2, 3, 4], []]):
        results = [policy_loss(select(inputs, part), given, GLOBAL, kl) for part in split]
        total = torch.stack([loss for loss, _ in results]).sum()
        assert total.item() == pytest.approx(whole.item(), abs=1e-12)
        assert torch.allclose(gradient(total, inputs), whole_gradient, atol=1e-12, rtol=0)
        merged = Metrics()
        for _, metrics in results:
            merged.merge(metrics)
        assert merged.means() == pytest.approx(whole_metrics.means(), abs=1e-12)
        assert merged.maxima() == pytest.approx(whole_metrics.maxima(), abs=1e-12)
        assert merged.means()["loss/total"] == pytest.approx(whole.item(), abs=1e-12)


@every_loss
def test_response_and_token_order_do_not_matter(name: str, kind: str) -> None:
    inputs, kl, given = full_inputs(), KLTerm("k2", 0.3), mild(name, aggregation=kind, **BONUS)
    whole, metrics = policy_loss(inputs, given, GLOBAL, kl)
    shuffled = select(inputs, [3, 0, 4, 2, 1])
    backwards = of_places(shuffled, torch.arange(11, -1, -1))
    other, other_metrics = policy_loss(backwards, given, GLOBAL, kl)
    assert other.item() == pytest.approx(whole.item(), abs=1e-12)
    assert torch.allclose(gradient(other, inputs), gradient(whole, inputs), atol=1e-12, rtol=0)
    assert other_metrics.means() == pytest.approx(metrics.means(), abs=1e-12)


PER_TOKEN = [field.name for field in fields(LossInputs) if field.name not in ("sequence", "sequences", "mask")]


def assert_absent(given: LossSettings, inputs: LossInputs, spoilt: Sequence[dict[str, Tensor]]) -> None:
    kl = KLTerm("k3", 0.3)
    clean, clean_metrics = policy_loss(inputs, given, GLOBAL, kl)
    clean_gradient, numbers = gradient(clean, inputs), clean_metrics.means() | clean_metrics.maxima()
    for values in spoilt:
        dirty_inputs = changed(inputs, **values)
        dirty_inputs.train_logprobs.requires_grad_()
        dirty, metrics = policy_loss(dirty_inputs, given, GLOBAL, kl)
        assert dirty.item() == clean.item()
        dirty_gradient = gradient(dirty, dirty_inputs)
        assert dirty_gradient[~inputs.mask].tolist() == [0.0] * 3
        assert torch.equal(dirty_gradient, clean_gradient)
        assert metrics.means() | metrics.maxima() == numbers


def spoil(inputs: LossInputs, junk: float) -> dict[str, Tensor]:
    """Of alternating sign, so that differences of two fields do not cancel."""
    values = {field: getattr(inputs, field).detach() for field in PER_TOKEN}
    return {field: torch.where(inputs.mask, value, junk * (-1) ** i) for i, (field, value) in enumerate(values.items())}


@every_algorithm
@pytest.mark.parametrize("junk", [INF, -INF, float("nan"), 1e30])
def test_masked_tokens_are_absent_whatever_one_field_holds(name: str, junk: float) -> None:
    inputs = full_inputs()
    spoilt = [{field: value} for field, value in spoil(inputs, junk).items()]
    assert_absent(mild(name, **BONUS), inputs, spoilt)


@every_loss
def test_masked_tokens_are_absent_whatever_all_fields_hold(name: str, kind: str) -> None:
    inputs = full_inputs()
    assert_absent(mild(name, aggregation=kind, **BONUS), inputs, [spoil(inputs, INF), spoil(inputs, float("nan"))])


@every_algorithm
@pytest.mark.parametrize("size", [200.0, 1e4])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_huge_log_ratios_stay_finite(name: str, size: float, estimator: KLEstimator) -> None:
    """Case 20."""
    log_ratios = [[sign * size] * 2 for sign in (1, -1) for _ in range(3)]
    reference = [-1.5 + sign * size for sign in (1, -1)] * 6
    inputs = make_inputs(log_ratios, [1.0, -1.0, 0.0] * 2, dtype=torch.float32, ref_logprobs=reference)
    loss, metrics = policy_loss(inputs, mild(name), Denominators(6, 12), KLTerm(estimator, 0.1))
    assert math.isfinite(loss.item())
    assert gradient(loss, inputs).isfinite().all()
    assert all(math.isfinite(value) for value in [*metrics.means().values(), *metrics.maxima().values()])


HUGE = [(200.0, 1.0), (200.0, -1.0), (-200.0, 1.0), (-200.0, -1.0)]
LOG_PI = {200.0: 198.5, -200.0: -201.5}
ONE_TOKEN = {"dr_grpo": {"aggregation_length": 1}}  # of a response of one token, its default takes a tenth


@every_algorithm
@pytest.mark.parametrize(("log_ratio", "advantage"), HUGE)
def test_huge_ratios_have_the_documented_values(name: str, log_ratio: float, advantage: float) -> None:
    """Case 20: one token. Where nothing cuts, the log-ratio counts up to 20, and there is no gradient beyond."""
    # Cut at 1.08 above and 0.95 below; e^-200 stands. CISPO: weight x A x log pi. SAPO: 4 / tau for an endless ratio, and
    # 4 sigmoid(-tau) / tau for one of 0.
    cut = {(200.0, 1.0): 1.08, (200.0, -1.0): -math.exp(20), (-200.0, 1.0): math.exp(-200), (-200.0, -1.0): -0.95}
    weight = 1.08 if log_ratio > 0 else 0.95
    tau = 1.0 if advantage > 0 else 1.05
    expected = {
        "cispo": weight * advantage * LOG_PI[log_ratio],
        "sapo": advantage * 4 / tau / (1 + (math.exp(tau) if log_ratio < 0 else 0)),
    }.get(name, cut[log_ratio, advantage])
    inputs = make_inputs([[log_ratio]], [advantage])
    loss, metrics = policy_loss(inputs, mild(name, **ONE_TOKEN.get(name, {})), Denominators(1, 1))
    assert loss.item() == pytest.approx(-expected, rel=1e-12)
    slope = -weight * advantage if name == "cispo" else 0
    assert gradient(loss, inputs).item() == pytest.approx(slope, abs=1e-80)
    assert metrics.maxima()["ratio/max"] == pytest.approx(math.exp(min(log_ratio, 20)))


@every_algorithm
def test_a_negative_advantage_keeps_its_gradient_inside_the_bound(name: str) -> None:
    # A = -1, log-ratio 10: d loss / d train = e^10, but where the algorithm caps or fades it
    inputs = make_inputs([[10.0]], [-1.0])
    found = gradient(policy_loss(inputs, mild(name, **ONE_TOKEN.get(name, {})), Denominators(1, 1))[0], inputs).item()
    assert found == pytest.approx({"cispo": 1.08, "sapo": 0.0}.get(name, math.exp(10)), abs=1e-12)


@every_loss
def test_a_zero_advantage_gives_no_gradient_and_is_not_clipped(name: str, kind: str) -> None:
    inputs = make_inputs([[1.0, 1.0], [-1.0]], [0.0, 0.0])
    loss, metrics = policy_loss(inputs, mild(name, aggregation=kind), Denominators(2, 3))
    assert loss.item() == 0
    assert gradient(loss, inputs).tolist() == [0, 0, 0]
    # CISPO's clip is of the weight, whatever the advantage
    assert metrics.means().get("ratio/clip_fraction", 0) == (1 if name == "cispo" else 0)
    assert metrics.means()["ratio/log_abs_mean"] == pytest.approx(1.0)


@every_loss
@pytest.mark.parametrize("sequences", [0, 3], ids=["no sequences", "sequences without tokens"])
def test_a_rank_with_nothing_left(name: str, kind: str, sequences: int) -> None:
    full, kl, given = full_inputs(), KLTerm("k3", 0.1), mild(name, aggregation=kind, **BONUS)
    nothing = make_inputs(
        [[]] * sequences, [1.0] * sequences, weights=[], log_router_shift=[], ref_logprobs=[], rollout_logprobs=[], entropy=[]
    )
    for denominators in (GLOBAL, Denominators(0, 0)):
        loss, metrics = policy_loss(nothing, given, denominators, kl)
        assert loss.item() == 0
        assert gradient(loss, nothing).shape == (0,)
        filled = policy_loss(full, given, GLOBAL, kl)[1]
        assert [len(vector) for vector in metrics.vector()] == [len(vector) for vector in filled.vector()]
        before = filled.means() | filled.maxima()
        filled.merge(metrics)
        assert filled.means() | filled.maxima() == before


@every_loss
def test_everything_masked_is_zero_and_counts_nothing(name: str, kind: str) -> None:
    inputs = full_inputs(masked=range(12))
    loss, metrics = policy_loss(inputs, mild(name, aggregation=kind, **BONUS), Denominators(0, 0), KLTerm("k3", 0.1))
    assert loss.item() == 0
    assert gradient(loss, inputs).tolist() == [0.0] * 12
    assert (metrics.means(), metrics.maxima()) == ({}, {})


@every_algorithm
def test_only_the_trained_policy_gets_gradient(name: str) -> None:
    inputs = full_inputs()
    others = [value for field in PER_TOKEN if field != "train_logprobs" and (value := getattr(inputs, field)) is not None]
    leaves = [other.requires_grad_() for other in others]
    assert len(leaves) == 7
    loss, _ = policy_loss(inputs, mild(name), GLOBAL, KLTerm("k3", 0.3))
    assert torch.autograd.grad(loss, leaves, allow_unused=True) == (None,) * 7
