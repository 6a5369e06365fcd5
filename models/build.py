"""Configuration and groups -> model chunks. The only place that names Megatron's model class."""

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F

from models.config import ModelConfig
from parallel.cpu import tensors_answer_as_cuda
from parallel.groups import Groups

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_engine_is_present() -> bool:
    """Transformer Engine is installed and there is a GPU for it."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def transformer_config(model: ModelConfig, groups: Groups) -> Any:
    """Megatron's configuration of `model` split by `groups`."""
    from megatron.core.activations import quick_gelu
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    parallel, dtype = groups.parallel, DTYPES[model.dtype]
    interleaved = parallel.virtual_pipeline > 1
    balancing = model.load_balancing if model.load_balancing.endswith("aux_loss") else "none"
    family: Any = MLATransformerConfig if model.latent else TransformerConfig
    config = family(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn,
        moe_ffn_hidden_size=model.moe_ffn or None,
        num_moe_experts=model.experts or None,
        moe_layer_freq=[int(i in model.moe_layers) for i in range(model.layers)],
        moe_shared_expert_intermediate_size=model.shared_ffn or None,
        moe_shared_expert_gate=model.shared_gate,
        moe_router_topk=model.topk,
        moe_router_score_function=model.router_score,
        moe_router_pre_softmax=model.router_pre_softmax,
        moe_router_topk_scaling_factor=model.router_scale,
        moe_router_num_groups=model.router_groups,
        moe_router_group_topk=model.router_group_topk,
        moe_router_dtype="fp32",
        moe_router_fusion=model.router_fusion,
        moe_router_load_balancing_type=balancing,
        moe_aux_loss_coeff=model.aux_loss_coefficient if balancing != "none" else 0.0,
        moe_router_enable_expert_bias=model.has_expert_bias,
        moe_router_bias_update_rate=model.expert_bias_rate if model.load_balancing == "expert_bias" else 0.0,
        moe_token_dispatcher_type=parallel.dispatcher,
        moe_grouped_gemm=transformer_engine_is_present(),
        transformer_impl="transformer_engine" if transformer_engine_is_present() else "local",
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if interleaved else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers,
        num_layers_in_last_pipeline_stage=parallel.last_stage_layers,
        sequence_parallel=parallel.tensor > 1,
        # with two stages both neighbours are the same rank, and batched messages of an interleaved schedule cross
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=model.dtype == "bfloat16",
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=model.q_lora_rank is not None if model.latent else model.qk_norm,
        add_bias_linear=model.bias,
        add_qkv_bias=model.qkv_bias,
        gated_linear_unit=True,
        activation_func=quick_gelu if model.activation == "quick_gelu" else F.silu,
        activation_func_clamp_value=model.glu_clamp,
        glu_linear_offset=model.glu_offset,
        softmax_type="learnable" if model.attention_sinks else "vanilla",
        window_size=None if model.window is None else (model.window - 1, 0),
        window_attn_skip_freq=None if model.window is None else [int(i in model.window_layers) for i in range(model.layers)],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # the loss is a sum over tokens with global denominators: gradients are summed, never averaged, across ranks
        calculate_per_token_loss=True,
        # weights are drawn by `initialise`, alike in every layout
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        recompute_granularity="full" if model.recompute == "full" else None,
        recompute_method="uniform" if model.recompute == "full" else None,
        recompute_num_layers=1 if model.recompute == "full" else None,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **(_latent(model) if model.latent else {}),
    )
    # set afterwards: the constructor refuses it with the allgather dispatcher, whose ranks must bring equally many tokens;
    # `Transformer.stream_sizes` sees to that
    config.variable_seq_lengths = parallel.pipeline > 1
    return config


def _latent(model: ModelConfig) -> dict[str, Any]:
    """What multi-head latent attention adds. The rotary embedding's frequencies are models/rotary.py's."""
    scaling = model.rope_scaling or {}
    return dict(
        rope_type="rope",
        # of the scores' scale, as in transformers: (1 + 0.1 mscale_all_dim log factor)^2
        rotary_scaling_factor=scaling.get("factor", 1.0),
        mscale_all_dim=scaling.get("mscale_all_dim") or 0.0,
        multi_latent_attention=True,
        q_lora_rank=model.q_lora_rank,
        kv_lora_rank=model.kv_lora_rank,
        qk_head_dim=model.head_dim,
        qk_pos_emb_head_dim=model.rope_head_dim,
        v_head_dim=model.v_head_dim,
    )


def build_chunks(model: ModelConfig, groups: Groups, config: Any) -> list[Any]:
    """This rank's part of the model: one module a virtual pipeline stage, weights undefined."""
    return [_build_chunk(model, groups, config, chunk) for chunk in range(groups.parallel.virtual_pipeline)]


def _build_chunk(model: ModelConfig, groups: Groups, config: Any, chunk: int) -> Any:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from models.rotary import install_rotary

    layers = _layers()
    specs = {
        is_moe: layers.layer_spec(model, config, is_moe) for is_moe in {i in model.moe_layers for i in range(model.layers)}
    }
    here = groups.parallel.stage_layers(model.layers)[groups.pipeline.rank][chunk]
    block: Any = TransformerBlockSubmodules(layer_specs=[specs[i in model.moe_layers] for i in here], layer_norm=layers.Norm)
    with tensors_answer_as_cuda():  # a pipeline moves its second copy of tied embeddings there
        module: Any = GPTModel(
            config,
            block,
            vocab_size=model.padded_vocab_size,
            max_sequence_length=model.max_positions,
            pre_process=groups.is_first_chunk(chunk),
            post_process=groups.is_last_chunk(chunk),
            position_embedding_type="rope",
            rotary_percent=model.rope_fraction,
            rotary_base=model.rope_base,  # pyright: ignore[reportArgumentType]
            share_embeddings_and_output_weights=model.tie_embeddings,
            vp_stage=chunk if groups.parallel.virtual_pipeline > 1 else None,
        )
    install_rotary(module, model)
    if torch.cuda.is_available():
        module.cuda()
    return module


def _layers() -> Any:
    """The module that makes the layers: Transformer Engine's where it is present."""
    if transformer_engine_is_present():
        from models import te_layers

        return te_layers
    from models import torch_layers

    return torch_layers
