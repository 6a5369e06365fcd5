"""The table of algorithms, and what a loss accepts."""

import dataclasses
from collections.abc import Callable, Iterator

import jaxtyping
import pytest
import torch

from moe_rl.algorithms import LossInputs, clip_range, clip_warning
from moe_rl.algorithms.base import log_difference
from moe_rl.config import AlgorithmSection

MakeInputs = Callable[..., LossInputs]


@pytest.fixture
def untyped() -> Iterator[None]:
    """As in production: without the tests' type checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("untyped")
def test_inputs_of_another_shape_or_precision_are_refused(make_inputs: MakeInputs) -> None:
    inputs = make_inputs([[0.0, 0.0], [0.0]], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"old_logprobs: shape \(2,\) must be \(3,\)"):
        dataclasses.replace(inputs, old_logprobs=inputs.old_logprobs[1:])
    with pytest.raises(ValueError, match=r"train_logprobs: shape \(3, 1\) must be \(3,\)"):
        dataclasses.replace(inputs, train_logprobs=inputs.train_logprobs[:, None])
    with pytest.raises(ValueError, match=r"advantages: shape \(2, 1\) must be \(2,\)"):
        dataclasses.replace(inputs, advantages=inputs.advantages[:, None])
    with pytest.raises(ValueError, match="old_logprobs: torch.bfloat16 cannot resolve"):
        dataclasses.replace(inputs, old_logprobs=inputs.old_logprobs.bfloat16())


def test_the_tests_check_types(make_inputs: MakeInputs) -> None:
    inputs = make_inputs([[0.0]], [1.0])
    with pytest.raises(jaxtyping.TypeCheckError):
        dataclasses.replace(inputs, mask=inputs.mask.long())
    with pytest.raises(jaxtyping.TypeCheckError):
        log_difference(torch.zeros(2), torch.zeros(1), torch.ones(2, dtype=torch.bool))


def test_clip_range_is_the_default_or_what_the_section_says() -> None:
    assert clip_range(AlgorithmSection(name="grpo")) == (0.2, 0.27)  # pyright: ignore[reportCallIssue]
    assert clip_range(AlgorithmSection(name="gspo")) == (3e-4, 4e-4)  # pyright: ignore[reportCallIssue]
    assert clip_range(AlgorithmSection(name="gspo", clip_high=1e-3)) == (3e-4, 1e-3)  # pyright: ignore[reportCallIssue]
    assert clip_range(AlgorithmSection(name="grpo", clip_low=0.1)) == (0.1, 0.27)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("name", "low", "high", "warned"),
    [
        ("gspo", None, None, False),
        ("gspo", 0.01, 0.01, False),
        ("gspo", 0.011, None, True),
        ("gspo", None, 0.2, True),
        ("grpo", None, None, False),
    ],
)
def test_gspo_with_the_clip_range_of_token_ratios_is_warned_of(
    name: str, low: float | None, high: float | None, warned: bool
) -> None:
    section = AlgorithmSection(name=name, clip_low=low, clip_high=high)  # pyright: ignore[reportCallIssue, reportArgumentType]
    text = clip_warning(section)
    assert (text is not None) == warned
    if text is not None:
        assert "algorithm.clip_low" in text and "3e-4 / 4e-4" in text
