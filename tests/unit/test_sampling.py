"""Drawing tokens: by counting, against distributions worked out by hand, and at the edges of the uniforms."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from moe_rl.rollouts.sampling import draw
from moe_rl.types import Sampling

ALMOST_ONE = 1 - 2**-53  # the largest float64 below 1


def sampling(**changes: float) -> Sampling:
    return Sampling(**(dict(max_tokens=1) | changes))  # pyright: ignore[reportArgumentType]


def logits_of(probabilities: Sequence[float]) -> Tensor:
    return torch.tensor([probabilities]).log()


def at(probabilities: Sequence[float], uniform: float, **changes: float) -> tuple[int, float]:
    tokens, logprobs = draw(logits_of(probabilities), torch.tensor([uniform], dtype=torch.float64), sampling(**changes))
    return int(tokens[0]), float(logprobs[0])


def chi_square(logits: Tensor, expected: Tensor, settings: Sampling, seed: int, count: int = 20_000) -> float:
    """Of `count` draws with the logits of one row, over the tokens that `expected` (probabilities) gives a chance."""
    uniforms = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    tokens, logprobs = draw(logits.expand(count, -1), uniforms, settings)
    torch.testing.assert_close(logprobs.double(), expected[tokens].log(), atol=1e-5, rtol=0)
    counts, wanted = torch.bincount(tokens, minlength=len(expected)).double(), expected * count
    assert torch.equal(counts[wanted == 0], torch.zeros(int((wanted == 0).sum()), dtype=torch.float64))
    some = wanted > 0
    return float(((counts - wanted)[some] ** 2 / wanted[some]).sum())


def bound(degrees: int) -> float:
    """Chi-square stays below this but once in 1e6 (Laurent and Massart 2000, lemma 1, with x = log 1e6)."""
    x = math.log(1e6)
    return degrees + 2 * math.sqrt(degrees * x) + 2 * x


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_tokens_come_as_often_as_softmax_says(seed: int, temperature: float) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(100 + seed)) * 2
    expected = (logits[0].double() / temperature).softmax(-1)
    assert chi_square(logits, expected, sampling(temperature=temperature), seed) < bound(11)


@pytest.mark.parametrize("seed", range(5))
def test_counting_would_notice_another_temperature(seed: int) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(100 + seed)) * 2
    uniforms = torch.rand(20_000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    tokens, _ = draw(logits.expand(20_000, -1), uniforms, sampling(temperature=0.9))
    wanted = logits[0].double().softmax(-1) * 20_000
    assert float(((torch.bincount(tokens, minlength=12) - wanted) ** 2 / wanted).sum()) > bound(11)


@pytest.mark.parametrize("seed", range(5))
def test_top_k_after_temperature_renormalises_the_best_k(seed: int) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(100 + seed)) * 2
    kept = logits[0] >= logits[0].topk(4).values[-1]
    expected = (logits[0].double() / 0.8).masked_fill(~kept, -math.inf).softmax(-1)
    assert chi_square(logits, expected, sampling(temperature=0.8, top_k=4), seed) < bound(3)


@pytest.mark.parametrize("seed", range(5))
def test_top_p_keeps_the_fewest_tokens_that_reach_it(seed: int) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(100 + seed)) * 2
    full = logits[0].double().softmax(-1)
    order = full.argsort(descending=True)
    count = int((full[order].cumsum(0) < 0.8).sum()) + 1
    expected = torch.zeros(12, dtype=torch.float64).scatter(0, order[:count], full[order[:count]])
    assert chi_square(logits, expected / expected.sum(), sampling(top_p=0.8), seed) < bound(count - 1)


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.0999, 0), (0.1001, 1), (0.2999, 1), (0.3001, 2), (0.9999, 3), (ALMOST_ONE, 3)]
)
def test_a_uniform_falls_where_the_cumulative_distribution_says(uniform: float, token: int) -> None:
    probabilities = [0.1, 0.2, 0.3, 0.4]
    assert at(probabilities, uniform) == (token, pytest.approx(math.log(probabilities[token]), abs=1e-6))


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.5, ALMOST_ONE])
@pytest.mark.parametrize("impossible", [[0, 1], [3, 4], [0, 2, 4], [2]])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float, impossible: list[int]) -> None:
    probabilities = [0.0 if i in impossible else 1 / (5 - len(impossible)) for i in range(5)]
    token, logprob = at(probabilities, uniform)
    assert token not in impossible
    assert logprob == pytest.approx(-math.log(5 - len(impossible)), abs=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 0.30001, 0.60001, ALMOST_ONE])
def test_padding_at_the_end_of_the_vocabulary_is_never_drawn(uniform: float) -> None:
    """Also where rounding leaves the sum of probabilities below 1: 50,000 tokens of 2e-5."""
    logits = torch.zeros(1, 50_064)
    logits[:, 50_000:] = -math.inf
    tokens, logprobs = draw(logits, torch.tensor([uniform], dtype=torch.float64), sampling())
    assert int(tokens[0]) == min(int(uniform * 50_000), 49_999)
    assert float(logprobs[0]) == pytest.approx(-math.log(50_000), abs=1e-5)


def test_top_k_counts_the_largest_and_keeps_ties_of_the_last() -> None:
    assert [at([0.1, 0.2, 0.3, 0.4], u, top_k=2)[0] for u in (0.0, 0.42, 0.44, 0.99)] == [2, 2, 3, 3]
    assert at([0.1, 0.2, 0.3, 0.4], 0.0, top_k=2)[1] == pytest.approx(math.log(3 / 7), abs=1e-6)
    assert [at([0.2, 0.3, 0.2, 0.3], u, top_k=1) for u in (0.0, 0.6)] == [
        (1, pytest.approx(-math.log(2), abs=1e-6)),
        (3, pytest.approx(-math.log(2), abs=1e-6)),
    ]
    assert at([0.1, 0.2, 0.3, 0.4], 0.05, top_k=9) == at([0.1, 0.2, 0.3, 0.4], 0.05)


def test_top_p_keeps_the_token_that_reaches_it_and_always_one() -> None:
    """In order: 0.4, 0.3, 0.2, 0.1. At 0.5 the second reaches it."""
    assert {at([0.1, 0.2, 0.3, 0.4], u, top_p=0.5)[0] for u in (0.0, 0.2, 0.4, 0.9, ALMOST_ONE)} == {2, 3}
    assert at([0.1, 0.2, 0.3, 0.4], 0.0, top_p=0.5)[1] == pytest.approx(math.log(3 / 7), abs=1e-6)
    assert at([0.1, 0.2, 0.3, 0.4], 0.0, top_p=0.39) == (3, 0.0)
    assert at([0.1, 0.2, 0.3, 0.4], ALMOST_ONE, top_p=1e-9) == (3, 0.0)


def test_top_p_measures_what_temperature_and_top_k_have_left() -> None:
    """Of 0.4, 0.3, 0.2, 0.1 top-k 3 leaves 4/9, 3/9, 2/9: at 0.7 two stay, where of the whole three would."""
    drawn = {at([0.1, 0.2, 0.3, 0.4], u, top_k=3, top_p=0.75)[0] for u in (0.0, 0.3, 0.5, 0.9)}
    assert drawn == {2, 3}
    drawn = {at([0.1, 0.2, 0.3, 0.4], u, top_p=0.75)[0] for u in (0.0, 0.3, 0.5, 0.9)}
    assert drawn == {1, 2, 3}
    # temperature 0.5 squares: 16, 9, 4, 1 of 30
    assert at([0.1, 0.2, 0.3, 0.4], 0.0, temperature=0.5, top_p=0.8) == (2, pytest.approx(math.log(9 / 25), abs=1e-6))


@pytest.mark.parametrize(
    ("restriction", "kept"), [({"top_p": 0.5}, 0.7), ({"top_k": 2}, 0.7), ({"top_k": 3, "top_p": 0.75}, 0.7), ({}, 1.0)]
)
def test_full_log_probabilities_are_those_before_top_p_and_top_k(restriction: dict[str, float], kept: float) -> None:
    """Of 0.1, 0.2, 0.3, 0.4 the last two stay: 0.3 is reported as it is, or as 3/7; the token drawn is the same."""
    probabilities = [0.1, 0.2, 0.3, 0.4]
    for uniform in (0.0, 0.3, 0.6, 0.9):
        token, renormalised = at(probabilities, uniform, **restriction)
        same, full = at(probabilities, uniform, full_logprobs=True, **restriction)
        assert same == token and (kept == 1 or token >= 2)
        assert full == pytest.approx(math.log(probabilities[token]), abs=1e-6)
        assert renormalised == pytest.approx(math.log(probabilities[token] / kept), abs=1e-6)


def test_full_log_probabilities_are_after_temperature() -> None:
    """Temperature 0.5 squares: 1, 4, 9, 16 of 30, as the trainer computes it; of the best two 16 / 25."""
    probabilities = [0.1, 0.2, 0.3, 0.4]
    full = at(probabilities, ALMOST_ONE, temperature=0.5, top_k=2, full_logprobs=True)
    assert full == (3, pytest.approx(math.log(16 / 30), abs=1e-6))
    assert at(probabilities, ALMOST_ONE, temperature=0.5, top_k=2) == (3, pytest.approx(math.log(16 / 25), abs=1e-6))


def test_greedy_takes_the_largest_with_certainty() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, -1.0, 4.9]])
    tokens, logprobs = draw(logits, torch.tensor([0.99, 0.99]), sampling(temperature=0.0))
    assert (tokens.tolist(), logprobs.tolist()) == ([1, 0], [0.0, 0.0])


def test_rows_do_not_touch_each_other_and_bfloat16_logits_are_read_as_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 20, generator=generator).bfloat16()
    uniforms = torch.rand(9, generator=generator, dtype=torch.float64)
    settings = sampling(temperature=0.7, top_k=10, top_p=0.9)
    tokens, logprobs = draw(logits, uniforms, settings)
    assert logprobs.dtype == torch.float32
    for i in range(9):
        token, logprob = draw(logits[i : i + 1].float(), uniforms[i : i + 1], settings)
        assert (token.item(), logprob.item()) == (tokens[i].item(), logprobs[i].item())
