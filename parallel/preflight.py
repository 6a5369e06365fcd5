"""Before a model is built: does every rank answer, does every group work, is any node odd or slow."""

import importlib.metadata
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda.nccl import version as nccl_version

from parallel.alarm import Alarm
from parallel.errors import UsageError
from parallel.groups import Groups
from parallel.launch import node_name
from parallel.runtime import Runtime
from parallel.watchdog import ranks_text

TIMEOUT_SECONDS = 40.0  # for all of it; a node that needs longer is broken
_ROUNDS = 3
_SIZES = {"small": 1, "1 MB": 2**18}  # float32 numbers, at least one for each rank
_CLOCK_SECONDS = 2.0
_MEMORY_SHARE = 0.5
_SLOWER = 3.0


@dataclass(frozen=True)
class RankReport:
    """What a rank found out. Times in seconds, memory in GiB."""

    rank: int
    host: str
    pid: int
    device: str
    versions: dict[str, str]
    free: float
    total: float
    clock: float  # against rank 0; what lies within the error of measurement counts as 0
    compute: float  # of a fixed multiplication of matrices: the best of several
    link: float  # of 1 MB to and from another node: the best partner's; 0: there is one node
    times: dict[str, float]  # "tensor all_reduce small": the median


def preflight(
    groups: Groups, here: Runtime, seconds: float = TIMEOUT_SECONDS, host: str | None = None
) -> tuple[list[RankReport], list[str]]:
    """Every rank's report, and warnings, one line each (collective). host: this node's name, for tests.

    Raises UsageError, on all ranks, where they have different versions, and where a collective gives a wrong result. Where it
    is not done in time (seconds, at most), the processes end with code 2 and name the silent ranks or the stuck group.
    """
    host = host or node_name()
    alarm = Alarm(here, host, seconds)
    with alarm.armed():
        alarm.stage("first meeting of all ranks")
        clock = _clock(here)
        times: dict[str, float] = {}
        for name, group in _groups(groups):
            if dist.get_world_size(group) > 1:
                ranks = ranks_text(sorted(dist.get_process_group_ranks(group)))
                for size, numbers in _SIZES.items():
                    for operation, work in (("all_reduce", _sum), ("all_to_all", _exchange), ("send_recv", _ring)):
                        alarm.stage(f"{operation}, {size}, in the {name} group of {ranks}")
                        times[f"{name} {operation} {size}"] = _median(work, group, numbers, here, name)
        alarm.stage("links between nodes")
        hosts: list[Any] = [None] * here.world_size
        dist.all_gather_object(hosts, host)
        link = _link(hosts, here)
        alarm.stage("reports of all ranks")
        mine = RankReport(
            here.rank, host, os.getpid(), _device(here), _versions(), *_memory(here), clock, _compute(here), link, times
        )
        reports: list[Any] = [None] * here.world_size
        dist.all_gather_object(reports, mine)
    errors, warnings = verdicts(reports)
    if errors:
        raise UsageError(f"preflight: {'; '.join(errors)}")
    return reports, warnings


def verdicts(reports: Sequence[RankReport]) -> tuple[list[str], list[str]]:
    """What must not be (the ranks would compute different things), and what is odd."""
    errors, warnings = [], []
    for name in reports[0].versions:
        (usual, _), *_ = Counter(report.versions[name] for report in reports).most_common(1)
        errors += [
            f"rank {r.rank} on {r.host} has {name} {r.versions[name]}, most have {usual}"
            for r in reports
            if r.versions[name] != usual
        ][:8]
    middle = statistics.median(report.free for report in reports)
    for r in reports:
        if abs(r.clock) > _CLOCK_SECONDS:
            warnings.append(f"rank {r.rank} on {r.host}: its clock is {r.clock:+.1f} s off rank 0's")
        if r.free < _MEMORY_SHARE * middle:
            warnings.append(
                f"rank {r.rank} on {r.host}: {r.free:.1f} of {r.total:.1f} GiB of {r.device} free, {middle:.1f} on most ranks"
            )
    for what, of in (("computes", lambda r: r.compute), ("exchanges 1 MB with its best partner", lambda r: r.link)):
        hosts = {host: statistics.median(of(r) for r in reports if r.host == host) for host in {r.host for r in reports}}
        usual = statistics.median_low(hosts.values())
        for host, seconds in sorted(hosts.items()):
            if seconds > _SLOWER * usual > 0:
                warnings.append(f"{host} is slow: it {what} in {1e3 * seconds:.1f} ms, most nodes in {1e3 * usual:.1f} ms")
    return errors, warnings


def _groups(groups: Groups) -> list[tuple[str, Any]]:
    axes = ("tensor", "pipeline", "data", "expert", "dispatch", "model")
    return [*((name, getattr(groups, name).group) for name in axes), ("world", dist.group.WORLD)]


def _median(
    work: Callable[[Any, int, Runtime], tuple[Tensor, Tensor]], group: Any, numbers: int, here: Runtime, name: str
) -> float:
    """Seconds of one round. The first one makes the connections."""
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        got, wanted = work(group, numbers, here)
        _wait_for_device(here)
        seconds.append(time.perf_counter() - start)
        if not torch.equal(got, wanted):
            ranks = ranks_text(sorted(dist.get_process_group_ranks(group)))
            raise UsageError(
                f"preflight: {work.__name__.strip('_')} in the {name} group of {ranks} came out wrong at rank {here.rank} on "
                f"{node_name()}; leave that node out of the job"
            )
    return statistics.median(seconds)


def _sum(group: Any, numbers: int, here: Runtime) -> tuple[Tensor, Tensor]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    values = torch.full((numbers,), rank + 1.0, device=here.device)
    dist.all_reduce(values, group=group)
    return values, torch.full_like(values, size * (size + 1) / 2)


def _exchange(group: Any, numbers: int, here: Runtime) -> tuple[Tensor, Tensor]:
    """Rank i sends i * size + j to rank j."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    each, ranks = max(1, numbers // size), torch.arange(size, dtype=torch.float32, device=here.device)
    sent, got = (rank * size + ranks).repeat_interleave(each), torch.empty(each * size, device=here.device)
    dist.all_to_all_single(got, sent, group=group)
    return got, (ranks * size + rank).repeat_interleave(each)


def _ring(group: Any, numbers: int, here: Runtime, shift: int = 1) -> tuple[Tensor, Tensor]:
    """To the rank that is `shift` further on, from the one that is as much before."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    to, source = (rank + shift) % size, (rank - shift) % size
    sent, got = torch.full((numbers,), float(rank), device=here.device), torch.empty(numbers, device=here.device)
    operations = [
        dist.P2POp(dist.isend, sent, dist.get_global_rank(group, to), group),
        dist.P2POp(dist.irecv, got, dist.get_global_rank(group, source), group),
    ]
    for one in dist.batch_isend_irecv(operations):
        one.wait()
    return got, torch.full_like(got, float(source))


def _link(hosts: Sequence[str], here: Runtime) -> float:
    """The best of several partners': a slow node slows those that it talks to, but not all of them have it for a partner."""
    local = hosts.count(hosts[0])
    nodes, best = len(set(hosts)), float("inf")
    for step in range(1, min(nodes, 4)):
        seconds = []
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            _ring(dist.group.WORLD, _SIZES["1 MB"], here, step * local)
            _wait_for_device(here)
            seconds.append(time.perf_counter() - start)
        best = min(best, statistics.median(seconds))
    return best if nodes > 1 else 0.0


def _clock(here: Runtime) -> float:
    """This rank's clock against rank 0's, by the moment when a barrier lets all go: no better known than that took."""
    left, took = [], []
    for _ in range(_ROUNDS):
        before = time.perf_counter()
        dist.barrier()
        left.append(time.time())
        took.append(time.perf_counter() - before)
    seen = torch.tensor([left, took], dtype=torch.float64, device=here.device)
    main = seen.clone()
    dist.broadcast(main, 0)
    offset, error = min(
        ((mine - theirs, max(a, b)) for mine, theirs, a, b in zip(left, main[0].tolist(), took, main[1].tolist(), strict=True)),
        key=lambda one: one[1],
    )
    return offset if abs(offset) > error else 0.0


def _compute(here: Runtime) -> float:
    size = 4096 if here.device.type == "cuda" else 256
    values, seconds = torch.ones(size, size, device=here.device), []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        torch.matmul(values, values)
        _wait_for_device(here)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _wait_for_device(here: Runtime) -> None:
    if here.device.type == "cuda":
        torch.cuda.synchronize()


def _device(here: Runtime) -> str:
    return torch.cuda.get_device_name(here.device) if here.device.type == "cuda" else "CPU"


def _memory(here: Runtime) -> tuple[float, float]:
    if here.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(here.device)
    else:
        memory = psutil.virtual_memory()
        free, total = memory.available, memory.total
    return free / 2**30, total / 2**30


def _versions() -> dict[str, str]:
    nccl = ".".join(map(str, nccl_version())) if torch.cuda.is_available() else "none"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": importlib.metadata.version("megatron-core"),
        "CUDA": str(torch.version.cuda),
        "NCCL": nccl,
    }
