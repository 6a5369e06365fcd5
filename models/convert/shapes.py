"""The global tensors of a model, as a checkpoint names them: pure arithmetic on ModelConfig, whatever the layout.

That these are the names and shapes of the model that Megatron builds is a test's to say.
"""

from models.config import ModelConfig

Shape = tuple[int, ...]
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def layer_key(layer: int, name: str) -> str:
    """The checkpoint's name of a tensor of 0-based `layer`."""
    return f"decoder.layers.{layer}.{name}"


def global_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Every weight and buffer by its name in a checkpoint, in the order of the forward pass. Vocabularies are padded."""
    vocabulary = (model.padded_vocab_size, model.hidden)
    shapes: dict[str, Shape] = {EMBEDDING: vocabulary}
    for layer in range(model.layers):
        parts = _latent_attention(model) if model.latent else _attention(model)
        parts |= _moe(model) if layer in model.moe_layers else _dense(model)
        shapes |= {layer_key(layer, name): shape for name, shape in parts.items()}
    shapes["decoder.final_layernorm.weight"] = (model.hidden,)
    if not model.tie_embeddings:
        shapes[OUTPUT] = vocabulary
    return shapes


def _attention(model: ModelConfig) -> dict[str, Shape]:
    hidden, size = model.hidden, model.head_dim
    queries, keys = model.heads * size, model.kv_heads * size
    shapes: dict[str, Shape] = {"self_attention.linear_qkv.layer_norm_weight": (hidden,)}
    shapes["self_attention.linear_qkv.weight"] = (queries + 2 * keys, hidden)
    if model.qkv_bias or model.bias:
        shapes["self_attention.linear_qkv.bias"] = (queries + 2 * keys,)
    if model.qk_norm:
        every = model.qk_norm_span == "all"
        shapes["self_attention.q_layernorm.weight"] = (queries if every else size,)
        shapes["self_attention.k_layernorm.weight"] = (keys if every else size,)
    if model.attention_sinks:
        shapes["self_attention.core_attention.softmax_offset"] = (model.heads,)
    shapes["self_attention.linear_proj.weight"] = (hidden, queries)
    if model.bias:
        shapes["self_attention.linear_proj.bias"] = (hidden,)
    return shapes


def _latent_attention(model: ModelConfig) -> dict[str, Shape]:
    assert model.kv_lora_rank is not None and model.v_head_dim is not None
    hidden, rank, heads = model.hidden, model.kv_lora_rank, model.heads
    queries = heads * (model.head_dim + model.rope_head_dim)
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
    if model.q_lora_rank is None:
        shapes["self_attention.linear_q_proj.weight"] = (queries, hidden)
    else:
        shapes["self_attention.linear_q_down_proj.weight"] = (model.q_lora_rank, hidden)
        shapes["self_attention.linear_q_up_proj.layer_norm_weight"] = (model.q_lora_rank,)
        shapes["self_attention.linear_q_up_proj.weight"] = (queries, model.q_lora_rank)
    shapes["self_attention.linear_kv_down_proj.weight"] = (rank + model.rope_head_dim, hidden)
    shapes["self_attention.linear_kv_up_proj.layer_norm_weight"] = (rank,)
    shapes["self_attention.linear_kv_up_proj.weight"] = (heads * (model.head_dim + model.v_head_dim), rank)
    shapes["self_attention.linear_proj.weight"] = (hidden, heads * model.v_head_dim)
    return shapes


def _dense(model: ModelConfig) -> dict[str, Shape]:
    norm: dict[str, Shape] = {"mlp.linear_fc1.layer_norm_weight": (model.hidden,)}
    return norm | _mlp(model, "mlp.", model.ffn, bias=model.bias)


def _moe(model: ModelConfig) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"pre_mlp_layernorm.weight": (model.hidden,)}
    shapes["mlp.router.weight"] = (model.experts, model.hidden)
    if model.bias:
        shapes["mlp.router.bias"] = (model.experts,)
    if model.has_expert_bias:
        shapes["mlp.router.expert_bias"] = (model.experts,)
    experts = _mlp(model, "mlp.experts.experts.", model.moe_ffn, bias=model.bias)
    shapes |= {name: (model.experts, *shape) for name, shape in experts.items()}
    if model.shared_ffn:
        shapes |= _mlp(model, "mlp.shared_experts.", model.shared_ffn, bias=False)
    if model.shared_gate:
        shapes["mlp.shared_experts.gate_weight"] = (1, model.hidden)
    return shapes


def _mlp(model: ModelConfig, prefix: str, width: int, *, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{prefix}linear_fc1.weight": (2 * width, model.hidden)}
    shapes[f"{prefix}linear_fc2.weight"] = (model.hidden, width)
    if bias:
        shapes[f"{prefix}linear_fc1.bias"] = (2 * width,)
        shapes[f"{prefix}linear_fc2.bias"] = (model.hidden,)
    return shapes
