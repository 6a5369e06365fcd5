"""The frozen reference: its weights come into place for a pass and go again."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from models.initialise import initialise
from models.model import MoEModel
from models.stream import Stream, pack_sequences
from moe_rl.reference import Reference
from parallel.runtime import Runtime, started
from tests.distributed.passes import Case, built

WITH_BIAS = Case(model=dict(router_score="sigmoid", load_balancing="expert_bias"))


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


def everything(model: MoEModel) -> dict[str, Tensor]:
    """Weights and buffers, and where they lie."""
    chunk = model.bare[0]
    return {name: t.detach().clone() for name, t in (*chunk.named_parameters(), *chunk.named_buffers())}


def logprobs(model: MoEModel) -> Tensor:
    stream: Stream = pack_sequences([[3, 1, 4, 1, 5, 9, 2, 6]], [1], 7, model.device)
    return model.score([stream])[0].logprobs


def move(model: MoEModel, seed: int) -> None:
    """To other weights and other expert biases."""
    initialise(model.bare, model.config, model.groups, seed)
    for name, buffer in model.bare[0].named_buffers():
        if name.endswith("expert_bias"):
            buffer.uniform_(generator=torch.Generator().manual_seed(seed))


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(("seed", "on_cpu"), [(0, False), (1, False), (2, False), (3, True), (4, True)])
def test_the_reference_scores_as_it_did_and_the_policy_comes_back_to_the_bit(runtime: Runtime, seed: int, on_cpu: bool) -> None:
    with built(WITH_BIAS, runtime) as model:
        move(model, seed)
        first, first_logprobs = everything(model), logprobs(model)
        addresses = [p.data_ptr() for p in model.bare[0].parameters()]
        reference = Reference(model, on_cpu=on_cpu)
        for other in (seed + 100, seed + 200):
            move(model, other)
            policy, policy_logprobs = everything(model), logprobs(model)
            assert not torch.equal(policy_logprobs, first_logprobs)
            with reference.in_place():
                assert same(everything(model), first)
                assert torch.equal(logprobs(model), first_logprobs)
            assert same(everything(model), policy)
            assert torch.equal(logprobs(model), policy_logprobs)
        # copied in place: gradient buffers and optimizer state still belong to these tensors
        assert [p.data_ptr() for p in model.bare[0].parameters()] == addresses


def test_the_expert_bias_is_part_of_the_reference(runtime: Runtime) -> None:
    with built(WITH_BIAS, runtime) as model:
        reference = Reference(model)
        biases = [t for name, t in model.bare[0].named_buffers() if name.endswith("expert_bias")]
        assert len(biases) == 4
        for bias in biases:
            bias.fill_(7.0)
        with reference.in_place():
            assert all(torch.equal(bias, torch.zeros(8)) for bias in biases)
        assert all(torch.equal(bias, torch.full((8,), 7.0)) for bias in biases)


def test_a_pass_that_fails_leaves_the_policy_in_place(runtime: Runtime) -> None:
    with built(Case(), runtime) as model:
        reference = Reference(model)
        move(model, 5)
        policy = everything(model)
        with pytest.raises(RuntimeError, match="stop"), reference.in_place():
            raise RuntimeError("stop")
        assert same(everything(model), policy)
