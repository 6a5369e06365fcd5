"""The assembled model in one process: against transformers' Qwen3-MoE on the same weights, and its experts against a loop."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from models.config import ModelConfig
from models.initialise import global_shards
from models.model import MoEModel
from models.stream import pack_sequences
from models.torch_layers import StackedExperts
from parallel.runtime import Runtime, started
from tests.distributed.passes import Case, built, sample_batch

CPU = torch.device("cpu")
# Two implementations in float32 of the same four layers: over seeds 0-9 and the three shapes below, log-probabilities differ
# by at most 1.9e-6, logits (up to 3.7) by 1.8e-6.
CLOSE = 2e-5


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


def weights_of(model: MoEModel) -> dict[str, Tensor]:
    return {shard.key: shard.data for shard in global_shards(model.bare, model.groups)}


def qwen3_names(config: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Megatron's tensors under the names that a Qwen3-MoE checkpoint has; by hand, for this test alone."""
    heads, groups, size = config.heads, config.kv_heads, config.head_dim
    out = {
        "model.embed_tokens.weight": weights["embedding.word_embeddings.weight"][: config.vocab_size],
        "lm_head.weight": weights["output_layer.weight"][: config.vocab_size],
        "model.norm.weight": weights["decoder.final_layernorm.weight"],
    }
    for layer in range(config.layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        # [groups, heads / groups queries + a key + a value, size, hidden]
        qkv = weights[ours + "self_attention.linear_qkv.weight"].view(groups, heads // groups + 2, size, config.hidden)
        out[theirs + "self_attn.q_proj.weight"] = qkv[:, :-2].reshape(heads * size, -1)
        out[theirs + "self_attn.k_proj.weight"] = qkv[:, -2].reshape(groups * size, -1)
        out[theirs + "self_attn.v_proj.weight"] = qkv[:, -1].reshape(groups * size, -1)
        for name, key in {
            "self_attn.o_proj": "self_attention.linear_proj",
            "self_attn.q_norm": "self_attention.q_layernorm",
            "self_attn.k_norm": "self_attention.k_layernorm",
            "post_attention_layernorm": "pre_mlp_layernorm",
            "mlp.gate": "mlp.router",
        }.items():
            out[f"{theirs}{name}.weight"] = weights[f"{ours}{key}.weight"]
        out[theirs + "input_layernorm.weight"] = weights[ours + "self_attention.linear_qkv.layer_norm_weight"]
        experts = [f"{ours}mlp.experts.experts.{i}.linear_" for i in range(config.experts)]
        gate_up = [torch.cat([weights[e + "fc1.weight_w"], weights[e + "fc1.weight_v"]]) for e in experts]
        out[theirs + "mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        out[theirs + "mlp.experts.down_proj"] = torch.stack([weights[e + "fc2.weight"] for e in experts])
    return out


def qwen3_of(config: ModelConfig, weights: dict[str, Tensor]) -> Qwen3MoeForCausalLM:
    shape = Qwen3MoeConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,  # pyright: ignore[reportCallIssue]
        moe_intermediate_size=config.moe_ffn,
        num_experts=config.experts,
        num_experts_per_tok=config.topk,
        norm_topk_prob=True,
        rms_norm_eps=config.norm_epsilon,
        rope_theta=config.rope_base,  # pyright: ignore[reportCallIssue]
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=False,
        attn_implementation="eager",  # pyright: ignore[reportCallIssue]
    )
    model = Qwen3MoeForCausalLM(shape).eval()
    model.load_state_dict(qwen3_names(config, weights))  # strict: every tensor of theirs has one of ours
    return model


def shake_norms(model: MoEModel, seed: int) -> None:
    """Norm weights other than 1, so that one in the wrong place shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in weights_of(model).items():
            if tensor.ndim == 1:
                tensor.mul_(1 + 0.3 * torch.randn(tensor.shape, generator=generator))
                assert "norm" in key


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logprobs_and_logits_are_those_of_transformers_qwen3_moe(runtime: Runtime, seed: int, kv_heads: int) -> None:
    case = Case(seed=seed, model=dict(kv_heads=kv_heads, topk=3, rope_base=1e6))
    with built(case, runtime) as model, torch.no_grad():
        shake_norms(model, seed)
        sequences, prompts, _ = sample_batch(case.config, seed, count=6)
        theirs = qwen3_of(case.config, weights_of(model))
        stream = pack_sequences(sequences, prompts, sum(len(s) - 1 for s in sequences), CPU)
        scored = model.score([stream])[0].logprobs.split([len(s) - p for s, p in zip(sequences, prompts, strict=True)])
        stream.targets, stream.score_at = None, torch.tensor(stream.lengths).cumsum(0) - 1
        logits = model.next_token_logits(stream)
        assert logits is not None
        for i, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
            wanted: Any = theirs(torch.tensor([sequence])).logits[0]
            logp = wanted.log_softmax(-1)[prompt - 1 : -1].gather(1, torch.tensor(sequence[prompt:])[:, None])[:, 0]
            torch.testing.assert_close(scored[i], logp, atol=CLOSE, rtol=0)
            torch.testing.assert_close(logits[i, : case.config.vocab_size], wanted[-2], atol=CLOSE, rtol=0)
            assert logits[i, case.config.vocab_size :].eq(float("-inf")).all()


@pytest.mark.parametrize("seed", range(5))
def test_stacked_experts_are_the_loop_over_experts(runtime: Runtime, seed: int) -> None:
    """Experts without a token among them, also the first and the last. On this CPU equal to the bit, over seeds 0-19."""
    generator = torch.Generator().manual_seed(seed)
    with built(Case(seed=seed), runtime) as model, torch.no_grad():
        module = next(m for m in model.bare[0].modules() if isinstance(m, StackedExperts))
        for counts in ([0, 3, 0, 0, 9, 1, 2, 0], [1] * 8, [0] * 7 + [5], [20] + [0] * 7):
            tokens = torch.randn(sum(counts), 64, generator=generator)
            gates = torch.rand(sum(counts), generator=generator)
            loop, _ = module(tokens, torch.tensor(counts), gates)
            module.stack()
            stacked, _ = module(tokens, torch.tensor(counts), gates)
            module.unstack()
            torch.testing.assert_close(stacked, loop, atol=1e-5, rtol=0)
            for expert, (part, gate, out) in enumerate(
                zip(tokens.split(counts), gates.split(counts), loop.split(counts), strict=True)
            ):
                fc1, fc2 = (getattr(module.local_experts[expert], name).weight for name in ("linear_fc1", "linear_fc2"))
                first, second = (part @ fc1.t()).chunk(2, dim=-1)
                wanted = (torch.nn.functional.silu(first) * second * gate[:, None]) @ fc2.t()
                torch.testing.assert_close(out, wanted, atol=1e-5, rtol=0)


def test_stacks_are_gone_after_generating_even_if_it_fails(runtime: Runtime) -> None:
    with built(Case(), runtime) as model:
        experts = [m for m in model.bare[0].modules() if isinstance(m, StackedExperts)]
        with pytest.raises(RuntimeError, match="stop"), model.generating():
            assert len(experts) == 4 and all(m.stacked is not None for m in experts)
            raise RuntimeError("stop")
        assert all(m.stacked is None for m in experts)
