import math
import time

import pytest
import torch
from torch import Tensor

from moe_rl.drift.metrics import change_sums, dead_experts, expert_load, load_entropy, max_violation
from moe_rl.drift.sums import DriftSums, to_metrics

# Three tokens, two MoE layers, two of four experts.
OLD = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [0, 3]], [[2, 3], [1, 2]]])
NEW = torch.tensor([[[1, 0], [2, 0]], [[0, 2], [0, 3]], [[0, 1], [2, 1]]])
ALL = torch.ones(3, dtype=torch.bool)


def random_routes(tokens: int, layers: int, topk: int, experts: int, seed: int) -> Tensor:
    return torch.rand(tokens, layers, experts, generator=torch.Generator().manual_seed(seed)).topk(topk).indices


def everyone(routes: Tensor) -> Tensor:
    return torch.ones(len(routes), dtype=torch.bool)


def test_change_and_flips_by_hand() -> None:
    # Layer 0: same set in another order: 0; {0,1} -> {0,2}: 1 - 1/2; {2,3} -> {0,1}: 1. Sum 1.5, two flips.
    # Layer 1: {2,3} -> {0,2}: 1/2; the same: 0; the same set in another order: 0. Sum 0.5, one flip.
    sums = change_sums(OLD, NEW, ALL, 4)
    assert sums.change.tolist() == [1.5, 0.5]
    assert sums.flips.tolist() == [2, 1]
    assert sums.tokens == 3


def test_masked_tokens_are_not_counted_and_may_hold_anything() -> None:
    old = OLD.clone()
    old[1] = -1  # unknown routes
    sums = change_sums(old, NEW, torch.tensor([True, False, True]), 4)
    assert (sums.change.tolist(), sums.flips.tolist(), sums.tokens) == ([1.0, 0.5], [1, 1], 2)
    assert expert_load(old, 4, torch.tensor([True, False, False])).tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]


def test_equal_routes_give_exactly_zero_in_any_order_of_the_experts() -> None:
    routes = random_routes(500, 3, 7, 16, seed=0)
    order = torch.rand(routes.shape, generator=torch.Generator().manual_seed(1)).argsort(-1)
    sums = change_sums(routes, routes.gather(-1, order), everyone(routes), 16)
    assert sums.change.tolist() == sums.flips.tolist() == [0.0] * 3


def test_one_expert_a_token() -> None:
    old, new = torch.tensor([[[0]], [[1]], [[2]]]), torch.tensor([[[0]], [[2]], [[1]]])
    sums = change_sums(old, new, ALL, 3)
    assert (sums.change.tolist(), sums.flips.tolist()) == ([2.0], [2.0])


def test_all_experts_a_token_never_change() -> None:
    old, new = random_routes(20, 2, 4, 4, seed=0), random_routes(20, 2, 4, 4, seed=1)
    assert not torch.equal(old, new)
    sums = change_sums(old, new, everyone(old), 4)
    assert sums.change.tolist() == sums.flips.tolist() == [0.0, 0.0]
    assert load_entropy(expert_load(old, 4, everyone(old))).tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize(("topk", "experts"), [(1, 5), (2, 5), (4, 9), (8, 40)])
def test_against_python_sets(dtype: torch.dtype, topk: int, experts: int) -> None:
    old, new = (random_routes(50, 3, topk, experts, seed).to(dtype) for seed in (0, 1))
    new[::3] = old[::3]
    mask = torch.arange(50) % 5 != 2
    change, flips, load = [0.0] * 3, [0] * 3, [[0] * experts for _ in range(3)]
    for token in mask.nonzero()[:, 0].tolist():
        for layer in range(3):
            a, b = set(old[token, layer].tolist()), set(new[token, layer].tolist())
            change[layer] += 1 - len(a & b) / topk
            flips[layer] += a != b
            for expert in a:
                load[layer][expert] += 1
    sums = change_sums(old, new, mask, experts)
    assert sums.change.tolist() == pytest.approx(change)
    assert sums.flips.tolist() == flips
    assert expert_load(old, experts, mask).tolist() == load


@pytest.mark.parametrize("which", ["old", "new"])
def test_a_bad_row_is_named(which: str) -> None:
    mask = torch.tensor([False, True, True])
    for value, fault in [(4, r"expert 4 outside \[0, 4\)"), (-1, r"expert -1 outside \[0, 4\)"), (2, "expert 2 a second time")]:
        routes = {"old": OLD.clone(), "new": NEW.clone()}
        routes[which][2, 1] = torch.tensor([2, value])
        for measure in (change_sums, DriftSums.measure):
            with pytest.raises(ValueError, match=rf"{which} routes, row 2, layer 1 .*: {fault}"):
                measure(routes["old"], routes["new"], mask, 4)
        with pytest.raises(ValueError, match=rf"^routes routes, row 2, layer 1 .*: {fault}"):
            expert_load(routes[which], 4, mask)


def test_an_expert_twice_is_found_in_any_two_places() -> None:
    for i in range(4):
        for j in range(i):
            routes = torch.tensor([[[0, 1, 2, 3]]])
            routes[0, 0, i] = routes[0, 0, j]
            with pytest.raises(ValueError, match=f"expert {j} a second time"):
                expert_load(routes, 5, torch.ones(1, dtype=torch.bool))


def test_ids_beyond_the_narrow_storage_are_neither_wrapped_nor_confused() -> None:
    routes = torch.tensor([[[1, 2**16 + 2]]])
    with pytest.raises(ValueError, match="expert 65538 outside"):
        expert_load(routes, 100, torch.ones(1, dtype=torch.bool))
    sums = change_sums(routes, torch.tensor([[[1, 2]]]), torch.ones(1, dtype=torch.bool), 2**17)
    assert sums.change.tolist() == [0.5]


@pytest.mark.parametrize(("dtype", "experts"), [(torch.uint8, 256), (torch.uint8, 300), (torch.int16, 2**15)])
def test_as_many_experts_as_the_storage_has_numbers(dtype: torch.dtype, experts: int) -> None:
    """A uint8 compared with 256 is compared with 0, and an int16 with 2^15 likewise."""
    last = min(experts, 256) - 1
    old, new = (torch.tensor([[[a, last]]]).to(dtype) for a in (0, 7))
    one = torch.ones(1, dtype=torch.bool)
    assert change_sums(old, new, one, experts).change.tolist() == [0.5]
    assert expert_load(new, experts, one)[0].nonzero()[:, 0].tolist() == [7, last]


def test_load_by_hand() -> None:
    # Layer 0: shares 1/2, 1/4, 1/4, 0: entropy 1.5 log 2, over log 4: 0.75. Largest 4 over mean 2, minus 1: 1. One dead.
    # Layer 1: even. Layer 2: all to one.
    counts = torch.tensor([[4, 2, 2, 0], [5, 5, 5, 5], [0, 9, 0, 0]])
    assert load_entropy(counts).tolist() == pytest.approx([0.75, 1.0, 0.0])
    assert max_violation(counts).tolist() == pytest.approx([1.0, 0.0, 3.0])
    assert dead_experts(counts).tolist() == [1, 0, 3]


def test_load_entropy_does_not_correct_for_k_and_a_single_expert_is_even() -> None:
    # Every token chooses the same 2 of 8 experts: log 2 / log 8 = 1/3.
    routes = torch.tensor([[[3, 5]]] * 6)
    assert load_entropy(expert_load(routes, 8, everyone(routes))).item() == pytest.approx(1 / 3)
    assert load_entropy(torch.tensor([[7]])).tolist() == [1.0]


def test_no_tokens() -> None:
    nothing, none = torch.zeros(0, 2, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
    sums = DriftSums.measure(nothing, nothing, none, 4)
    assert sums.vector().tolist() == [0.0] * (2 * 9 + 2 * 4 + 2)
    assert to_metrics([sums], (0, 1)) == {}
    assert DriftSums.measure(OLD, NEW, ~ALL, 4).vector().tolist() == [0.0] * 28


def test_measure_flattens_and_comes_back() -> None:
    sums = DriftSums.measure(OLD, NEW, ALL, 4)
    # New routes: layer 0: {0,1}, {0,2}, {0,1}: 3, 2, 1, 0. Layer 1: {0,2}, {0,3}, {1,2}: 2, 1, 2, 1.
    # Jaccard: 1, 1/3, 0 and 1/3, 1, 1. No scores were given.
    counted = [1.5, 0.5, 2, 1, pytest.approx(4 / 3), pytest.approx(7 / 3), 3, 3]
    assert sums.vector().tolist() == [*counted, *[0] * 10, 3, 2, 1, 0, 2, 1, 2, 1, 0, 0]
    assert sums.vector().dtype == torch.float64
    again = DriftSums.from_vector(sums.vector(), layers=2, experts=4)
    assert torch.equal(again.vector(), sums.vector())
    assert torch.equal(again.load, sums.load)


def test_microbatches_and_pipeline_stages_add_up_to_the_whole() -> None:
    old, new = (random_routes(30, 5, 2, 6, seed) for seed in (0, 1))
    mask = torch.arange(30) % 4 != 0
    whole = DriftSums.measure(old, new, mask, 6)
    total = DriftSums.zeros(5, 6)
    for tokens in (slice(0, 11), slice(11, 30)):
        for positions in ([0, 3], [4, 1, 2]):  # stages need not hold neighbouring layers
            part = DriftSums.measure(old[tokens][:, positions], new[tokens][:, positions], mask[tokens], 6)
            total = total + part.placed(positions, 5)
    assert torch.allclose(total.vector(), whole.vector(), atol=1e-12)
    assert total.sum_of("tokens").tolist() == [mask.sum().item()] * 5
    assert to_metrics([total], range(5)) == pytest.approx(to_metrics([whole], range(5)))


@pytest.mark.parametrize("positions", [[0], [0, 0], [0, 5], [-1, 0], [0, 1, 2]])
def test_layers_placed_wrongly_are_an_error(positions: list[int]) -> None:
    with pytest.raises(ValueError, match=r"must be 2 distinct ones in \[0, 5\)"):
        DriftSums.measure(OLD, NEW, ALL, 4).placed(positions, 5)


def test_metrics_by_hand() -> None:
    # Minibatch 0: no change over 1 token. Minibatch 1: the three tokens above. Layers 3 and 12 of the model (others are dense).
    first, second = DriftSums.measure(OLD[:1], OLD[:1], ALL[:1], 4), DriftSums.measure(OLD, NEW, ALL, 4)
    metrics = to_metrics([first, second], (3, 12))
    rate = "drift/update/expert_change_rate"
    assert metrics[f"{rate}/layer_03/minibatch_0"] == 0
    assert metrics[f"{rate}/layer_03/minibatch_1"] == pytest.approx(1.5 / 3)
    assert metrics[f"{rate}/layer_12/minibatch_1"] == pytest.approx(0.5 / 3)
    assert metrics[f"{rate}/mean/minibatch_1"] == pytest.approx(1 / 3)
    # over all four tokens, not the mean of the two minibatches (0.25)
    assert metrics[f"{rate}/layer_03"] == pytest.approx(1.5 / 4)
    assert metrics[f"{rate}/layer_12"] == pytest.approx(0.5 / 4)
    assert metrics[f"{rate}/mean"] == pytest.approx(0.25)
    assert metrics["drift/update/flip_rate/layer_03"] == pytest.approx(2 / 4)
    assert metrics["drift/update/flip_rate/mean/minibatch_1"] == pytest.approx((2 / 3 + 1 / 3) / 2)
    # loads: layer 3: {0,1} and 3, 2, 1, 0 -> 4, 3, 1, 0; layer 12: {2,3} and 2, 1, 2, 1 -> 2, 1, 3, 2
    assert metrics["drift/load/max_violation/layer_03"] == pytest.approx(4 / 2 - 1)
    assert metrics["drift/load/max_violation/layer_12"] == pytest.approx(3 / 2 - 1)
    assert metrics["drift/load/max_violation/mean"] == pytest.approx(0.75)
    assert metrics["drift/load/dead_experts/layer_03"] == 1
    entropy = -sum(n / 8 * math.log(n / 8) for n in (4, 3, 1)) / math.log(4)
    assert metrics["drift/load/load_entropy/layer_03"] == pytest.approx(entropy)
    assert metrics[f"{rate}/worst/minibatch_1"] == metrics[f"{rate}/layer_03/minibatch_1"]
    # (3 rates + 3 of load) x (2 layers + mean + worst), and two of the rates in each of 2 minibatches; no scores, no more
    assert len(metrics) == 6 * 4 + 2 * 2 * 4
    assert all(type(value) is float for value in metrics.values())


def test_layers_without_tokens_have_no_keys_and_are_not_in_the_mean() -> None:
    sums = DriftSums.measure(OLD, NEW, ALL, 4).placed([0, 2], 3)
    metrics = to_metrics([sums], (1, 2, 3))
    assert not [key for key in metrics if "layer_02" in key]
    assert metrics["drift/update/expert_change_rate/mean"] == pytest.approx((0.5 + 0.5 / 3) / 2)
    assert metrics["drift/load/dead_experts/mean"] == pytest.approx(0.5)
    assert all(math.isfinite(value) for value in metrics.values())


def test_other_comparisons_have_their_own_keys_and_no_load() -> None:
    metrics = to_metrics([DriftSums.measure(OLD, NEW, ALL, 4)], (0, 1), "noise")
    assert metrics["drift/noise/flip_rate/layer_01"] == pytest.approx(1 / 3)
    assert all(key.startswith("drift/noise/") for key in metrics)


def test_layer_names_must_fit() -> None:
    with pytest.raises(ValueError, match=r"layers \(0, 1, 2\): must name"):
        to_metrics([DriftSums.measure(OLD, NEW, ALL, 4)], (0, 1, 2))
    assert to_metrics([], (0, 1)) == {}


def test_a_large_step_is_measured_in_seconds() -> None:
    # 10,000 tokens of a 48-layer model, 8 of 128 experts: about 0.15 s on one core. A loop over tokens takes minutes.
    old = random_routes(100, 48, 8, 128, seed=0).repeat(100, 1, 1)
    started = time.perf_counter()
    DriftSums.measure(old, old.flip(0), everyone(old), 128)
    assert time.perf_counter() - started < 5
