"""What a step is estimated to take. A ranking needs the order of layouts, not their seconds: docs/planning.md has the formulas.

An estimate from published speeds. It was tried on no GPU: take it as an order to try layouts in.
"""

import math
from dataclasses import dataclass

from models import parameters
from models.config import ModelConfig
from moe_rl.config import RunConfig
from moe_rl.plan.cluster import Cluster, Speeds
from moe_rl.plan.states import GRADIENT, SIZES
from moe_rl.plan.workload import Workload
from parallel.config import ParallelConfig


@dataclass(frozen=True)
class Cost:
    """bubble: share of an update's time that a pipeline stage waits. dispatch_bytes: what a token and MoE layer sends to other
    GPUs and back in a forward pass (all-to-all); dispatch_between: of it between nodes. Seconds: of one step."""

    bubble: float
    dispatch_bytes: float
    dispatch_between: float
    tensor_bytes: float
    gradient_bytes: float
    update_seconds: float
    scoring_seconds: float
    rollout_seconds: float

    @property
    def seconds(self) -> float:
        return self.update_seconds + self.scoring_seconds + self.rollout_seconds


def bubble(parallel: ParallelConfig, microbatches: int) -> float:
    """(p - 1) / (v m + p - 1): arXiv 2104.04473, section 2.2, as a share of the whole."""
    waiting = parallel.pipeline - 1
    return waiting / (parallel.virtual_pipeline * microbatches + waiting)


def dispatch(model: ModelConfig, parallel: ParallelConfig, gpus: int) -> tuple[float, float]:
    """Bytes a token and MoE layer in a forward pass, sent out and brought back: (to other GPUs, of these to other nodes).

    Each of a token's `topk` copies goes to an expert on any rank of the group alike. Ranks of a group are neighbours: expert
    tensor ranks first, expert ranks next (Megatron's order).
    """
    ranks = parallel.expert * parallel.expert_tensor
    if not model.experts or ranks == 1:
        return 0.0, 0.0
    one_way = model.hidden * SIZES[model.dtype]
    inside = max(1, min(parallel.expert, gpus // parallel.expert_tensor))
    if parallel.dispatcher == "allgather":
        return 2.0 * one_way * (ranks - 1), 2.0 * one_way * (ranks - min(ranks, gpus))
    copies = 2.0 * one_way * model.topk * parallel.expert_tensor
    return copies * (1 - 1 / ranks), copies * (parallel.expert - inside) / parallel.expert


class CostModel:
    """Of one configuration on one cluster."""

    def __init__(self, config: RunConfig, cluster: Cluster, speeds: Speeds | None = None) -> None:
        self.config, self.model, self.cluster = config, config.model, cluster
        self.speeds = speeds or Speeds()
        counts = parameters.count(config.model)
        self.active = counts.active_without_embedding
        self.expert_weights = counts.total["routed experts"]
        self.dense_weights = counts.all - self.expert_weights
        self.size, self.moe_layers = SIZES[config.model.dtype], len(config.model.moe_layers)

    def of(self, parallel: ParallelConfig, work: Workload) -> Cost:
        model, algorithm = self.model, self.config.algorithm
        out, between = dispatch(model, parallel, self.cluster.gpus)
        share, tensor = bubble(parallel, work.microbatches), self._tensor_bytes(parallel)
        forward = self._forward(parallel, work.update_tokens, out, between, tensor)
        again = 1 if model.recompute == "full" else 0
        gradients = self._gradient_bytes(parallel)
        reduction = gradients / self._link(parallel, self.cluster.world // parallel.pipeline)
        models = 2 if algorithm.trains_critic else 1
        update = work.updates * models * (forward * (3 + again) / (1 - share) + reduction)
        passes = 1 + bool(algorithm.kl_coefficient) + algorithm.trains_critic
        scoring = passes * algorithm.minibatches * forward / (1 - share)
        return Cost(
            bubble=share,
            dispatch_bytes=out,
            dispatch_between=between,
            tensor_bytes=tensor,
            gradient_bytes=gradients,
            update_seconds=update,
            scoring_seconds=scoring,
            rollout_seconds=self._rollout(parallel, work, out, between, tensor),
        )

    def _forward(self, parallel: ParallelConfig, tokens: int, out: float, between: float, tensor: float) -> float:
        """Seconds of `tokens` tokens of one data-parallel rank through this rank's share of the model, without waiting."""
        speeds, stages = self.speeds, parallel.pipeline
        compute = 2 * self.active * tokens / (parallel.tensor * stages) / speeds.compute
        here = tokens / parallel.tensor
        moe = self.moe_layers / stages
        exchange = here * moe * ((out - between) / speeds.inside_node + between / speeds.between_nodes)
        layers = self.model.layers / stages
        messages = here * self.model.hidden * self.size * parallel.virtual_pipeline * (stages > 1) / speeds.between_nodes
        return compute + exchange + tokens * layers * tensor / speeds.inside_node + messages

    def _tensor_bytes(self, parallel: ParallelConfig) -> float:
        """A token and layer in a forward pass: all-gather and reduce-scatter around attention and around a dense or shared
        MLP. Experts have their own exchange."""
        model, ranks = self.model, parallel.tensor
        moe = self.moe_layers / model.layers
        blocks = 1 + (1 - moe) + moe * bool(model.shared_ffn)
        return 2 * blocks * model.hidden * self.size * (ranks - 1) / ranks

    def _gradient_bytes(self, parallel: ParallelConfig) -> float:
        """An update: gradients summed and scattered in float32, weights gathered, of a rank's share."""
        stages, world = parallel.pipeline, self.cluster.world
        data = world // (parallel.tensor * stages)
        expert_data = world // (parallel.expert * parallel.expert_tensor * stages)
        dense = self.dense_weights / (parallel.tensor * stages) * (data - 1) / data
        experts = self.expert_weights / (parallel.expert * parallel.expert_tensor * stages) * (expert_data - 1) / expert_data
        return (dense + experts) * (GRADIENT + self.size)

    def _link(self, parallel: ParallelConfig, ranks: int) -> float:
        return self.speeds.inside_node if ranks <= self.cluster.gpus else self.speeds.between_nodes

    def _rollout(self, parallel: ParallelConfig, work: Workload, out: float, between: float, tensor: float) -> float:
        """The embedded engine runs the stages of a pipeline one after the other: a step of decoding reads the weights of
        every stage, and one stage works at a time."""
        speeds, stages = self.speeds, parallel.pipeline
        weights = self.dense_weights / parallel.tensor + self.expert_weights / (parallel.expert * parallel.expert_tensor)
        read = weights * self.size / speeds.memory
        through = stages * self._forward(parallel, work.rows, out, between, tensor)
        nodes = -(-parallel.expert * parallel.expert_tensor // self.cluster.gpus)
        latency = speeds.collective + speeds.collective_between * math.log2(nodes)  # in rounds that double what is reached
        collectives = 2 * self.moe_layers * latency * (out > 0)
        collectives += 2 * self.model.layers * speeds.collective * (parallel.tensor > 1)
        step = max(read, through) + collectives + self.model.layers * speeds.layer
        prefill = stages * self._forward(parallel, work.rows * work.prompt, out, between, tensor)
        return work.batches * (prefill + work.response * step)
