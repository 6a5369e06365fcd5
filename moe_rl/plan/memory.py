"""Bytes on a GPU, part by part: what stays, what a training pass adds, what generation adds."""

from dataclasses import dataclass, fields

from models.config import ModelConfig
from moe_rl.config import RunConfig
from moe_rl.plan import activations
from moe_rl.plan.activations import Kernels
from moe_rl.plan.cluster import Cluster
from moe_rl.plan.stages import Chunk, Stage, different, in_flight, stages
from moe_rl.plan.states import SIZES, StateMemory, States
from moe_rl.plan.workload import Workload
from parallel.config import ParallelConfig


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU of the stage `stage`. The first six stay throughout the run; of training (activations, logits) and
    generation (kv_cache, generation) one is there at a time."""

    stage: int
    weights: float
    gradients: float
    optimizer: float
    reference: float
    critic: float
    overhead: float
    activations: float
    logits: float
    kv_cache: float
    generation: float

    @property
    def stays(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.reference + self.critic + self.overhead

    @property
    def training(self) -> float:
        return self.activations + self.logits

    @property
    def rollout(self) -> float:
        return self.kv_cache + self.generation

    @property
    def total(self) -> float:
        return self.stays + max(self.training, self.rollout)

    def parts(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "stage"}


class MemoryModel:
    """Of one configuration on one kind of machine, in any layout."""

    def __init__(self, config: RunConfig, cluster: Cluster) -> None:
        self.config, self.model, self.cluster = config, config.model, cluster
        # Transformer Engine holds latent attention's down projections whole on every tensor rank
        self.policy = StateMemory(config.model, down_projections=False)
        untied = config.model.model_copy(update={"tie_embeddings": False})
        self.critic = StateMemory(untied, down_projections=False, values=True)
        self._stages: dict[tuple[int | None, ...], list[Stage]] = {}
        self.kernels = Kernels(fused=True, imbalance=cluster.imbalance)

    def of(self, parallel: ParallelConfig, work: Workload) -> Memory:
        """On the GPU that needs most."""
        depth = (parallel.pipeline, parallel.virtual_pipeline, parallel.first_stage_layers, parallel.last_stage_layers)
        if depth not in self._stages:
            self._stages[depth] = different(stages(self.model, parallel))
        return max((self.of_stage(parallel, stage, work) for stage in self._stages[depth]), key=lambda memory: memory.total)

    def of_stage(self, parallel: ParallelConfig, stage: Stage, work: Workload) -> Memory:
        mine, algorithm = self.policy.of(parallel, stage, self.cluster.world), self.config.algorithm
        reference = mine.weights if algorithm.kl_coefficient and not algorithm.reference_on_cpu else 0
        critic = self.critic.of(parallel, stage, self.cluster.world) if algorithm.trains_critic else States(0, 0, 0)
        last = stage.chunks[-1].last
        return Memory(
            stage=stage.index,
            weights=mine.weights,
            gradients=mine.gradients,
            optimizer=mine.optimizer,
            reference=reference,
            critic=critic.total,
            overhead=self.cluster.overhead,
            activations=self.activations(parallel, stage, work, self.model.recompute),
            logits=activations.logits(self.model, work.microbatch, parallel) if last else 0,
            kv_cache=kv_cache(self.model, stage, parallel, work),
            generation=self._generation(parallel, stage, work),
        )

    def activations(self, parallel: ParallelConfig, stage: Stage, work: Workload, recompute: str) -> float:
        """Of all microbatches that the stage has in flight. With recompute a layer's input stays, and one layer at a time has
        all of its activations."""
        tokens, passes = work.microbatch, in_flight(stage, parallel, work.microbatches)
        full = {is_moe: activations.layer(self.model, is_moe, tokens, parallel, self.kernels) for is_moe in (False, True)}

        def of_chunk(chunk: Chunk) -> float:
            if recompute == "full":
                return chunk.layers * activations.layer_input(self.model, tokens, parallel)
            return chunk.dense * full[False] + chunk.moe * full[True]

        # the chunks of a stage take turns: with a few passes in flight some chunks have one more than others
        chunks = [of_chunk(chunk) for chunk in stage.chunks]
        held = sum(sorted(chunks, reverse=True)[: passes % len(chunks)]) + passes // len(chunks) * sum(chunks)
        if recompute == "full":
            again = max(full[is_moe] for is_moe in (False, True) if any(_has(chunk, is_moe) for chunk in stage.chunks))
            held += again - activations.layer_input(self.model, tokens, parallel)
        if stage.chunks[-1].last:
            held += activations.head(self.model, tokens, parallel, self.kernels)
        return held

    def _generation(self, parallel: ParallelConfig, stage: Stage, work: Workload) -> float:
        """All prompts enter in one pass, a layer at a time; then logits of the next token over the whole vocabulary, and the
        float64 sums that a token is drawn by. With replay=r3 also the routes of every token."""
        is_moe = stage.moe > 0
        prefill = activations.layer(self.model, is_moe, work.rows * work.prompt, parallel, self.kernels)
        sampling = work.rows * self.model.padded_vocab_size * 32 if stage.chunks[-1].last else 0
        replay = self.config.replay
        wants = replay.mode == "r3" or (replay.mode == "filtered" and replay.source == "r3")
        routes = work.rows * work.longest * stage.moe * self.model.topk * (2 + 4 * (parallel.tensor > 1)) if wants else 0
        return max(prefill, sampling) + routes


def kv_cache(model: ModelConfig, stage: Stage, parallel: ParallelConfig, work: Workload) -> float:
    """Keys and values of every sequence at its longest, in every layer. Latent attention caches them expanded, a key and a
    value a head, not the latent vector that they are made from."""
    if model.latent:
        width = model.heads * (model.head_dim + model.rope_head_dim + (model.v_head_dim or 0))
    else:
        width = model.kv_heads * model.head_dim * 2
    return work.rows * work.longest * width // parallel.tensor * SIZES[model.dtype] * stage.layers


def _has(chunk: Chunk, is_moe: bool) -> bool:
    return bool(chunk.moe if is_moe else chunk.dense)
