"""The shape of a MoE transformer, complete and checked; and presets with known shapes."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from parallel.config import ParallelConfig
from parallel.errors import UsageError


class ModelConfig(BaseModel):
    """A decoder-only MoE transformer. A preset fills what is not given; without one the shape fields are required."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    preset: str | None = Field(
        default=None,
        description="tiny_moe, small_moe, medium_moe, or a released model (models/presets.py): its values, which the other "
        "keys override",
    )
    path: Path | None = Field(
        default=None, description="Hugging Face directory: its shape, tokenizer and weights, which the other keys override"
    )
    layers: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt = Field(description="key/value heads (grouped-query attention)")
    head_dim: PositiveInt = Field(description="size of a head's query and key; in latent attention, without rope_head_dim")
    ffn: PositiveInt = Field(description="width of a dense layer's MLP")
    moe_ffn: NonNegativeInt = Field(default=0, description="width of one expert's MLP")
    experts: NonNegativeInt = Field(description="routed experts a MoE layer; 0: a dense model")
    topk: NonNegativeInt = Field(default=0, description="experts a token")
    dense_layers: list[NonNegativeInt] = Field(default=[], description="0-based layers with a dense MLP instead of experts")
    shared_ffn: NonNegativeInt = Field(default=0, description="width of the shared expert, 0: none")
    shared_gate: bool = Field(default=False, description="a sigmoid gate on the shared expert (Qwen2-MoE)")
    vocab_size: PositiveInt = Field(default=259, description="259: the built-in byte tokenizer")
    max_positions: PositiveInt = Field(default=512, description="longest prompt + response, in tokens")
    norm_epsilon: PositiveFloat = 1e-6
    tie_embeddings: bool = False
    init_std: PositiveFloat = 0.02
    tokenizer: str | None = Field(
        default=None, description="directory with a Hugging Face tokenizer, or bytes; none: that of model.path, else bytes"
    )

    rope_base: PositiveFloat = 10000.0
    rope_scaling: dict[str, Any] | None = Field(
        default=None,
        description="how positions are stretched, as Hugging Face's rope_parameters: {rope_type: yarn, ...}",
    )
    rope_fraction: float = Field(default=1.0, gt=0, le=1, description="share of head_dim that the rotary embedding turns")
    qk_norm: bool = True
    qk_norm_span: Literal["head", "all"] = Field(
        default="head", description="what one RMSNorm of queries (keys) is about: a head, or all heads together (OLMoE)"
    )
    qkv_bias: bool = Field(default=False, description="biases in the query, key and value projections alone")
    bias: bool = Field(default=False, description="biases in attention, router and experts (GPT-OSS)")
    attention_sinks: bool = Field(default=False, description="a learned logit a head that takes part in the softmax (GPT-OSS)")
    window: PositiveInt | None = Field(default=None, description="tokens that a layer of window_layers sees, itself included")
    window_layers: list[NonNegativeInt] = Field(default=[], description="0-based layers with sliding-window attention")
    kv_lora_rank: PositiveInt | None = Field(default=None, description="latent attention (DeepSeek): rank of keys and values")
    q_lora_rank: PositiveInt | None = Field(default=None, description="latent attention: rank of queries; none: full")
    rope_head_dim: NonNegativeInt = Field(default=0, description="latent attention: a head's part that carries the position")
    latent_norm_epsilon: PositiveFloat = Field(default=1e-6, description="latent attention: of the norms within it")
    v_head_dim: PositiveInt | None = Field(default=None, description="latent attention: size of a head's value")

    activation: Literal["silu", "quick_gelu"] = Field(default="silu", description="of the gate in every MLP")
    glu_clamp: PositiveFloat | None = Field(default=None, description="bound of gate and up before they are multiplied")
    glu_offset: float = Field(default=0.0, description="added to up before gate and up are multiplied")

    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_pre_softmax: bool = Field(
        default=False, description="softmax over all experts before top-k, instead of over the top-k"
    )
    router_normalize: bool = Field(default=True, description="sigmoid: a token's gates are divided by their sum")
    router_scale: PositiveFloat | None = Field(default=None, description="factor on the gates")
    router_groups: PositiveInt | None = None
    router_group_topk: PositiveInt | None = None
    router_group_best: PositiveInt | None = Field(
        default=None, description="best experts whose sum is a group's score; none: topk / router_group_topk"
    )
    router_fusion: bool = Field(
        default=False, description="Transformer Engine's fused router; it can neither be observed nor replayed"
    )
    expert_bias: bool = Field(
        default=False, description="sigmoid: a bias in the selection scores, which load_balancing=expert_bias moves"
    )
    load_balancing: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "expert_bias"] = Field(
        default="none", description="the auxiliary losses see one microbatch at a time, so they depend on how it is cut"
    )
    aux_loss_coefficient: NonNegativeFloat = 1e-3
    expert_bias_rate: NonNegativeFloat = Field(default=1e-3, description="step of the expert bias an update")

    dtype: Literal["float32", "bfloat16"] = "float32"
    recompute: Literal["none", "full"] = "none"
    logprob_chunk: PositiveInt = Field(default=2048, description="tokens whose full-vocabulary logits exist at once")

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        if self.topk > self.experts:
            raise ValueError(f"model.topk={self.topk}: must be at most model.experts={self.experts}")
        for key in ("topk", "moe_ffn"):
            if bool(getattr(self, key)) != bool(self.experts):
                rule = "must be at least 1" if self.experts else "must be 0 (a dense model)"
                raise ValueError(f"model.{key}={getattr(self, key)}: {rule}, as model.experts={self.experts}")
        if self.heads % self.kv_heads:
            raise ValueError(f"model.heads={self.heads}: must be a multiple of model.kv_heads={self.kv_heads}")
        for key in ("dense_layers", "window_layers"):
            if wrong := [i for i in getattr(self, key) if i >= self.layers]:
                raise ValueError(f"model.{key}={wrong}: layers count from 0 and model.layers={self.layers}")
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim={self.head_dim}: must be even, for the rotary embedding")
        if self.shared_ffn and self.bias:
            raise ValueError("model.bias=true: a shared expert has no biases in Megatron-Core; set model.shared_ffn=0")
        if self.shared_gate and not self.shared_ffn:
            raise ValueError("model.shared_gate=true: there is no shared expert to gate; set model.shared_ffn")
        return self

    @model_validator(mode="after")
    def _check_attention(self) -> Self:
        if bool(self.window) != bool(self.window_layers):
            raise ValueError(f"model.window={self.window}, model.window_layers={self.window_layers}: set both or neither")
        if self.kv_lora_rank is None:
            if wrong := [key for key in ("q_lora_rank", "rope_head_dim", "v_head_dim") if getattr(self, key)]:
                raise ValueError(f"model.{wrong[0]}={getattr(self, wrong[0])}: needs model.kv_lora_rank (latent attention)")
            return self
        if not self.rope_head_dim or self.rope_head_dim % 2 or self.v_head_dim is None:
            raise ValueError(f"model.kv_lora_rank={self.kv_lora_rank}: needs model.rope_head_dim (even) and model.v_head_dim")
        if self.kv_heads != self.heads:
            raise ValueError(f"model.kv_heads={self.kv_heads}: must be model.heads={self.heads} with latent attention")
        for key in ("qkv_bias", "bias", "attention_sinks", "window"):
            if getattr(self, key):
                raise ValueError(f"model.{key}={getattr(self, key)}: model.kv_lora_rank (latent attention) has none; remove it")
        return self

    @model_validator(mode="after")
    def _check_router(self) -> Self:
        for key in [k for k in ("load_balancing", "expert_bias") if getattr(self, k) in ("expert_bias", True)]:
            if self.router_score != "sigmoid":
                raise ValueError(f"model.{key}={getattr(self, key)}: needs model.router_score=sigmoid")
        if not self.router_normalize and self.router_score != "sigmoid":
            raise ValueError("model.router_normalize=false: needs model.router_score=sigmoid; see model.router_pre_softmax")
        if self.topk == 1 and self.router_score == "softmax" and not self.router_pre_softmax:
            raise ValueError("model.topk=1: needs model.router_pre_softmax=true (the softmax over one expert is always 1)")
        if self.router_fusion and self.recompute != "none":
            raise ValueError(
                "model.router_fusion=true: its recomputation could choose other experts than its forward pass; set "
                "model.router_fusion=false or model.recompute=none"
            )
        if (self.router_groups is None) != (self.router_group_topk is None):
            raise ValueError("model.router_groups and model.router_group_topk: set both or neither")
        if self.router_groups is None or self.router_group_topk is None:
            return self
        if self.experts % self.router_groups:
            raise ValueError(f"model.experts={self.experts}: must be a multiple of model.router_groups={self.router_groups}")
        # without group_best, a group's score is that of its best topk / group_topk experts
        most = self.router_groups if self.router_group_best else min(self.router_groups, self.topk)
        if self.router_group_topk > most:
            raise ValueError(
                f"model.router_group_topk={self.router_group_topk}: must be at most {most}, the lesser of "
                f"model.router_groups={self.router_groups} and model.topk={self.topk}"
            )
        if (best := self.router_group_best or 1) > self.experts // self.router_groups:
            raise ValueError(
                f"model.router_group_best={best}: must be at most {self.experts // self.router_groups}, the experts of a group"
            )
        held = self.router_group_topk * (self.experts // self.router_groups)
        if self.topk > held:
            raise ValueError(
                f"model.topk={self.topk}: must be at most {held}, the experts in model.router_group_topk="
                f"{self.router_group_topk} of model.router_groups={self.router_groups} groups"
            )
        return self

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """0-based numbers of the layers that route."""
        return tuple(i for i in range(self.layers) if self.experts and i not in set(self.dense_layers))

    @property
    def latent(self) -> bool:
        """Multi-head latent attention (arXiv 2405.04434, section 2.1)."""
        return self.kv_lora_rank is not None

    @property
    def has_expert_bias(self) -> bool:
        """The routers' selection scores hold a bias (arXiv 2412.19437, section 2.1.2)."""
        return self.expert_bias or self.load_balancing == "expert_bias"

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the same in every layout, so that any layout loads any checkpoint."""
        return -(-self.vocab_size // 64) * 64

    @property
    def _kv_down_width(self) -> int:
        return self.kv_lora_rank + self.rope_head_dim if self.kv_lora_rank is not None else 0

    def check_layout(self, parallel: ParallelConfig) -> None:
        """Raises UsageError unless `parallel` can split this model."""
        rules = (
            (self.heads, "model.heads", parallel.tensor, "parallel.tensor"),
            (self.kv_heads, "model.kv_heads", parallel.tensor, "parallel.tensor"),
            (self.q_lora_rank or 0, "model.q_lora_rank", parallel.tensor, "parallel.tensor"),
            (self._kv_down_width, "model.kv_lora_rank + model.rope_head_dim", parallel.tensor, "parallel.tensor"),
            (self.ffn, "model.ffn", parallel.tensor, "parallel.tensor"),
            (self.shared_ffn, "model.shared_ffn", parallel.tensor, "parallel.tensor"),
            (self.padded_vocab_size, "padded model.vocab_size", parallel.tensor, "parallel.tensor"),
            (self.experts, "model.experts", parallel.expert, "parallel.expert"),
            (self.moe_ffn, "model.moe_ffn", parallel.expert_tensor, "parallel.expert_tensor"),
        )
        for value, name, divisor, key in rules:
            if value % divisor:
                raise UsageError(f"{key}={divisor}: must divide {name}={value}; choose a divisor of {value}")
        if self.bias and self.experts and parallel.expert_tensor > 1:
            raise UsageError(
                f"parallel.expert_tensor={parallel.expert_tensor}: must be 1 with model.bias=true, whose experts have biases"
            )
        if self.experts == 0 and parallel.expert > 1:
            raise UsageError(f"parallel.expert={parallel.expert}: model.experts=0 leaves nothing to split; must be 1")
        parallel.check_layers(self.layers)


class OptimizerConfig(BaseModel):
    """AdamW, its state sharded over the data-parallel ranks, and its schedule, counted in optimizer updates."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: NonNegativeFloat = 1e-6
    min_lr: NonNegativeFloat = 0.0
    schedule: Literal["constant", "linear", "cosine"] = Field(default="constant", description="decay after the warm-up")
    warmup_updates: NonNegativeInt = Field(default=0, description="optimizer updates of linear warm-up")
    decay_updates: PositiveInt | None = Field(default=None, description="updates until min_lr; none: the whole run")
    weight_decay: NonNegativeFloat = 0.0
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: PositiveFloat = 1e-8
    grad_clip: NonNegativeFloat = Field(default=1.0, description="0: off")
