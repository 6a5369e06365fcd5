"""Megatron's distributed AdamW with gradient clipping and a learning-rate schedule."""

from typing import Any

import torch

from models.config import OptimizerConfig
from parallel.cpu import tensors_answer_as_cuda

# how the state is laid out in a checkpoint
_LAYOUT_FREE = {"distrib_optim_sharding_type": "fully_reshardable"}


class Optimizer:
    """One optimizer over DDP-wrapped chunks. Learning rate and weight decay follow the schedule, an update at a time."""

    def __init__(self, config: OptimizerConfig, chunks: list[Any], total_updates: int, dtype: torch.dtype) -> None:
        from megatron.core.optimizer import OptimizerConfig as MegatronConfig
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        with tensors_answer_as_cuda():
            self.megatron: Any = get_megatron_optimizer(
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
            # of a schedule that is loaded only its position counts: the run that goes on may have more steps
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )
        self.chunks = chunks
        self._allocate_state()

    def _allocate_state(self) -> None:
        """Zero moments now instead of at the first update: Megatron cannot describe torch's AdamW to a checkpoint before."""
        for part in self.megatron.chained_optimizers:
            if isinstance(part.optimizer, torch.optim.AdamW):
                for group in part.optimizer.param_groups:
                    for p in group["params"]:
                        zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                        part.optimizer.state[p] = {"step": torch.tensor(0.0), **zeros}

    def sharded_state(self, weights: dict[str, Any], is_loading: bool) -> dict[str, Any]:
        """Moments and master weights as Megatron's shards, and the number of updates, for a checkpoint that any layout can
        load: without expert parallelism there is one optimizer, with it there are two. weights: the model's own shards."""
        with tensors_answer_as_cuda():
            parts = [
                part.sharded_state_dict(weights, is_loading=is_loading, metadata=_LAYOUT_FREE)
                for part in self.megatron.chained_optimizers
            ]
        updates = parts[0]["optimizer"]["param_groups"][0]["step"]
        return {"shards": [part["param_state"] for part in parts], "updates": updates}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over what was loaded into a `sharded_state`."""
        with tensors_answer_as_cuda():
            for part, shards in zip(self.megatron.chained_optimizers, state["shards"], strict=True):
                own = part.state_dict()
                for group in own["optimizer"]["param_groups"]:
                    group["step"] = state["updates"]
                part.load_state_dict(own)
                # torch's AdamW keeps its step among the moments, where Megatron 0.19 then looks for it in the shards
                moments = part.optimizer.state
                steps = {p: moments[p].pop("step") for p in moments if "step" in moments[p]}
                part.load_parameter_state_from_fully_reshardable(shards)
                for p, step in steps.items():
                    moments[p]["step"] = step.clone()  # it has made one for all, which every parameter would then count up

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self) -> float:
        """Clips, updates, advances the schedule; collective. Returns the gradient norm before clipping."""
        with tensors_answer_as_cuda():
            done, norm, _ = self.megatron.step()
        if not done or norm is None:
            raise FloatingPointError("the optimizer refused the update: a gradient is not finite")
        self.schedule.step(increment=1)
        return float(norm)

    @property
    def lr(self) -> float:
        return float(self.megatron.param_groups[0]["lr"])
