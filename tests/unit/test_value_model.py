"""The value model in one process: what its values are, their gradients, and what it holds."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from models.config import OptimizerConfig
from models.stream import Stream, pack_sequences
from models.transformer import Transformer
from models.value import ValueHead, ValueModel
from parallel.runtime import Runtime, started
from tests.distributed.passes import Case
from tests.distributed.test_parity import MODELS
from tests.distributed.value_passes import both, one_sequence, passes, same, set_head, update_values, weights

CPU = torch.device("cpu")
BIASED: dict[str, Any] = dict(router_score="sigmoid", load_balancing="expert_bias", expert_bias_rate=0.1)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


def accumulate(critic: ValueModel, streams: list[Stream], losses: list[Any]) -> list[Any]:
    critic.optimizer(OptimizerConfig(lr=0.0), 1).zero_grad()
    return critic.accumulate_gradients(streams, losses, sum(stream.real for stream in streams))


def gradients(critic: ValueModel) -> dict[str, Tensor]:
    return {name: p.main_grad.clone() for name, p in critic.bare[0].named_parameters()}


def hidden_states(model: Transformer, stream: Stream, run: Any) -> Tensor:
    """[T, hidden] out of the last norm, while `run` runs the stream."""
    seen: list[Tensor] = []
    hook = model.bare[0].decoder.register_forward_hook(lambda module, args, output: seen.append(output.detach()[:, 0].clone()))
    run([stream])
    hook.remove()
    return seen[0]


def test_a_value_is_the_product_of_hidden_state_and_head_in_float32() -> None:
    """1 * 1 + 2^-10 * 1: bfloat16, with 8 bits, would make 1 of it. And (3, 4) . (1, 1) = 7."""
    groups: Any = type("Groups", (), {"collection": None})
    head = ValueHead(2, torch.bfloat16, CPU, groups)
    with torch.no_grad():
        head.weight.fill_(1.0)
        values = head(torch.tensor([[1.0, 2.0**-10], [3.0, 4.0]], dtype=torch.bfloat16))
    assert values.dtype == torch.float32 and values.tolist() == [1 + 2.0**-10, 7.0]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_with_the_policys_trunk_values_are_those_of_the_policys_hidden_states(runtime: Runtime, model: dict[str, Any]) -> None:
    """In order of the response tokens, at the positions before them; routes too are the policy's."""
    with both(Case(model=model), runtime) as (policy, critic):
        for name, bias in policy.bare[0].named_buffers():
            if name.endswith("expert_bias"):
                bias.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
        stream = pack_sequences([[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7]], [2, 1, 4], 14, CPU)  # 11 tokens, 3 of filler
        head = set_head(critic, 0)
        before = critic.values([stream])[0]
        critic.copy_trunk(policy)
        hidden = hidden_states(policy, stream, policy.score)
        assert stream.routes is not None
        routes = {layer: chosen.clone() for layer, chosen in stream.routes.choice.items()}
        (values,) = critic.values([stream])
        at = torch.tensor([1, 2, 3, 4, 5, 9, 10])  # sequences begin at 0, 4 and 6; prompts are 2, 1 and 4 long
        torch.testing.assert_close(values, hidden[at] @ head, rtol=0, atol=2e-6)
        assert not torch.allclose(values, before, atol=0.1)
        chosen = stream.routes.choice
        assert chosen.keys() == routes.keys() and all(torch.equal(chosen[layer], routes[layer]) for layer in routes)


def test_a_value_knows_the_tokens_before_and_none_after(runtime: Runtime) -> None:
    """Response 5, 6, 7, 8 after prompt 3, 4: with another 6 the values before the 5 and the 6 stay, the two after change."""
    with both(Case(), runtime) as (_, critic):
        set_head(critic, 0)
        first, other = (
            critic.values([pack_sequences([[3, 4, 5, token, 7, 8]], [2], 5, CPU)])[0].tolist() for token in (6, 200)
        )
    assert first[:2] == pytest.approx(other[:2], abs=1e-6)  # another batch of experts rounds otherwise
    assert abs(first[2] - other[2]) > 1e-2 and abs(first[3] - other[3]) > 1e-2


def test_first_values_are_0_and_only_the_head_has_a_gradient(runtime: Runtime) -> None:
    """sum of w v, and v = h . head: the head's gradient is the sum of w h, the hidden states' w head = 0."""
    with both(Case(), runtime) as (_, critic):
        stream = one_sequence(CPU, 3)
        hidden = hidden_states(critic, stream, critic.values)
        assert critic.values([stream])[0].tolist() == [0.0] * 7
        share = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0, -1.0, 4.0])
        accumulate(critic, [stream], [lambda values: ((share * values).sum(), None)])
        found = gradients(critic)
    torch.testing.assert_close(found.pop("output_layer.weight"), share @ hidden[1:8], rtol=1e-5, atol=1e-6)
    assert len(found) > 50 and not any(gradient.any() for gradient in found.values())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "name",
    [
        "output_layer.weight",
        "decoder.final_layernorm.weight",
        "decoder.layers.3.mlp.router.weight",
        "decoder.layers.1.self_attention.linear_qkv.weight",
        "embedding.word_embeddings.weight",
    ],
)
def test_gradients_are_those_of_finite_differences(runtime: Runtime, name: str, seed: int) -> None:
    """Up the gradient, a step in which no route changes; float32 leaves three digits (measured: off by 8e-4 at most)."""
    with both(Case(seed=seed), runtime) as (_, critic):
        set_head(critic, seed)
        stream = one_sequence(CPU, seed)
        losses = [lambda values: ((values - 1).square().sum() / 7, None)]
        accumulate(critic, [stream], losses)
        gradient = gradients(critic)[name]
        weight = dict(critic.bare[0].named_parameters())[name].data
        step = 1e-4 * gradient / gradient.norm()
        start, seen, routes = weight.clone(), [], []
        for sign in (1, -1):
            weight.copy_(start + sign * step)
            seen.append(float((critic.values([stream])[0].double() - 1).square().sum() / 7))
            assert stream.routes is not None
            routes.append(stream.routes.stacked(critic.moe_layers))
        assert torch.equal(routes[0], routes[1])
        measured, wanted = seen[0] - seen[1], 2 * float((gradient * step).sum())
    assert wanted > 1e-5 and measured == pytest.approx(wanted, rel=5e-3)


def test_microbatches_and_recompute_change_nothing(runtime: Runtime) -> None:
    """Cut, float32 sums in another order: a gradient differs by up to 9e-7 of its norm. Recomputed, not at all."""
    whole, cut, again = passes(runtime, [Case(seed=5), Case(seed=5, budget=25), Case(seed=5, model={"recompute": "full"})])
    assert cut["norm"] == pytest.approx(whole["norm"], rel=2e-6) and again["norm"] == whole["norm"]
    assert cut["loss"] == pytest.approx(whole["loss"], rel=2e-6)
    for key, gradient in whole["gradients"].items():
        assert (cut["gradients"][key] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-8, key
        assert torch.equal(again["gradients"][key], gradient), key


def test_a_rank_without_a_sequence_gives_no_gradient(runtime: Runtime) -> None:
    with both(Case(), runtime) as (_, critic):
        set_head(critic, 0)
        empty = pack_sequences([], [], 4, CPU)
        assert critic.values([empty])[0].shape == (0,)
        assert accumulate(critic, [empty], [lambda values: (values.square().sum(), len(values))]) == [0]
        assert not any(gradient.any() for gradient in gradients(critic).values())


@pytest.mark.parametrize("tied", [False, True])
def test_nothing_is_as_wide_as_the_vocabulary_but_the_embedding(runtime: Runtime, tied: bool) -> None:
    """Vocabulary 320 with padding, hidden 64: the head's 64 weights take the place of 320 x 64, in the buffers too."""
    with both(Case(model=dict(tie_embeddings=tied)), runtime) as (policy, critic):
        trunk = sum(p.numel() for n, p in policy.bare[0].named_parameters() if n != "output_layer.weight")
        assert sum(p.numel() for p in critic.bare[0].parameters()) == trunk + 64
        named = (*critic.bare[0].named_parameters(), *critic.bare[0].named_buffers())
        assert [name for name, tensor in named if 320 in tensor.shape] == ["embedding.word_embeddings.weight"]
        buffers = [b for chunk in critic.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]  # pyright: ignore[reportGeneralTypeIssues]
        assert sum(buffer.grad_data.numel() for buffer in buffers) < trunk + 64 + 1024  # 384 of filler between parameters
        wide = [key for key, tensor in weights(critic).items() if 320 in tensor.shape]
        assert wide == ["embedding.word_embeddings.weight"] and "output_layer.weight" not in weights(critic)


def test_building_a_critic_draws_no_random_number_and_leaves_the_policy(runtime: Runtime) -> None:
    with both(Case(model=BIASED), runtime) as (policy, _):
        random, before = torch.get_rng_state(), weights(policy)
        critic = ValueModel(policy.config, policy.groups, runtime.device, 7)
        update_values(critic, critic.optimizer(OptimizerConfig(lr=1e-2), 20), 0)
        assert torch.equal(torch.get_rng_state(), random) and same(weights(policy), before)


def test_only_its_own_shape_can_be_copied(runtime: Runtime) -> None:
    with both(Case(model=dict(layers=2)), runtime) as (policy, _):
        critic = ValueModel(Case().config, policy.groups, CPU, 0)
        with pytest.raises(AssertionError, match="other layers"):
            critic.copy_trunk(policy)
