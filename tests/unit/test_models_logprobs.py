"""Log-probabilities and entropy in chunks, against torch's log_softmax in float64. The split vocabulary: tests/distributed."""

import pytest
import torch
from torch import Tensor

from models import logprobs
from models.logprobs import Vocabulary, local_logits, logprobs_and_entropy

# float32 logits of 32 products. Over seeds 0-19 and all cases below: values differ from float64 by at most 3.5e-6,
# gradients by at most 2.7e-6 of their largest entry.
VALUE = 1e-5
GRADIENT = 1e-5


class Inputs:
    """N tokens, a vocabulary of `size` in `rows` rows, weights of the two outputs in a loss."""

    def __init__(self, seed: int, count: int = 7, size: int = 37, rows: int = 64, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(count, 32, generator=generator) * scale
        self.weight = torch.randn(rows, 32, generator=generator) * 0.5
        self.targets = torch.randint(0, size, (count,), generator=generator)
        self.grads = torch.randn(2, count, generator=generator)
        self.vocabulary = Vocabulary(first=0, size=size, group=None)

    def ours(self, temperature: float, chunk: int) -> list[Tensor]:
        """Log-probabilities, entropy, gradient of hidden, gradient of weight."""
        hidden, weight = self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()
        out = logprobs_and_entropy(hidden, weight, self.targets, temperature, chunk, self.vocabulary)
        return [out[0].detach(), out[1].detach(), *torch.autograd.grad(out, (hidden, weight), tuple(self.grads))]

    def expected(self, temperature: float) -> list[Tensor]:
        hidden, weight = self.hidden.double().requires_grad_(), self.weight.double().requires_grad_()
        logp = torch.log_softmax(hidden @ weight[: self.vocabulary.size].t() / temperature, dim=-1)
        chosen, entropy = logp.gather(1, self.targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
        grads = torch.autograd.grad((chosen, entropy), (hidden, weight), tuple(self.grads.double()))
        return [chosen.detach(), entropy.detach(), *grads]


def assert_close(ours: list[Tensor], expected: list[Tensor]) -> None:
    for name, got, wanted in zip(("logprobs", "entropy"), ours, expected, strict=False):
        torch.testing.assert_close(got.double(), wanted, atol=VALUE, rtol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    for name, got, wanted in zip(("hidden", "weight"), ours[2:], expected[2:], strict=True):
        bound = GRADIENT * float(wanted.abs().max())
        torch.testing.assert_close(got.double(), wanted, atol=bound, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_values_and_gradients_are_those_of_log_softmax(seed: int, chunk: int, temperature: float) -> None:
    inputs = Inputs(seed)
    assert_close(inputs.ours(temperature, chunk), inputs.expected(temperature))


@pytest.mark.parametrize("rows", [37, 38, 64, 128])
def test_rows_beyond_the_vocabulary_count_for_nothing(rows: int) -> None:
    inputs = Inputs(seed=1, rows=rows)
    inputs.weight[37:] = 50.0  # as large as they may be
    ours = inputs.ours(1.0, chunk=3)
    assert_close(ours, inputs.expected(1.0))
    assert torch.equal(ours[3][37:], torch.zeros(rows - 37, 32))


def test_chunks_change_no_value() -> None:
    """Each token's logits are a row of a matrix product of its own: not bitwise the same in another shape, but next to it."""
    inputs = Inputs(seed=2, count=50)
    whole = inputs.ours(0.7, chunk=50)
    for chunk in (1, 3, 49):
        for got, wanted in zip(inputs.ours(0.7, chunk), whole, strict=True):
            torch.testing.assert_close(got, wanted, atol=VALUE, rtol=0)


def test_no_tokens_give_nothing_and_a_gradient_of_zero() -> None:
    logp, entropy, hidden, weight = Inputs(seed=0, count=0).ours(1.0, chunk=4)
    assert logp.tolist() == entropy.tolist() == hidden.tolist() == []
    assert torch.equal(weight, torch.zeros(64, 32))


@pytest.mark.parametrize("seed", range(5))
def test_huge_logits_stay_finite(seed: int) -> None:
    """Logits of some 1e5: one token has all the probability, and exp of any logit would overflow."""
    inputs = Inputs(seed, scale=3e4)
    logp, entropy, hidden, weight = inputs.ours(1.0, chunk=3)
    wanted = inputs.expected(1.0)
    torch.testing.assert_close(logp.double(), wanted[0], rtol=1e-5, atol=0.1)  # float32 of 1e5 resolves 0.01
    assert entropy.abs().max() < 0.1
    assert hidden.isfinite().all() and weight.isfinite().all()


def test_a_bfloat16_layer_keeps_its_dtypes_and_float32_results() -> None:
    """Products of bfloat16 carry 8 bits: 2^-8 of logits of about 10. Gradients come in the dtype of their inputs."""
    inputs = Inputs(seed=3)
    inputs.hidden, inputs.weight = inputs.hidden.bfloat16(), inputs.weight.bfloat16()
    logp, entropy, hidden, weight = inputs.ours(1.0, chunk=3)
    assert (logp.dtype, entropy.dtype, hidden.dtype, weight.dtype) == (torch.float32,) * 2 + (torch.bfloat16,) * 2
    wanted = inputs.expected(1.0)
    torch.testing.assert_close(logp.double(), wanted[0], rtol=0, atol=0.05)
    bound = 0.02 * float(wanted[3].abs().max())
    torch.testing.assert_close(weight.double(), wanted[3], rtol=0, atol=bound)


def test_full_vocabulary_logits_exist_for_one_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def spy(*args: object) -> Tensor:
        logits = local_logits(*args)  # pyright: ignore[reportArgumentType]
        shapes.append(tuple(logits.shape))
        return logits

    monkeypatch.setattr(logprobs, "local_logits", spy)
    Inputs(seed=0, count=10).ours(1.0, chunk=4)
    assert shapes == [(4, 64), (4, 64), (2, 64)] * 2  # forward, then once more in the backward pass


def test_entropy_of_an_even_distribution_is_log_of_the_vocabulary() -> None:
    weight = torch.zeros(64, 8)
    logp, entropy = logprobs_and_entropy(torch.ones(2, 8), weight, torch.tensor([0, 36]), 1.0, 1, Vocabulary(0, 37, None))
    log_size = torch.tensor(37.0).log().expand(2)
    torch.testing.assert_close(entropy, log_size)
    torch.testing.assert_close(logp, -log_size)
