"""What an evaluation estimates, against numbers worked out by hand and against a count of every choice."""

import itertools
import math
from pathlib import Path

import pytest

from moe_rl.config import load
from moe_rl.estimates import Estimate, Outcome, Stopped, Tally, over_problems, pass_at_k, percentile
from moe_rl.eval_config import EvalSection
from parallel.errors import UsageError


def outcome(passed: bool, tokens: int, stopped: Stopped = "eos", reward: float | None = None) -> Outcome:
    return Outcome(float(passed) if reward is None else reward, passed, tokens, stopped)


def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_a_correct_one() -> None:
    for samples in range(1, 8):
        for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
            responses = [True] * correct + [False] * (samples - correct)
            choices = list(itertools.combinations(responses, k))
            assert pass_at_k(samples, correct, k) == sum(map(any, choices)) / len(choices), (samples, correct, k)


def test_pass_at_k_of_large_numbers() -> None:
    """C(2000, 1000) is 2e600: as floats it would be infinite. Against the product form, 1 - prod (1 - k / i)."""
    assert pass_at_k(2000, 1, 1000) == 0.5
    assert pass_at_k(5000, 3, 5000) == 1.0
    product = math.prod(1 - 700 / i for i in range(2000 - 2 + 1, 2000 + 1))
    assert pass_at_k(2000, 2, 700) == pytest.approx(1 - product, rel=1e-12)
    assert pass_at_k(10**6, 1, 1) == 1e-6  # 1 - (1 - 1e-6) would have lost 10 digits


@pytest.mark.parametrize(("correct", "k"), [(1, 5), (1, 0), (5, 1), (-1, 1)])
def test_pass_at_k_of_what_was_not_sampled(correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"k={k}, correct={correct}: need 1 <= k <= samples=4 and 0 <= correct <= samples"):
        pass_at_k(4, correct, k)


def test_the_standard_error_is_over_problems() -> None:
    # mean 0.5; squared deviations 0.25 + 0 + 0.25 = 0.5; / 2 / 3 = 1 / 12
    assert over_problems([0.0, 0.5, 1.0]) == Estimate(0.5, math.sqrt(1 / 12))
    assert over_problems([0.25, 0.25]) == Estimate(0.25, 0.0)
    assert over_problems([1.0]) == Estimate(1.0, None)  # of one there is none, which is not 0


def test_it_is_the_clustered_one_and_not_that_of_independent_responses() -> None:
    """Miller's section 2.2, term by term: independent ones' variance, and the covariances within a problem."""
    scores = [[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]
    problems, n = len(scores), sum(map(len, scores))
    mean = sum(map(sum, scores)) / n
    diagonal = sum((s - mean) ** 2 for row in scores for s in row)
    across = sum(
        (row[i] - mean) * (row[j] - mean) for row in scores for i in range(len(row)) for j in range(len(row)) if i != j
    )
    clustered = math.sqrt((diagonal + across) / n**2)
    found = over_problems([sum(row) / len(row) for row in scores])
    assert found.value == mean
    assert found.stderr == pytest.approx(clustered * math.sqrt(problems / (problems - 1)), rel=1e-12)
    assert found.stderr is not None and found.stderr > 1.7 * math.sqrt(diagonal / (n - 1) / n)


@pytest.mark.parametrize(("values", "wanted"), [([7], 7), ([3, 1, 2], 3), (list(range(1, 101)), 95), (list(range(1, 22)), 20)])
def test_nearest_rank(values: list[int], wanted: int) -> None:
    assert percentile(values, 0.95) == wanted  # of 21 the 20th: 19.95 rounded up


def test_a_tally_by_hand() -> None:
    tally = Tally(4, [4, 2])
    tally.add([outcome(True, 2), outcome(False, 8, "length", 0.5), outcome(False, 8, "length", 0.0), outcome(True, 4, "stop")])
    tally.add([outcome(False, 3), outcome(False, 3), outcome(False, 5), outcome(False, 8, "length")])
    found = tally.estimates()
    assert found["pass_at_1"] == Estimate(0.25, 0.25)  # of 0.5 and 0: deviation 0.25 each, sqrt(0.125 / 1 / 2)
    assert found["pass_at_2"] == Estimate(5 / 12, 5 / 12)  # of 1 - C(2, 2) / C(4, 2) = 5/6, and 0
    assert found["pass_at_4"] == Estimate(0.5, 0.5)
    assert found["reward_mean"] == Estimate(0.3125, 0.3125)  # of 2.5 / 4, and 0
    assert found["response_length_mean"] == Estimate(5.125, 0.375)  # of 22 / 4 and 19 / 4
    assert found["response_length_median"] == Estimate(4.5)  # 2 3 3 4 5 8 8 8
    assert (found["response_length_p95"], found["response_length_max"]) == (Estimate(8.0), Estimate(8.0))
    assert found["response_truncated_fraction"] == Estimate(0.375, 0.125)
    assert found["response_eos_fraction"] == Estimate(0.5, 0.25)
    metrics = tally.metrics()
    assert (metrics["eval/pass_at_1"], metrics["eval/pass_at_1_stderr"], metrics["eval/problems"]) == (0.25, 0.25, 2.0)
    assert metrics["eval/reward_failed"] == 0 and "eval/response_length_max_stderr" not in metrics
    assert (tally.problems, tally.tokens) == (2, 41)


def test_one_problem_has_no_standard_error() -> None:
    tally = Tally(2, [2])
    tally.add([outcome(True, 1), Outcome(0.0, False, 1, "eos", failed=True)])
    assert not [key for key in tally.metrics() if key.endswith("_stderr")]
    assert (tally.metrics()["eval/pass_at_2"], tally.metrics()["eval/reward_failed"]) == (1.0, 1.0)
    with pytest.raises(ValueError, match="1 responses to a problem: must be 2"):
        tally.add([outcome(True, 1)])


@pytest.mark.parametrize(
    ("samples", "k", "wanted"),
    [(1, [], [1]), (8, [], [1, 2, 4, 8]), (10, [], [1, 2, 4, 8, 10]), (10, [5], [1, 5]), (10, [10, 1, 3], [1, 3, 10])],
)
def test_which_k(samples: int, k: list[int], wanted: list[int]) -> None:
    assert EvalSection(samples=samples, k=k).ks == wanted


def test_a_k_above_the_samples_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("model: {preset: tiny_moe}\neval: {samples: 8}\n")
    with pytest.raises(UsageError) as caught:
        load(tmp_path / "one.yaml", ["eval.k=[1, 16]"])
    assert str(caught.value) == "eval.k=[1, 16]: must be at most eval.samples=8; raise eval.samples to 16 or more"
