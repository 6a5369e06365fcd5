import pytest
import torch

from moe_rl.metrics import Metrics


def reduce(*ranks: Metrics) -> Metrics:
    """What an all-reduce over these ranks leaves on the first."""
    vectors = [rank.vector() for rank in ranks]
    sums = torch.stack([sums for sums, _ in vectors]).sum(0)
    maxima = torch.stack([maxima for _, maxima in vectors]).amax(0)
    ranks[0].load_vector(sums, maxima)
    return ranks[0]


def test_unequal_counts_are_reduced_before_the_division() -> None:
    # Rank 0: one sequence of value 1. Rank 1: three of value 5. Mean = (1 + 15) / 4 = 4; the mean of the means is 3.
    first, second = Metrics(), Metrics()
    first.add("loss/policy", 1.0, 1)
    second.add("loss/policy", torch.tensor(15.0), torch.tensor(3))
    assert reduce(first, second).means() == {"loss/policy": 4.0}


def test_adding_and_merging_add_sums_and_counts() -> None:
    metrics, other = Metrics(), Metrics()
    metrics.add("a", 2.0, 1)
    metrics.add("a", torch.tensor(4.0), 2)
    other.add("a", 3.0, 3)
    other.add("b", 7.0)
    metrics.merge(other)
    assert metrics.means() == {"a": 1.5, "b": 7.0}  # (2 + 4 + 3) / (1 + 2 + 3)
    assert other.means() == {"a": 1.0, "b": 7.0}


def test_vectors_are_float64_in_sorted_key_order_whatever_the_order_of_adding() -> None:
    metrics = Metrics()
    metrics.add("z", 1.0, 10)
    metrics.add_max("y", 5.0)
    metrics.add("a", torch.tensor(2.0), 20)
    metrics.add_max("b", torch.tensor(6.0))
    sums, maxima = metrics.vector()
    assert sums.dtype == maxima.dtype == torch.float64
    assert sums.tolist() == [2.0, 1.0, 20.0, 10.0]
    assert maxima[2:].tolist() == [6.0, 5.0]  # behind the two fingerprints
    assert maxima[0] == -maxima[1]


@pytest.mark.parametrize("as_tensor", [(), (0, 1, 2), (1,), (0, 2)])
def test_maximum_over_adds_and_ranks(as_tensor: tuple[int, ...]) -> None:
    values = [torch.tensor(value) if i in as_tensor else value for i, value in enumerate((1.0, 3.0, 2.0))]
    first, second = Metrics(), Metrics()
    for value in values:
        first.add_max("m", value)
    second.add_max("m", 2.5)
    assert first.maxima() == {"m": 3.0}
    assert reduce(first, second).maxima() == {"m": 3.0}


def test_a_nan_maximum_is_not_hidden() -> None:
    for values in [(float("nan"), 1.0), (1.0, float("nan")), (torch.tensor(float("nan")), 1.0)]:
        metrics = Metrics()
        for value in values:
            metrics.add_max("m", value)
        assert metrics.maxima()["m"] != metrics.maxima()["m"]


def test_a_rank_with_nothing_changes_no_mean_and_no_maximum() -> None:
    full, empty = Metrics(), Metrics()
    full.add("a", -6.0, 3)
    full.add_max("m", -2.0)
    empty.add("a", 0.0, 0)
    empty.add_max("m", -float("inf"))
    assert (empty.means(), empty.maxima()) == ({}, {})
    reduced = reduce(empty, full)
    assert (reduced.means(), reduced.maxima()) == ({"a": -2.0}, {"m": -2.0})


def test_sums_of_many_small_float32_values_keep_their_digits() -> None:
    metrics = Metrics()
    metrics.add("a", torch.tensor(2.0**24, dtype=torch.float32), 1)
    metrics.add("a", torch.tensor(1.0, dtype=torch.float32), 0)  # lost by a float32 sum
    assert metrics.means() == {"a": 2.0**24 + 1}


def test_tensors_stay_unread_and_off_the_graph_until_asked() -> None:
    # A meta tensor has no value: reading one raises.
    value = torch.ones((), device="meta", requires_grad=True)
    metrics = Metrics()
    metrics.add("a", value, value)
    metrics.add("a", value, value)
    metrics.add_max("m", value)
    metrics.add_max("m", value)
    assert metrics.vector()[0].device.type == "meta"
    assert not metrics.vector()[0].requires_grad


@pytest.mark.parametrize(("here", "there"), [("a", "b"), ("b", "a")])
def test_ranks_with_different_keys_are_an_error_on_every_rank(here: str, there: str) -> None:
    first, second = Metrics(), Metrics()
    first.add(here, 1.0)
    second.add(there, 1.0)
    with pytest.raises(ValueError, match=f"ranks held different keys; this rank: {here}"):
        reduce(first, second)


def test_a_vector_of_another_length_is_an_error() -> None:
    metrics = Metrics()
    metrics.add("a", 1.0)
    sums, maxima = metrics.vector()
    with pytest.raises(ValueError, match="3 sums and 2 maxima do not fit 1 means and 0 maxima"):
        metrics.load_vector(torch.cat([sums, sums[:1]]), maxima)


def test_a_key_has_one_kind_and_one_number() -> None:
    metrics = Metrics()
    metrics.add("a", 1.0)
    metrics.add_max("m", 1.0)
    with pytest.raises(ValueError, match="'a': is a mean"):
        metrics.add_max("a", 1.0)
    with pytest.raises(ValueError, match="'m': is a maximum"):
        metrics.add("m", 1.0)
    with pytest.raises(ValueError, match=r"'a': must be one number, not a tensor of shape \(2,\)"):
        metrics.add("a", torch.ones(2))
