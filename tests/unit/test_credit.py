"""From rewards to every token's advantage: parts, penalties and shaping put together, in one process with real groups."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from models.presets import PRESETS
from moe_rl.algorithms.base import Denominators
from moe_rl.config import RunConfig
from moe_rl.credit import Credit
from moe_rl.microbatches import Microbatch, Minibatch, Prepared
from moe_rl.types import Problem, Response, Rollout
from parallel.config import ParallelConfig
from parallel.groups import Groups, process_groups
from parallel.runtime import started

# Two groups of two: rewards, and tokens of each response
REWARDS, LENGTHS = [1.0, 0.0, 3.0, 1.0], [1, 2, 3, 2]
# old - ref of each response's tokens
SHIFTS = [[0.5], [1.0, -0.5], [0.2, 0.2, 0.2], [0.0, -1.0]]
VALUES = [[0.5], [0.1, 0.2], [1.0, 2.0, 3.0], [0.0, 0.0]]


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    with started(seed=0, threads=1, timeout_seconds=60), process_groups(ParallelConfig()) as found:
        yield found


def credit(groups: Groups, shaping: dict[str, Any] | None = None, **algorithm: Any) -> Credit:
    rollout = {"prompts": 2, "responses": 2, "max_response_tokens": 4}
    sections = {"rollout": rollout, "algorithm": {"minibatches": 2} | algorithm, "shaping": shaping or {}}
    sections["critic"] = {"gamma": 0.5, "gae_lambda": 0.5}
    return Credit(RunConfig.model_validate({"model": dict(PRESETS["tiny_moe"]), **sections}), groups)


def rollouts(rewards: Sequence[float] = REWARDS) -> list[Rollout]:
    return [
        Rollout(i, Problem("", "", ""), [1], Response([5] * n, [-1.0] * n, "stop"), "", r)
        for i, (r, n) in enumerate(zip(rewards, LENGTHS, strict=True))
    ]


def flat(values: Sequence[Sequence[float]], members: Sequence[int]) -> Tensor:
    return torch.tensor([x for i in members for x in values[i]], dtype=torch.float32)


def part(*members: int, reference: bool = True) -> Prepared:
    """A microbatch that holds these responses, scored."""
    size = sum(LENGTHS[i] for i in members)
    old = torch.linspace(-3, -1, size) if size else torch.zeros(0)
    return Prepared(
        Microbatch(list(members), None),  # pyright: ignore[reportArgumentType]  (nobody runs it)
        sequence=torch.arange(len(members)).repeat_interleave(torch.tensor([LENGTHS[i] for i in members], dtype=torch.int64)),
        rollout_logprobs=torch.full((size,), -1.0),
        advantages=torch.zeros(size),
        old_logprobs=old,
        ref_logprobs=old - flat(SHIFTS, members) if reference else None,
        old_values=flat(VALUES, members),
    )


def minibatches(**settings: Any) -> list[Minibatch]:
    """Neither group lies in one minibatch, and the second one's first part holds nothing."""
    nothing = Denominators(0, 0)
    return [
        Minibatch([2, 0], [part(2, 0, **settings)], nothing, 0),
        Minibatch([1, 3], [part(**settings), part(3, **settings), part(1, **settings)], nothing, 0),
    ]


def by_response(found: list[Minibatch], what: str = "advantages") -> list[list[float]]:
    out: dict[int, list[float]] = {}
    for one in (one for minibatch in found for one in minibatch.parts):
        values = getattr(one, what)
        assert values.dtype == torch.float32 and len(values) == len(one.sequence)
        for i, member in enumerate(one.microbatch.members):
            out[member] = values[one.sequence == i].tolist()
    return [out[i] for i in range(4)]


def assigned(
    of: Credit, coefficient: float = 0.0, rewards: Sequence[float] = REWARDS, **settings: Any
) -> tuple[list[list[float]], dict[str, float]]:
    batch = minibatches(**settings)
    metrics = of.assign(batch, rollouts(rewards), coefficient)
    return by_response(batch), metrics


def spread(*values: float) -> list[Any]:
    """Of each response one number, at all of its tokens."""
    return [pytest.approx([v] * n, abs=1e-4) for v, n in zip(values, LENGTHS, strict=True)]


def test_groups_span_minibatches_and_parts(groups: Groups) -> None:
    """1, 0: mean 0.5, deviation 0.5. 3, 1: mean 2, deviation 1."""
    found, metrics = assigned(credit(groups, name="grpo"))
    assert found == spread(1, -1, 1, -1)
    assert metrics == {"reward/group_std": pytest.approx(0.75), "reward/equal_group_fraction": 0}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("dr_grpo", [0.5, -0.5, 1, -1]),
        ("rloo", [1, -1, 2, -2]),
        ("gspo", [1, -1, 1, -1]),
        # over the batch's deviation sqrt((0.25 + 0.25 + 1 + 1) / 4)
        ("reinforce_plus_plus_baseline", [x / math.sqrt(0.625) for x in (0.5, -0.5, 1, -1)]),
    ],
)
def test_each_sequence_estimator_by_hand(groups: Groups, name: str, wanted: list[float]) -> None:
    assert assigned(credit(groups, name=name))[0] == spread(*wanted)


def test_a_penalty_in_the_reward_is_summed_over_tokens_before_the_group(groups: Groups) -> None:
    """Sums of old - ref: 0.5, 0.5, 0.6, -1. Times 0.1 off the rewards: 0.95, -0.05, 2.94, 1.1; against the other one."""
    found, metrics = assigned(credit(groups, name="rloo", kl_coefficient=0.1), 0.1)
    assert found == spread(1, -1, 1.84, -1.84)
    assert metrics["reward/kl_penalty_mean"] == pytest.approx(0.1 * 0.6 / 4)
    assert metrics["reward/group_std"] == pytest.approx((0.5 + 1.0) / 2)  # of the rewards before the penalty


@pytest.mark.parametrize(
    ("estimator", "penalty"),
    [
        ("k2", [0.125, 0.625, 0.06, 0.5]),  # halves of squares
        # exp(-d) - 1 + d
        ("k3", [sum(math.exp(-d) - 1 + d for d in shifts) for shifts in SHIFTS]),
    ],
)
def test_the_penalty_is_of_the_estimator_asked_for(groups: Groups, estimator: str, penalty: list[float]) -> None:
    of = credit(groups, name="rloo", kl_coefficient=2.0, kl_estimator=estimator)
    after = [r - 2 * p for r, p in zip(REWARDS, penalty, strict=True)]
    wanted = [after[0] - after[1], after[1] - after[0], after[2] - after[3], after[3] - after[2]]
    assert assigned(of, 2.0)[0] == spread(*wanted)


def test_the_coefficient_is_the_adaptive_one_and_not_that_of_the_settings(groups: Groups) -> None:
    of = credit(groups, name="rloo", kl_coefficient=0.1, kl_target=1.0)
    assert assigned(of, 0.5)[0] == spread(1, -1, 2 - 0.5 * 1.6, -2 + 0.5 * 1.6)
    assert assigned(of, 0.0)[0] == spread(1, -1, 2, -2)


@pytest.mark.parametrize("algorithm", [{"name": "rloo"}, {"name": "rloo", "kl_coefficient": 0.5, "kl_placement": "loss"}])
def test_without_a_penalty_in_the_reward_nothing_asks_for_a_reference(groups: Groups, algorithm: dict[str, Any]) -> None:
    found, metrics = assigned(credit(groups, **algorithm), 0.5, reference=False)
    assert found == spread(1, -1, 2, -2) and "reward/kl_penalty_mean" not in metrics


def normal(returns: list[list[float]]) -> list[Any]:
    """Over all tokens of the batch."""
    every = [x for one in returns for x in one]
    mean = sum(every) / len(every)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in every) / len(every))
    return [pytest.approx([(x - mean) / deviation for x in one], abs=1e-4) for one in returns]


def test_batch_penalises_token_by_token_and_normalises_over_the_batchs_tokens(groups: Groups) -> None:
    """Reward minus 0.1 x what the token and those after it moved."""
    of = credit(groups, name="reinforce_plus_plus", kl_coefficient=0.1)
    found, metrics = assigned(of, 0.1)
    assert found == normal([[0.95], [-0.05, 0.05], [2.94, 2.96, 2.98], [1.1, 1.1]])
    assert metrics["reward/kl_penalty_mean"] == pytest.approx(0.1 * 0.6 / 4)  # a sequence, as with the others
    assert metrics["reward/group_std"] == pytest.approx(0.75)


def test_batch_without_a_penalty(groups: Groups) -> None:
    found, _ = assigned(credit(groups, name="reinforce_plus_plus"))
    assert found == normal([[1], [0, 0], [3, 3, 3], [1, 1]])
    assert sum(x for one in found for x in one) == pytest.approx(0, abs=1e-5)


def test_gae_learns_returns_and_uses_normalised_advantages(groups: Groups) -> None:
    """gamma = lambda = 0.5. Third response: deltas 0 + 1 - 1, 0 + 1.5 - 2, 3 - 3: A = -0.125, -0.5, 0."""
    batch = minibatches()
    credit(groups, name="ppo").assign(batch, rollouts(), 0.0)
    # second: deltas 0 + 0.1 - 0.1, 0 - 0.2: A = -0.05, -0.2. Fourth: 0 + 0.25 x 1, 1.
    advantages = [[0.5], [-0.05, -0.2], [-0.125, -0.5, 0], [0.25, 1]]
    assert by_response(batch) == normal(advantages)
    returns = [[a + v for a, v in zip(one, of, strict=True)] for one, of in zip(advantages, VALUES, strict=True)]
    assert by_response(batch, "returns") == [pytest.approx(one, abs=1e-6) for one in returns]


def test_gae_takes_the_penalty_at_its_token(groups: Groups) -> None:
    """Fourth response: rewards 0 and 1 + 0.1 x 1: A = 0.25 x 1.1, 1.1. Second: -0.1 and 0.05: deltas -0.1, -0.15."""
    batch = minibatches()
    credit(groups, name="ppo", kl_coefficient=0.1).assign(batch, rollouts(), 0.1)
    returns = by_response(batch, "returns")
    assert returns[3] == pytest.approx([0.275, 1.1])
    assert returns[1] == pytest.approx([-0.1 - 0.25 * 0.15 + 0.1, 0.05])
    assert returns[0] == pytest.approx([0.95])


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_equal_rewards_give_no_advantage(groups: Groups, name: str) -> None:
    found, metrics = assigned(credit(groups, name=name), rewards=[0.1] * 4)
    assert found == [[0.0] * n for n in LENGTHS]
    assert metrics["reward/equal_group_fraction"] == 1


def test_rewards_are_shaped_before_they_are_compared(groups: Groups) -> None:
    """Longest 4, buffer 2: of 1, 2, 3, 2 tokens the third loses half of 2. 3 - 1 = 2 against 1."""
    shaping = {"overlong_buffer": 2, "overlong_penalty": 2.0}
    found, metrics = assigned(credit(groups, shaping, name="dr_grpo"))
    assert found == spread(0.5, -0.5, 0.5, -0.5)
    assert metrics["reward/shaping/overlong"] == pytest.approx(-0.25)
    assert metrics["reward/shaped_mean"] == pytest.approx(1)


def test_on_another_stage_than_the_last_groups_are_known_all_the_same(groups: Groups) -> None:
    batch = minibatches()
    for one in (one for minibatch in batch for one in minibatch.parts):
        one.old_logprobs = one.ref_logprobs = one.old_values = None
    credit(groups, name="rloo", kl_coefficient=0.1).assign(batch, rollouts(), 0.1)
    assert by_response(batch) == spread(1, -1, 2, -2)  # in a run, with what the last stage adds
