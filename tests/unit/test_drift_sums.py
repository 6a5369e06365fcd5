"""Sums of drift: scores, flips on any layer, views; how stages and microbatches add up to what is reported."""

import math

import pytest
import torch
from torch import Tensor

from moe_rl.drift.sums import DriftSums, ScoredRows, to_metrics

LN2 = math.log(2)
P, Q = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 8]).log(), torch.tensor([1 / 8, 1 / 2, 1 / 4, 1 / 8]).log()
# Three tokens, two layers, two of four experts. By layer: {0,1} -> {0,1}, {0,2}, {2,3}, and {2,3} -> {2,3}.
OLD = torch.tensor([[[0, 1], [2, 3]]] * 3)
NEW = torch.tensor([[[0, 1], [2, 3]], [[0, 2], [2, 3]], [[2, 3], [2, 3]]])
ALL = torch.ones(3, dtype=torch.bool)


def scored(margins: list[list[float]]) -> ScoredRows:
    """As many rows as margins: layer 0 goes from P to Q, layer 1 stays at P. KL 0.625 log 2; shift over {0,1} 1.5 log 2."""
    rows = len(margins)
    old, new = torch.stack([P, P]).expand(rows, 2, 4), torch.stack([Q, P]).expand(rows, 2, 4)
    return ScoredRows(old, new, OLD[:1].expand(rows, 2, 2), torch.tensor(margins))


def test_measured_with_scores_by_hand() -> None:
    sums = DriftSums.measure(OLD, NEW, ALL, 4, scored([[0.25, 0.5], [0.75, math.inf]]))
    assert sums.sum_of("change").tolist() == [1.5, 0]
    assert sums.sum_of("flips").tolist() == [2, 0]
    assert sums.sum_of("jaccard").tolist() == pytest.approx([1 + 1 / 3, 3])
    assert sums.sum_of("tokens").tolist() == [3, 3]
    assert sums.sum_of("router_kl").tolist() == pytest.approx([2 * 0.625 * LN2, 0], abs=1e-6)
    assert sums.sum_of("gate_shift").tolist() == pytest.approx([2 * 1.5 * LN2, 0], abs=1e-6)
    assert sums.sum_of("scored").tolist() == [2, 2]
    assert sums.sum_of("margin").tolist() == [1.0, 0.5]  # the infinite one is not in it,
    assert sums.sum_of("bounded").tolist() == [2, 1]  # nor counted
    assert sums.load.tolist() == [[2, 1, 2, 1], [0, 0, 3, 3]]
    assert sums.any.tolist() == [0, 0]


def test_metrics_with_scores_by_hand() -> None:
    """Layers 1 and 4 of the model."""
    sums = DriftSums.measure(OLD, NEW, ALL, 4, scored([[0.25, 0.5], [0.75, math.inf]]))
    metrics = to_metrics([sums.with_any(torch.tensor([False, True, True]))], (1, 4), "engine")
    wanted = {
        "expert_change_rate": (0.5, 0.0, max),
        "flip_rate": (2 / 3, 0.0, max),
        "jaccard": (4 / 9, 1.0, min),
        "router_kl": (0.625 * LN2, 0.0, max),
        "gate_shift": (1.5 * LN2, 0.0, max),
        "margin": (0.5, 0.5, min),
    }
    expected = {"drift/engine/any_layer_flip_rate": 2 / 3}
    for name, (first, second, worst) in wanted.items():
        key = f"drift/engine/{name}"
        expected |= {f"{key}/layer_01": first, f"{key}/layer_04": second}
        expected |= {f"{key}/mean": (first + second) / 2, f"{key}/worst": worst(first, second)}
    assert metrics == pytest.approx(expected, abs=1e-6)


def test_where_every_expert_is_chosen_there_is_no_margin() -> None:
    """K = E."""
    sums = DriftSums.measure(OLD, NEW, ALL, 4, scored([[math.inf, math.inf]]))
    metrics = to_metrics([sums], (0, 1))
    assert not [key for key in metrics if "/margin/" in key]
    assert metrics["drift/update/router_kl/layer_00"] == pytest.approx(0.625 * LN2)


def test_scores_of_few_rows_do_not_dilute_the_rates_of_all() -> None:
    few = DriftSums.measure(OLD, NEW, ALL, 4, scored([[0.25, 0.5]]))
    none = DriftSums.measure(OLD, NEW, ALL, 4)
    metrics = to_metrics([few + none], (0, 1), "noise")
    assert metrics["drift/noise/router_kl/layer_00"] == pytest.approx(0.625 * LN2)
    assert metrics["drift/noise/margin/layer_01"] == 0.5
    assert metrics["drift/noise/expert_change_rate/layer_00"] == 0.5
    assert not [key for key in to_metrics([none], (0, 1)) if "router_kl" in key or "gate_shift" in key or "margin" in key]


def random(seed: int, tokens: int = 20) -> tuple[Tensor, Tensor, ScoredRows, Tensor]:
    """Routes of 4 layers, 2 of 6 experts; scores of every second token; which tokens flip on any layer."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.rand(tokens, 4, 6, generator=generator)  # noqa: E731
    old, new = (draw().topk(2).indices.sort(-1).values for _ in range(2))
    new[::2] = old[::2]
    rows = ScoredRows(draw()[::2].log_softmax(-1), draw()[::2].log_softmax(-1), old[::2], draw()[::2, :, 0])
    return old, new, rows, (old != new).any(-1).any(-1)


@pytest.mark.parametrize("seed", range(3))
def test_stages_and_microbatches_add_up(seed: int) -> None:
    old, new, rows, flips = random(seed)
    whole = DriftSums.measure(old, new, torch.ones(20, dtype=torch.bool), 6, rows).with_any(flips)
    total = DriftSums.zeros(4, 6)
    for tokens, half in ((slice(0, 8), slice(0, 4)), (slice(8, 20), slice(4, 10))):
        mask = torch.ones(len(old[tokens]), dtype=torch.bool)
        for layers in ([0, 3], [2, 1]):
            part = ScoredRows(*(tensor[half][:, layers] for tensor in rows))
            here = DriftSums.measure(old[tokens][:, layers], new[tokens][:, layers], mask, 6, part).placed(layers, 4)
            if layers == [0, 3]:  # the first stage counts the tokens
                here = here.with_any(flips[tokens])
            total = total + DriftSums.from_vector(here.vector(), 4, 6)
    torch.testing.assert_close(total.vector(), whole.vector(), atol=1e-9, rtol=0)
    assert total.any.tolist() == [int(flips.sum()), 20]


def test_flips_on_any_layer_are_counted_where_the_routes_are() -> None:
    """On a device that is not the CPU both counts must be made there."""
    flips = torch.zeros(5, dtype=torch.bool, device="meta")
    assert DriftSums.zeros(1, 2, "meta").with_any(flips).any.device.type == "meta"


def test_only_response_tokens_and_used_routes_of_an_update_describe_the_load() -> None:
    sums = DriftSums.measure(OLD, NEW, ALL, 4).with_any(torch.tensor([True, False, False]))
    for comparison, view, load in (
        ("update", None, True),
        ("update", "prompt", False),
        ("update", "local", False),
        ("probe", None, False),
        ("engine", "free", False),
    ):
        metrics = to_metrics([sums], (0, 1), comparison, view)  # pyright: ignore[reportArgumentType]
        prefix = f"drift/{comparison}/" + (f"{view}/" if view else "")
        loads = [key for key in metrics if key.startswith("drift/load/")]
        assert bool(loads) == load
        assert all(key.startswith(prefix) for key in metrics if key not in loads)
        assert metrics[f"{prefix}any_layer_flip_rate"] == pytest.approx(1 / 3)


def test_minibatches_of_updates_have_rates_of_their_own_and_others_none() -> None:
    """Nothing changes in the first, everything that changes in the second."""
    two = [DriftSums.measure(OLD, OLD, ALL, 4), DriftSums.measure(OLD, NEW, ALL, 4)]
    for comparison, view, count in (("update", None, 16), ("update", "local", 16), ("update", "prompt", 0), ("noise", None, 0)):
        metrics = to_metrics(two, (0, 1), comparison, view)  # pyright: ignore[reportArgumentType]
        suffixed = [key for key in metrics if key.endswith(("/minibatch_0", "/minibatch_1"))]
        assert len(suffixed) == count  # two metrics, two layers with mean and worst, two minibatches
    metrics = to_metrics(two, (0, 1), "update", "local")
    rates = [metrics[f"drift/update/local/expert_change_rate/layer_00/minibatch_{i}"] for i in (0, 1)]
    assert rates == [0, 0.5] and metrics["drift/update/local/expert_change_rate/layer_00"] == 0.25


def test_worst_loads_by_hand() -> None:
    """Layer 0: 2, 1, 2, 1. Layer 1: 0, 0, 3, 3: half of log 4, the largest twice the mean, two dead."""
    metrics = to_metrics([DriftSums.measure(OLD, NEW, ALL, 4)], (0, 1))
    assert metrics["drift/load/load_entropy/worst"] == pytest.approx(0.5)
    assert metrics["drift/load/max_violation/worst"] == pytest.approx(1.0)
    assert metrics["drift/load/dead_experts/worst"] == 2
    assert metrics["drift/load/dead_experts/mean"] == 1
