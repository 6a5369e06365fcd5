"""Layouts of a configuration on a cluster, with their memory and cost, best first."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moe_rl import config as configuration
from moe_rl.config import RunConfig
from moe_rl.plan.cluster import Cluster
from moe_rl.plan.cost import Cost, CostModel
from moe_rl.plan.layouts import layouts
from moe_rl.plan.memory import Memory, MemoryModel
from moe_rl.plan.workload import Workload, workload
from parallel.config import ParallelConfig
from parallel.errors import UsageError


@dataclass(frozen=True)
class Plan:
    """One layout. fits: what its fullest GPU needs is there."""

    parallel: ParallelConfig
    work: Workload
    memory: Memory
    cost: Cost
    fits: bool

    @property
    def order(self) -> tuple[bool, float, float]:
        """What fits first, by estimated time; then what lacks least memory."""
        return (not self.fits, self.cost.seconds if self.fits else self.memory.total, self.memory.total)


@dataclass(frozen=True)
class Planned:
    """plans: every legal layout, best first. yours: the configuration's own, or why it cannot be."""

    config: RunConfig
    cluster: Cluster
    plans: list[Plan]
    yours: Plan | str

    @property
    def best(self) -> Plan | None:
        return self.plans[0] if self.plans and self.plans[0].fits else None


class Planner:
    """Makes plans of one configuration for one cluster."""

    def __init__(self, config: RunConfig, cluster: Cluster) -> None:
        self.config, self.cluster = config, cluster
        self.memory, self.cost = MemoryModel(config, cluster), CostModel(config, cluster)

    def plan(self, parallel: ParallelConfig) -> Plan:
        work = workload(self.config, parallel, self.cluster.world, self.cluster.prompt_tokens)
        memory = self.memory.of(parallel, work)
        return Plan(parallel, work, memory, self.cost.of(parallel, work), memory.total <= self.cluster.memory)

    def all(self) -> Iterator[Plan]:
        return (self.plan(parallel) for parallel in layouts(self.config.model, self.cluster, self.config.parallel))

    def yours(self) -> Plan | str:
        try:
            configuration.check(self.config, self.cluster.world)
            self.config.parallel.check_backend("nccl", transformer_engine=True)
        except UsageError as error:
            return str(error)
        return self.plan(self.config.parallel)


def make(config: RunConfig, cluster: Cluster) -> Planned:
    planner = Planner(config, cluster)
    return Planned(config, cluster, sorted(planner.all(), key=lambda plan: plan.order), planner.yours())


def fewest_nodes(config: RunConfig, cluster: Cluster, most: int = 1024) -> tuple[int, Plan] | None:
    """The fewest nodes on which a layout fits, and the best there; of more nodes than the cluster has, powers of 2 and 3/2 of
    them are tried."""
    sizes = sorted({n for power in range(11) for n in (2**power, 3 * 2**power // 2)})
    for nodes in sizes:
        if cluster.nodes < nodes <= most:
            fitting = [plan for plan in Planner(config, replace(cluster, nodes=nodes)).all() if plan.fits]
            if fitting:
                return nodes, min(fitting, key=lambda plan: plan.order)
    return None
