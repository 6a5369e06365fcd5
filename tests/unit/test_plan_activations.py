"""What autograd saves for the backward pass of a real model, against the plan's formula for torch's layers."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.logprobs import Vocabulary, logprobs_and_entropy
from models.parameters import layer
from moe_rl.plan import activations
from moe_rl.plan.activations import Kernels
from parallel.config import ParallelConfig
from parallel.runtime import Runtime, started
from tests.distributed.held import saved_bytes
from tests.distributed.passes import Case, built

TORCH, ONE = Kernels(fused=False), ParallelConfig()
LATENT: dict[str, Any] = dict(kv_heads=4, kv_lora_rank=24, rope_head_dim=8, v_head_dim=24)
WIDE: dict[str, Any] = dict(hidden=256, moe_ffn=128, heads=8, kv_heads=4, head_dim=32)
MODELS: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "bfloat16": dict(dtype="bfloat16"),
    "no query norm": dict(qk_norm=False),
    "norm over all heads": dict(qk_norm_span="all"),
    "norm over all heads, bfloat16": dict(qk_norm_span="all", dtype="bfloat16"),
    "shared expert": dict(shared_ffn=40),
    "dense layers": dict(dense_layers=[0, 1]),
    "latent": LATENT | dict(q_lora_rank=20),
    "latent, full queries, bfloat16": LATENT | dict(dtype="bfloat16"),
    "many experts": dict(experts=32, topk=8),
    "softmax first": dict(router_pre_softmax=True),
    "sigmoid": dict(router_score="sigmoid", expert_bias=True),
    "tied": dict(tie_embeddings=True),
    "wide": WIDE,
    "wide, bfloat16": WIDE | dict(dtype="bfloat16"),
}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


def predicted(case: Case, tokens: int) -> float:
    moe = set(case.config.moe_layers)
    layers = sum(activations.layer(case.config, i in moe, tokens, ONE, TORCH) for i in range(case.config.layers))
    return layers + activations.head(case.config, tokens, ONE, TORCH) + 8 * tokens  # and the ids of the embedding


@pytest.mark.parametrize("name", MODELS)
def test_what_autograd_saves_is_what_the_plan_says(runtime: Runtime, name: str) -> None:
    case = Case(model=MODELS[name])
    with built(case, runtime) as model:
        for tokens in (64, 256):
            assert predicted(case, tokens) == saved_bytes(model, tokens)[0], tokens


def test_experts_with_biases_keep_their_stacked_weights_on_a_cpu(runtime: Runtime) -> None:
    """As on a GPU without Transformer Engine: the grouped product is of a stack of weights. Beside it, a number and an end."""
    case = Case(model=dict(bias=True, qk_norm=False, activation="quick_gelu", glu_clamp=7.0))
    stacks = sum(w.total for w in layer(case.config, True) if w.group == "routed experts" and w.elements > 100) * 4
    with built(case, runtime) as model:
        beside = 4 * (8 * 2 * 64 + 4 * 8)
        assert predicted(case, 64) + 4 * stacks + beside == saved_bytes(model, 64)[0]


def test_what_recompute_saves(runtime: Runtime) -> None:
    """The input of each of the 4 layers in the forward pass; the rest of a layer when it is computed again, one by one."""
    case = Case(model=dict(WIDE, recompute="full"))
    with built(case, runtime) as model:
        forward, everything = saved_bytes(model, 256)
    kept = 4 * activations.layer_input(case.config, 256, ONE) + activations.head(case.config, 256, ONE, TORCH)
    kept += 256 * (8 + 4 * 32)  # ids; angles of rotation
    assert forward == kept
    assert everything == predicted(case, 256) + 256 * 4 * 32


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside it had at one time. known: tensors that were there before."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage.data_ptr() in self._seen or not storage.nbytes():
            return
        place, size = storage.data_ptr(), storage.nbytes()
        self._seen.add(place)
        self.now += size
        self.most = max(self.most, self.now)

        def gone() -> None:
            self.now -= size
            self._seen.discard(place)

        weakref.finalize(storage, gone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("hidden", [128, 1024])
def test_logits_at_their_most(dtype: str, hidden: int) -> None:
    """Forward and backward of the output layer over three chunks; with the wide one, the weight's gradient is what counts."""
    config = Case(model=dict(vocab_size=4096, hidden=hidden, logprob_chunk=64, dtype=dtype)).config
    kind = getattr(torch, dtype)
    rows = torch.randn(192, hidden, dtype=kind, requires_grad=True)
    weight = torch.randn(4096, hidden, dtype=kind, requires_grad=True)
    with Peak(rows, weight) as peak:
        out, entropy = logprobs_and_entropy(rows, weight, torch.arange(192), 0.7, 64, Vocabulary(0, 4096, None))
        (out.sum() + 0.1 * entropy.sum()).backward()
    assert activations.logits(config, 192, ONE) == pytest.approx(peak.most, rel=0.05)


def test_parts_of_a_layer_by_hand() -> None:
    """10 tokens of a float32 layer with Transformer Engine's norms: hidden 4, 2 heads of 2 with 1 key head, 3 experts of
    width 5, top-2, no query norm.

    A token: norms 2 (4 x 8 + 4) = 72; attention (8 + 6 + 4) x 4 + 2 x 4 = 80; router 3 x 4 + 2 x 12 + 2 x 8 = 52; angles
    4 x 2 x 4 = 32; each of 2 experts (6 x 5 + 4) x 4 + 4 = 140.
    """
    shape: dict[str, Any] = dict(hidden=4, heads=2, kv_heads=1, head_dim=2, moe_ffn=5, experts=3, topk=2, qk_norm=False)
    config = Case(model=shape).config
    assert activations.layer(config, True, 10, ONE, Kernels()) == 10 * (72 + 80 + 52 + 32 + 2 * 140)
    busy = activations.layer(config, True, 10, ONE, Kernels(imbalance=1.5))
    assert busy == 10 * (72 + 80 + 52 + 32 + 3 * 140)
    # two tensor ranks have half of everything but the angles; two expert-tensor ranks get each token, and half of each expert
    halved = ParallelConfig.model_validate(dict(tensor=2))
    assert activations.layer(config, True, 10, halved, Kernels()) == 10 * (72 + 80 + 52 + 2 * 140) / 2 + 10 * 32
    parts = ParallelConfig.model_validate(dict(expert_tensor=2))
    assert activations.layer(config, True, 10, parts, Kernels()) == 10 * (72 + 80 + 52 + 32 + 4 * ((15 + 4) * 4 + 4))
