"""The table of algorithms: each one's defaults against its paper, and what a loss accepts."""

import math
from collections.abc import Iterator
from typing import Any

import jaxtyping
import pytest
import torch

from moe_rl.algorithms.base import log_difference
from moe_rl.algorithms.config import AlgorithmSection
from moe_rl.algorithms.loss import OBJECTIVES
from moe_rl.algorithms.table import ALGORITHMS, ANY_AGGREGATION, ANY_ESTIMATOR
from moe_rl.notes import clip_note
from tests.losses import LONGEST, changed, make_inputs, settings


def section(name: str, **keys: Any) -> AlgorithmSection:
    return AlgorithmSection.model_validate({"name": name, **keys})


@pytest.mark.parametrize(
    ("name", "clip", "aggregation", "advantage"),
    [
        ("ppo", (0.2, 0.2), "token_mean", "gae"),  # arXiv 1707.06347, table 3: epsilon = 0.2
        ("reinforce_plus_plus", (0.2, 0.2), "token_mean", "batch"),  # arXiv 2501.03262
        ("reinforce_plus_plus_baseline", (0.2, 0.2), "token_mean", "group_batch"),
        ("rloo", (0.2, 0.2), "seq_mean_token_sum", "leave_one_out"),  # arXiv 2402.14740: the response is one action
        ("grpo", (0.2, 0.27), "seq_mean_token_mean", "group"),  # range: arXiv 2507.18071, section 5.1, its GRPO baseline
        ("dr_grpo", (0.2, 0.2), "constant", "group"),  # arXiv 2503.20783
        ("dapo", (0.2, 0.28), "token_mean", "group"),  # arXiv 2503.14476, section 4.1
        ("gspo", (3e-4, 4e-4), "seq_mean_token_mean", "group"),  # arXiv 2507.18071, section 5.1
        ("gspo_token", (3e-4, 4e-4), "seq_mean_token_mean", "group"),
        # arXiv 2507.20673: (e^-0.4, e^0.4) = (0.670320046, 1.491824698)
        ("gmpo", (1 - 0.6703200460356393, 1.4918246976412703 - 1), "seq_mean_token_mean", "group"),
        # arXiv 2506.13585: no lower bound. It gives no upper one; a cap of 5 is what TRL recommends
        ("cispo", (1.0, 4.0), "token_mean", "group"),
        ("sapo", None, "seq_mean_token_mean", "group"),  # arXiv 2511.20347
    ],
)
def test_defaults(name: str, clip: tuple[float, float] | None, aggregation: str, advantage: str) -> None:
    found = section(name)
    assert found.clip == (None if clip is None else pytest.approx(clip, rel=1e-12))
    assert (found.aggregates, found.estimator) == (aggregation, advantage)


def test_the_table_is_whole() -> None:
    assert len(ALGORITHMS) == 12
    assert {spec.objective for spec in ALGORITHMS.values()} == set(OBJECTIVES)
    for spec in ALGORITHMS.values():
        assert (spec.clip_low is None) == (spec.clip_high is None)
        # what refuses something says why
        assert spec.why or (set(spec.aggregations) == set(ANY_AGGREGATION) and set(spec.advantages) == set(ANY_ESTIMATOR))


def those(attribute: str) -> set[str]:
    return {name for name in ALGORITHMS if getattr(section(name), attribute)}


def test_what_only_some_do() -> None:
    assert those("divides_by_std") == set(ALGORITHMS) - {"dr_grpo"}  # arXiv 2503.20783
    assert those("samples_dynamically") == {"dapo"}  # arXiv 2503.14476, section 3.2
    assert those("kl_in_reward") == {"ppo", "rloo", "reinforce_plus_plus"}
    # a cache of 4,096 of 20,480 tokens (arXiv 2503.14476, section 4.1)
    assert {name: spec.overlong_share for name, spec in ALGORITHMS.items() if spec.overlong_share} == {"dapo": 4096 / 20480}
    sapo = section("sapo")
    assert (sapo.sapo_tau_positive, sapo.sapo_tau_negative) == (1.0, 1.05)  # arXiv 2511.20347
    assert section("gspo").router_shift_floor == 0.8  # arXiv 2510.23027
    assert (section("ppo").estimates_kl, section("grpo").estimates_kl) == ("k1", "k3")


def test_keys_go_before_defaults() -> None:
    assert section("gspo", clip_high=1e-3).clip == (3e-4, 1e-3)
    assert section("grpo", clip_low=0.1).clip == (0.1, 0.27)
    assert section("grpo", aggregation="token_mean").aggregates == "token_mean"
    assert section("gspo", advantage="leave_one_out").estimator == "leave_one_out"
    assert not section("grpo", advantage_std=False).divides_by_std
    assert section("grpo", dynamic_sampling=True).samples_dynamically
    assert not section("dapo", dynamic_sampling=False).samples_dynamically
    assert section("grpo", kl_coefficient=0.1, kl_placement="reward").estimates_kl == "k1"
    assert not section("ppo", kl_coefficient=0.1, kl_placement="loss").kl_in_reward
    assert section("ppo", kl_coefficient=0.1, kl_estimator="k2").estimates_kl == "k2"


def test_settings_of_a_loss() -> None:
    given = settings("gmpo", entropy_coefficient=0.01)
    assert (given.objective, given.aggregation, given.entropy_coefficient) == ("gmpo", "seq_mean_token_mean", 0.01)
    clip = given.constants.clip
    assert clip is not None and (math.log(1 - clip.low), math.log(1 + clip.high)) == pytest.approx((-0.4, 0.4))
    assert settings("dr_grpo").length == LONGEST
    assert settings("dr_grpo", aggregation_length=3000).length == 3000
    sapo = settings("sapo", sapo_tau_positive=2.0, sapo_tau_negative=3.0).constants
    assert (sapo.clip, sapo.tau_positive, sapo.tau_negative) == (None, 2.0, 3.0)


@pytest.mark.parametrize(
    ("name", "low", "high", "warned"),
    [
        ("gspo", None, None, False),
        ("gspo", 0.01, 0.01, False),
        ("gspo", 0.011, None, True),
        ("gspo", None, 0.2, True),
        ("gspo_token", 0.2, 0.2, True),
        ("grpo", None, None, False),
        ("gmpo", None, None, False),
        ("sapo", None, None, False),
    ],
)
def test_gspo_with_the_clip_range_of_token_ratios_is_warned_of(
    name: str, low: float | None, high: float | None, warned: bool
) -> None:
    text = clip_note(section(name, clip_low=low, clip_high=high))
    assert (text is not None) == warned
    if text is not None:
        assert "algorithm.clip_low" in text and "3e-4 / 4e-4" in text and "\n" not in text


@pytest.fixture
def untyped() -> Iterator[None]:
    """As in production: without the tests' type checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("untyped")
def test_inputs_of_another_shape_or_precision_are_refused() -> None:
    inputs = make_inputs([[0.0, 0.0], [0.0]], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"old_logprobs: shape \(2,\) must be \(3,\)"):
        changed(inputs, old_logprobs=inputs.old_logprobs[1:])
    with pytest.raises(ValueError, match=r"train_logprobs: shape \(3, 1\) must be \(3,\)"):
        changed(inputs, train_logprobs=inputs.train_logprobs[:, None])
    with pytest.raises(ValueError, match=r"advantages: shape \(2,\) must be \(3,\)"):
        changed(inputs, advantages=inputs.advantages[:2])
    with pytest.raises(ValueError, match=r"weights: shape \(3, 1\) must be \(3,\)"):
        changed(inputs, weights=torch.ones(3, 1))
    with pytest.raises(ValueError, match="old_logprobs: torch.bfloat16 cannot resolve"):
        changed(inputs, old_logprobs=inputs.old_logprobs.bfloat16())


def test_the_tests_check_types() -> None:
    inputs = make_inputs([[0.0]], [1.0])
    with pytest.raises(jaxtyping.TypeCheckError):
        changed(inputs, mask=inputs.mask.long())
    with pytest.raises(jaxtyping.TypeCheckError):
        log_difference(torch.zeros(2), torch.zeros(1), torch.ones(2, dtype=torch.bool))
