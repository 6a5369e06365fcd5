"""Megatron's distributed AdamW with gradient clipping and a learning-rate schedule."""

from typing import Any

import torch

from models.config import OptimizerConfig
from parallel.cpu import cuda_type_names


class Optimizer:
    """One optimizer over DDP-wrapped chunks. Learning rate and weight decay follow the schedule, an update at a time."""

    def __init__(self, config: OptimizerConfig, chunks: list[Any], total_updates: int, dtype: torch.dtype) -> None:
        from megatron.core.optimizer import OptimizerConfig as MegatronConfig
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        with cuda_type_names():
            self.megatron = get_megatron_optimizer(
                MegatronConfig(
                    optimizer="adam",
                    lr=config.lr,
                    min_lr=config.min_lr,
                    weight_decay=config.weight_decay,
                    adam_beta1=config.beta1,
                    adam_beta2=config.beta2,
                    adam_eps=config.epsilon,
                    clip_grad=config.grad_clip,
                    bf16=dtype == torch.bfloat16,
                    params_dtype=dtype,
                    use_distributed_optimizer=True,
                ),
                chunks,
                use_gloo_process_groups=torch.cuda.is_available(),
            )
        decay = max(config.decay_updates or total_updates, config.warmup_updates + 1)
        self.schedule = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=config.lr,
            min_lr=config.min_lr if config.schedule != "constant" else 0.0,
            lr_warmup_steps=config.warmup_updates,
            lr_decay_steps=decay,
            lr_decay_style=config.schedule,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=True,
        )
        self.chunks = chunks

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self) -> float:
        """Clips, updates, advances the schedule; collective. Returns the gradient norm before clipping."""
        with cuda_type_names():
            done, norm, _ = self.megatron.step()
        if not done or norm is None:
            raise FloatingPointError("the optimizer refused the update: a gradient is not finite")
        self.schedule.step(increment=1)
        return float(norm)

    @property
    def lr(self) -> float:
        return float(self.megatron.param_groups[0]["lr"])
