"""Dynamic sampling: which groups are kept, how many more are drawn, and a step's rollout with and without it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from models.presets import PRESETS
from moe_rl.config import RunConfig
from moe_rl.rollouts.collect import Batch, reward_metrics
from moe_rl.rollouts.dynamic import Sampled, sample_groups
from moe_rl.rollouts.engine import Request, sample_seed
from moe_rl.rollouts.step import sample_step
from moe_rl.session import Session
from moe_rl.stopwatch import Stopwatch
from moe_rl.tasks import ByteTokenizer, ProblemSet, Score
from moe_rl.types import Problem, Response, Rollout, Sampling
from parallel.config import ParallelConfig
from parallel.groups import Groups, process_groups
from parallel.runtime import Runtime, started

G = 4


def problem(number: int) -> Problem:
    return Problem(str(number), f"{number}?", "")


@dataclass
class Source:
    """Problem i has correct[i] right answers among its G, then `beyond`. Notes what is asked of it."""

    correct: Sequence[int]
    beyond: int = 2
    routes: bool = False
    asked: list[tuple[int, int]] = field(default_factory=list)  # (first problem, how many)
    firsts: list[int] = field(default_factory=list)  # numbers of first responses

    def take(self, first: int, count: int) -> list[Problem]:
        self.asked.append((first, count))
        return [problem(first + i) for i in range(count)]

    def collect(self, problems: Sequence[Problem], first: int) -> Batch:
        """Response j of problem p has p + 1 tokens and the text p/j; this rank sampled every other one."""
        self.firsts.append(first)
        rollouts, scores = [], []
        for p in problems:
            right = self.correct[int(p.id)] if int(p.id) < len(self.correct) else self.beyond
            for j in range(G):
                tokens = [7] * (int(p.id) + 1)
                score = Score(float(j < right))
                scores.append(score)
                response = Response(tokens, [-1.0] * len(tokens), "stop")
                rollouts.append(Rollout(len(rollouts), p, [1], response, f"{p.id}/{j}", score.value))
        held = {i: torch.tensor([int(r.problem.id), i % G]) for i, r in enumerate(rollouts) if i % 2 == 0}
        return Batch(rollouts, scores, sum(len(r.response.token_ids) for r in rollouts), held if self.routes else None)

    def sample(self, prompts: int, rounds: int = 4) -> Sampled:
        return sample_groups(self.take, self.collect, prompts, G, rounds)


def kept(sampled: Sampled) -> list[int]:
    """Problems of the groups to learn from, each checked to be whole and in order."""
    texts = [rollout.text for rollout in sampled.kept.rollouts]
    groups = [int(text.split("/")[0]) for text in texts[::G]]
    assert texts == [f"{group}/{j}" for group in groups for j in range(G)]
    return groups


def test_all_mixed_groups_are_one_round_and_what_would_be_without() -> None:
    source = Source([1, 2, 3])
    sampled = source.sample(3)
    plain = Source([1, 2, 3]).collect([problem(i) for i in range(3)], 0)
    assert sampled.kept == sampled.everything == plain
    assert (source.asked, source.firsts, sampled.problems) == ([(0, 3)], [0], 3)
    assert sampled.metrics == {"sampling/kept_fraction": 1, "sampling/rounds": 1, "sampling/filled_groups": 0}


def test_groups_all_right_or_all_wrong_are_replaced_by_later_ones_in_order() -> None:
    """Of 0 .. 3 groups 1 and 3 stay: half, so that 4 more are drawn for the 2 that are missing; 5, 6 and 7 would do."""
    source = Source([0, 1, G, 3, 0, 2, 1, 3])
    sampled = source.sample(4)
    assert kept(sampled) == [1, 3, 5, 6]
    assert (source.asked, source.firsts, sampled.problems) == ([(0, 4), (4, 4)], [0, 4 * G], 8)
    assert sampled.metrics == {"sampling/kept_fraction": 5 / 8, "sampling/rounds": 2, "sampling/filled_groups": 0}
    # all 32, in the order drawn, for the metrics of what the policy really answers: 0 + 1 + 4 + 3 + 0 + 2 + 1 + 3 right
    assert [rollout.text for rollout in sampled.everything.rollouts] == [f"{p}/{j}" for p in range(8) for j in range(G)]
    assert reward_metrics(sampled.everything)["reward/mean"] == 14 / 32
    assert reward_metrics(sampled.kept)["reward/mean"] == 7 / 16


def test_later_rounds_draw_what_the_share_so_far_makes_likely() -> None:
    """3 of 4 stay: for the one that is missing ceil(1 / 0.75) = 2; none of them, so that 3 of 6 have stayed: 2 again."""
    source = Source([1, 1, 0, 1, 0, 0, 2, 2])
    assert kept(source.sample(4)) == [0, 1, 3, 6]
    assert source.asked == [(0, 4), (4, 2), (6, 2)]


def test_never_more_than_a_batch_at_once() -> None:
    """1 of 4 stays: 3 / 0.25 = 12, of which 4 are drawn. With none so far, a batch again."""
    source = Source([1, 0, 0, 0])
    source.sample(4)
    assert source.asked == [(0, 4), (4, 4)]
    nothing = Source([0] * 4)
    assert kept(nothing.sample(4)) == [4, 5, 6, 7]
    assert nothing.asked == [(0, 4), (4, 4)]


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_rounds_are_bounded_and_the_first_dropped_groups_fill_up(rounds: int) -> None:
    """Group 2 alone is mixed, ever: the batch is 2 and the first three dropped, in the order in which they were drawn."""
    source = Source([G, 0, 2, 0], beyond=0)
    sampled = source.sample(4, rounds)
    assert kept(sampled) == [0, 1, 2, 3]
    assert source.asked == [(4 * i, 4) for i in range(rounds)] and sampled.problems == 4 * rounds
    assert sampled.metrics == {
        "sampling/kept_fraction": 1 / (4 * rounds),
        "sampling/rounds": rounds,
        "sampling/filled_groups": 3,
    }
    assert len(sampled.everything.rollouts) == 4 * rounds * G


def test_filling_up_prefers_nothing_over_a_mixed_group() -> None:
    """0 and 1 are dropped, 5 and 6 stay: of the dropped only as many as are missing, 0."""
    source = Source([0, 0, 0, 0, 0, 1, 2, 3], beyond=0)
    sampled = source.sample(4, rounds=2)
    assert kept(sampled) == [0, 5, 6, 7]
    assert sampled.metrics["sampling/filled_groups"] == 1


def test_the_batch_is_renumbered_and_routes_follow_their_rollouts() -> None:
    source = Source([0, 1, G, 3, 0, 2], routes=True)
    sampled = source.sample(3)
    assert kept(sampled) == [1, 3, 5]
    for batch in (sampled.kept, sampled.everything):
        assert [rollout.index for rollout in batch.rollouts] == list(range(len(batch.rollouts)))
        assert batch.tokens == sum(len(rollout.response.token_ids) for rollout in batch.rollouts)
        assert [score.value for score in batch.scores] == [rollout.reward for rollout in batch.rollouts]
        assert batch.routes is not None and sorted(batch.routes) == list(range(0, len(batch.rollouts), 2))
        for i, routes in batch.routes.items():
            assert f"{routes[0]}/{routes[1]}" == batch.rollouts[i].text
    assert sampled.kept.tokens == G * (2 + 4 + 6)


def test_without_routes_there_are_none() -> None:
    assert Source([0, 1, 2]).sample(2).kept.routes is None


class Engine:
    """Answers "y" where the seed is even, "n" elsewhere."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def generate(self, requests: Sequence[Request], sampling: Sampling, *, routes: bool = True) -> list[Response]:
        self.seeds += [request.seed for request in requests]
        return [Response([ord("y") + 3 if r.seed % 2 == 0 else ord("n") + 3], [-0.5], "length") for r in requests]


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[Runtime, Groups]]:
    with started(seed=0, threads=1, timeout_seconds=60) as here, process_groups(ParallelConfig()) as groups:
        yield here, groups


def session_of(world: tuple[Runtime, Groups], engine: Engine, **algorithm: Any) -> Session:
    config = RunConfig.model_validate(
        {
            "model": dict(PRESETS["tiny_moe"]),
            "rollout": {"prompts": 4, "responses": 2, "max_response_tokens": 4},
            "algorithm": algorithm,
            "run": {"seed": 5},
        }
    )
    tokenizer = ByteTokenizer()
    right = tokenizer.decode([ord("y") + 3])
    task = ProblemSet([problem(0)], [problem(1)], lambda text, _: float(text == right))
    return Session(config, *world, None, task, tokenizer, engine, None)  # pyright: ignore[reportArgumentType]  (no model)


def step_of(session: Session) -> tuple[Sampled, list[tuple[int, int]]]:
    asked: list[tuple[int, int]] = []

    def take(first: int, count: int) -> list[Problem]:
        asked.append((first, count))
        return [problem(first + i) for i in range(count)]

    return sample_step(session, take, 3, Stopwatch(), routes=False), asked


def test_responses_of_later_rounds_have_seeds_of_their_own(world: tuple[Runtime, Groups]) -> None:
    """Number n of a step has one seed, in whatever round it is drawn; no two share one."""
    engine = Engine()
    sampled, asked = step_of(session_of(world, engine, name="grpo", dynamic_sampling=True))
    assert engine.seeds == [sample_seed(5, "train", 3, n) for n in range(2 * sampled.problems)]
    assert len(set(engine.seeds)) == len(engine.seeds) and len(asked) > 1
    # every problem is drawn once, and all that were drawn are reported
    drawn = [first + i for first, count in asked for i in range(count)]
    assert drawn == list(range(sampled.problems))
    mixed = [p for p in drawn if engine.seeds[2 * p] % 2 != engine.seeds[2 * p + 1] % 2]
    assert [int(rollout.problem.id) for rollout in sampled.kept.rollouts[::2]] == mixed[:4]
    assert len(sampled.everything.rollouts) == 2 * sampled.problems


def test_without_dynamic_sampling_every_group_stays(world: tuple[Runtime, Groups]) -> None:
    dynamic, plain = Engine(), Engine()
    with_it, _ = step_of(session_of(world, dynamic, name="dapo"))
    without, asked = step_of(session_of(world, plain, name="dapo", dynamic_sampling=False))
    assert asked == [(0, 4)] and without.problems == 4 and without.metrics == {}
    assert without.kept is without.everything
    assert without.kept.rollouts == with_it.everything.rollouts[:8]  # the first round is the same
    assert {rollout.reward for rollout in without.kept.rollouts} == {0, 1}
