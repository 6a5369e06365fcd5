"""The shape of a MoE transformer, complete and checked; and presets with known shapes."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from parallel.config import ParallelConfig
from parallel.errors import UsageError


class ModelConfig(BaseModel):
    """A decoder-only MoE transformer. A preset fills what is not given; without one the shape fields are required."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    preset: str | None = Field(
        default=None, description="tiny_moe | small_moe | medium_moe: its values, which the other keys override"
    )
    layers: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt = Field(description="key/value heads (grouped-query attention)")
    head_dim: PositiveInt
    ffn: PositiveInt = Field(description="width of a dense layer's MLP")
    moe_ffn: PositiveInt = Field(description="width of one expert's MLP")
    experts: PositiveInt = Field(description="routed experts a MoE layer")
    topk: PositiveInt = Field(description="experts a token")
    dense_layers: list[NonNegativeInt] = Field(default=[], description="0-based layers with a dense MLP instead of experts")
    shared_ffn: NonNegativeInt = Field(default=0, description="width of the shared expert, 0: none")
    vocab_size: PositiveInt = Field(default=259, description="259: the built-in byte tokenizer")
    max_positions: PositiveInt = Field(default=512, description="longest prompt + response, in tokens")
    rope_base: PositiveFloat = 10000.0
    norm_epsilon: PositiveFloat = 1e-6
    qk_norm: bool = True
    tie_embeddings: bool = False
    init_std: PositiveFloat = 0.02
    tokenizer: str | None = Field(default=None, description="directory with a Hugging Face tokenizer; none: bytes")

    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_pre_softmax: bool = Field(
        default=False, description="softmax over all experts before top-k, instead of over the top-k"
    )
    router_scale: PositiveFloat | None = Field(default=None, description="factor on the gates")
    router_groups: PositiveInt | None = None
    router_group_topk: PositiveInt | None = None
    router_fusion: bool = Field(
        default=False, description="Transformer Engine's fused router; it can neither be observed nor replayed"
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
        if self.heads % self.kv_heads:
            raise ValueError(f"model.heads={self.heads}: must be a multiple of model.kv_heads={self.kv_heads}")
        if wrong := [i for i in self.dense_layers if i >= self.layers]:
            raise ValueError(f"model.dense_layers={wrong}: layers count from 0 and model.layers={self.layers}")
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim={self.head_dim}: must be even, for the rotary embedding")
        return self

    @model_validator(mode="after")
    def _check_router(self) -> Self:
        if self.load_balancing == "expert_bias" and self.router_score != "sigmoid":
            raise ValueError("model.load_balancing=expert_bias: needs model.router_score=sigmoid")
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
        most = min(self.router_groups, self.topk)  # a group's score is that of its best topk / group_topk experts
        if self.router_group_topk > most:
            raise ValueError(
                f"model.router_group_topk={self.router_group_topk}: must be at most {most}, the lesser of "
                f"model.router_groups={self.router_groups} and model.topk={self.topk}"
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
        return tuple(i for i in range(self.layers) if i not in set(self.dense_layers))

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the same in every layout, so that any layout loads any checkpoint."""
        return -(-self.vocab_size // 64) * 64

    def check_layout(self, parallel: ParallelConfig) -> None:
        """Raises UsageError unless `parallel` can split this model."""
        stages = parallel.pipeline * parallel.virtual_pipeline
        stage_key = "parallel.pipeline" + " x parallel.virtual_pipeline" * (parallel.virtual_pipeline > 1)
        rules = (
            (self.heads, "model.heads", parallel.tensor, "parallel.tensor"),
            (self.kv_heads, "model.kv_heads", parallel.tensor, "parallel.tensor"),
            (self.ffn, "model.ffn", parallel.tensor, "parallel.tensor"),
            (self.shared_ffn, "model.shared_ffn", parallel.tensor, "parallel.tensor"),
            (self.padded_vocab_size, "padded model.vocab_size", parallel.tensor, "parallel.tensor"),
            (self.experts, "model.experts", parallel.expert, "parallel.expert"),
            (self.moe_ffn, "model.moe_ffn", parallel.expert_tensor, "parallel.expert_tensor"),
            (self.layers, "model.layers", stages, stage_key),
        )
        for value, name, divisor, key in rules:
            if value % divisor:
                raise UsageError(f"{key}={divisor}: must divide {name}={value}; choose a divisor of {value}")


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


PRESETS: dict[str, dict[str, Any]] = {
    # 1.9M parameters: learns two-digit addition on a laptop in minutes
    "tiny_moe": dict(
        layers=4,
        hidden=128,
        heads=4,
        kv_heads=2,
        head_dim=32,
        ffn=256,
        moe_ffn=128,
        experts=8,
        topk=2,
        max_positions=128,
        init_std=0.1,
    ),
    # 20M and 123M parameters: the same shape, grown
    "small_moe": dict(
        layers=6, hidden=256, heads=8, kv_heads=4, head_dim=32, ffn=768, moe_ffn=256, experts=16, topk=2, max_positions=1024
    ),
    "medium_moe": dict(
        layers=12, hidden=512, heads=8, kv_heads=4, head_dim=64, ffn=1536, moe_ffn=384, experts=16, topk=4, max_positions=2048
    ),
}
