"""Case 23: log-probabilities shifted by one token are refused, and nothing else is taken for that."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moe_rl.algorithms.config import AlgorithmSection
from moe_rl.alignment import check_alignment, neighbour_gaps
from moe_rl.config import DriftSection, ReplaySection, RolloutSection
from moe_rl.rollouts.embedded import EmbeddedEngine
from moe_rl.rollouts.engine import Request
from moe_rl.types import Problem, Rollout, Sampling
from moe_rl.update import Minibatch, PolicyUpdate
from parallel.runtime import Runtime, started
from tests.distributed.passes import Case, built


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def drawn(seed: int, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Log-probabilities as a policy has them, and sequences."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(sum(lengths), generator=generator, dtype=torch.float64).mul(3)
    return logprobs, torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))


def shift(logprobs: Tensor, lengths: list[int], by: int, filler: float = -1.0) -> Tensor:
    """by 1: logprobs[i] is that of the token before; by -1: of the token after. What runs out is `filler`."""
    out = []
    for part in logprobs.split(lengths):
        edge = part.new_tensor([filler])
        out.append(torch.cat([edge, part[:-1]] if by > 0 else [part[1:], edge]))
    return torch.cat(out)


def test_gaps_by_hand() -> None:
    # Sequences of 3 and 2 tokens. own: 1, 0, 2 | 0, 3. Pairs: (0, 1), (1, 2), (3, 4).
    old, rollout, sequence = double(-1, -2, -3, -4, -5), double(-2, -2, -1, -4, -8), torch.tensor([0, 0, 0, 1, 1])
    # of the first 1 + 0 + 0, of the second 0 + 2 + 3, old of b - rollout of a 0 + 1 + 1, old of a - rollout of b 1 + 1 + 4
    assert neighbour_gaps(old, rollout, sequence).tolist() == [1, 5, 2, 6, 3]


@pytest.mark.parametrize("lengths", [[], [1], [1, 1, 1]])
def test_without_neighbours_there_is_nothing_to_judge(lengths: list[int]) -> None:
    logprobs, sequence = drawn(0, lengths)
    sums = neighbour_gaps(logprobs, logprobs - 5, sequence)
    assert sums.tolist() == [0] * 5
    check_alignment(sums)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("by", "where"), [(1, "before"), (-1, "after")])
def test_a_shift_is_found_in_either_direction_and_under_noise(seed: int, by: int, where: str) -> None:
    lengths = [7, 1, 12, 3, 20]
    logprobs, sequence = drawn(seed, lengths)
    noise = 0.05 * torch.randn(len(logprobs), generator=torch.Generator().manual_seed(seed + 50), dtype=torch.float64)
    with pytest.raises(
        ValueError, match=rf"^rollout log-probabilities: shifted by one token: .* of the token {where}; "
    ) as caught:
        check_alignment(neighbour_gaps(logprobs, shift(logprobs, lengths, by) + noise, sequence))
    assert "\n" not in str(caught.value)
    check_alignment(neighbour_gaps(logprobs, logprobs + noise, sequence))


@pytest.mark.parametrize("seed", range(5))
def test_what_is_wrong_in_other_ways_is_no_shift(seed: int) -> None:
    lengths = [7, 1, 12, 3, 20]
    logprobs, sequence = drawn(seed, lengths)
    generator = torch.Generator().manual_seed(seed)
    first = torch.zeros(len(logprobs), dtype=torch.float64)
    first[[0, 7, 8, 20, 23]] = 5.0  # of every response the first token
    others = {
        "unrelated": drawn(seed + 100, lengths)[0],
        "greedy": torch.zeros_like(logprobs),
        "temperature": logprobs * 3,
        "constant": torch.full_like(logprobs, -5.0),
        "noise": logprobs + torch.randn(len(logprobs), generator=generator, dtype=torch.float64),
        "first, rollout": logprobs - first,
        "infinite": torch.full_like(logprobs, -torch.inf),
        "nan": torch.full_like(logprobs, torch.nan),
    }
    for rollout in others.values():
        check_alignment(neighbour_gaps(logprobs, rollout, sequence))
    # sure of everything but the first token, of which top-k leaves one
    check_alignment(neighbour_gaps(-first, torch.zeros_like(first), sequence))
    check_alignment(neighbour_gaps(torch.zeros_like(first), -first, sequence))


def test_a_handful_of_tokens_is_no_evidence() -> None:
    logprobs, sequence = drawn(0, [32])  # 31 pairs
    check_alignment(neighbour_gaps(logprobs, shift(logprobs, [32], 1), sequence))
    logprobs, sequence = drawn(0, [33])
    with pytest.raises(ValueError, match="shifted by one token"):
        check_alignment(neighbour_gaps(logprobs, shift(logprobs, [33], 1), sequence))


def test_two_ranks_judge_by_their_sum() -> None:
    logprobs, sequence = drawn(0, [20, 20])
    rollout = shift(logprobs, [20, 20], 1)
    parts = [neighbour_gaps(logprobs[i:j], rollout[i:j], sequence[i:j]) for i, j in ((0, 20), (20, 40))]
    assert (parts[0] + parts[1]).tolist() == pytest.approx(neighbour_gaps(logprobs, rollout, sequence).tolist())
    for part in parts:
        check_alignment(part)  # 19 pairs
    with pytest.raises(ValueError, match="shifted by one token"):
        check_alignment(parts[0] + parts[1])


SAMPLINGS = [
    Sampling(12),
    Sampling(12, temperature=0.7),
    Sampling(12, temperature=1.5),
    Sampling(12, temperature=0.7, top_p=0.5, full_logprobs=True),
    Sampling(12, top_k=3, full_logprobs=True),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_engine_and_the_old_pass_agree_and_a_shift_between_them_is_an_error(runtime: Runtime, sampling: Sampling) -> None:
    """Through the packed stream, minibatches and microbatches, at the sampling temperature. float32: the largest gap of these
    five is 1.9e-6."""
    with built(Case(), runtime) as model:
        requests = [Request([7 * i, 3, i][: 1 + i % 3], 100 + i) for i in range(8)]
        responses = EmbeddedEngine(model, 64).generate(requests, sampling, routes=False)
        algorithm = AlgorithmSection(name="grpo", minibatches=2, microbatch_tokens=40)
        section = RolloutSection(temperature=sampling.temperature)
        policy = PolicyUpdate(model, algorithm, section, DriftSection(), ReplaySection())

        def scored(logprobs: list[list[float]]) -> list[Minibatch]:
            rollouts = [
                Rollout(i, Problem("", "", ""), r.prompt_ids, type(s)(s.token_ids, p, s.finish_reason), "", 0.0)
                for i, (r, s, p) in enumerate(zip(requests, responses, logprobs, strict=True))
            ]
            minibatches = policy.prepare(rollouts, 0, 1)
            policy.score_old(minibatches)
            return minibatches

        reported = [response.logprobs for response in responses]
        gaps = []
        for part in (part for minibatch in scored(reported) for part in minibatch.parts):
            assert part.old_logprobs is not None
            gaps.append((part.old_logprobs - part.rollout_logprobs).abs())
        assert float(torch.cat(gaps).max()) < 2e-5 and len(torch.cat(gaps)) == sum(map(len, reported))
        for shifted, where in (([p[:1] + p[:-1] for p in reported], "before"), ([p[1:] + p[-1:] for p in reported], "after")):
            with pytest.raises(ValueError, match=f"^rollout log-probabilities: shifted by one token: .* token {where};"):
                scored(shifted)
