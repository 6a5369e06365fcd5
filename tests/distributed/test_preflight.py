"""The preflight: what it finds, in real processes; what it makes of it, by hand."""

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from parallel import preflight as module
from parallel.config import ParallelConfig
from parallel.failures import recorded, report_errors
from parallel.groups import process_groups
from parallel.preflight import RankReport, preflight, verdicts
from parallel.runtime import Runtime, started
from tests.distributed.ranks import place, run_on_ranks

VERSIONS = {"torch": "2.13", "NCCL": "2.27"}


def report(rank: int, host: str, **found: Any) -> RankReport:
    usual = RankReport(rank, host, 100 + rank, "H200", VERSIONS, 138.0, 140.0, 0.0, 0.001, 0.002, {})
    return replace(usual, **found)


def four(**found: Any) -> list[RankReport]:
    """Of four nodes with a rank each; `found` on the third."""
    return [report(rank, f"node{rank}", **(found if rank == 2 else {})) for rank in range(4)]


@pytest.mark.parametrize(
    ("found", "error", "warning"),
    [
        ({}, [], []),
        ({"versions": {"torch": "2.12", "NCCL": "2.27"}}, ["rank 2 on node2 has torch 2.12, most have 2.13"], []),
        ({"clock": -3.25}, [], ["rank 2 on node2: its clock is -3.2 s off rank 0's"]),
        ({"clock": 1.9}, [], []),
        ({"free": 60.0}, [], ["rank 2 on node2: 60.0 of 140.0 GiB of H200 free, 138.0 on most ranks"]),
        ({"compute": 0.0031}, [], ["node2 is slow: it computes in 3.1 ms, most nodes in 1.0 ms"]),
        ({"link": 0.007}, [], ["node2 is slow: it exchanges 1 MB with its best partner in 7.0 ms, most nodes in 2.0 ms"]),
        ({"link": 0.0059}, [], []),
    ],
)
def test_verdicts(found: dict[str, Any], error: list[str], warning: list[str]) -> None:
    assert verdicts(four(**found)) == (error, warning)


def looked_at(runtime: Runtime) -> tuple[list[RankReport], list[str], float]:
    with process_groups(ParallelConfig(tensor=2)) as groups:
        preflight(groups, runtime, host=f"node{runtime.rank // 2}")
        start = time.perf_counter()
        return *preflight(groups, runtime, host=f"node{runtime.rank // 2}"), time.perf_counter() - start


@pytest.mark.distributed
@pytest.mark.alone
def test_every_group_of_four_ranks_on_two_nodes() -> None:
    found = run_on_ranks(looked_at, 4)
    reports = found[0][0]
    print(f"{max(seconds for *_, seconds in found):.2f} s")
    assert [one.rank for one in reports] == [0, 1, 2, 3] and [one.host for one in reports] == [
        "node0",
        "node0",
        "node1",
        "node1",
    ]
    assert all(one[0] == reports for one in found)
    operations = [f"{name} {size}" for size in ("small", "1 MB") for name in ("all_reduce", "all_to_all", "send_recv")]
    wanted = {f"{group} {operation}" for group in ("tensor", "data", "model", "world") for operation in operations}
    assert all(set(one.times) == wanted and min(one.times.values()) > 0 for one in reports)
    assert all(one.link > 0 and one.clock == 0 and 0 < one.free <= one.total for one in reports)
    assert len({one.pid for one in reports}) == 4


def wrong_on_rank_1(runtime: Runtime) -> None:
    real = dist.all_reduce

    def broken(values: Any, *args: Any, **settings: Any) -> None:
        real(values, *args, **settings)
        values[-1] += runtime.rank == 1 and values.numel() > 1000  # one number of 1 MB

    module.dist.all_reduce = broken
    with process_groups(ParallelConfig()) as groups:
        preflight(groups, runtime)


@pytest.mark.distributed
@pytest.mark.alone
def test_a_wrong_result_is_found(tmp_path: Path) -> None:
    _, words, _ = ends(tmp_path, wrong_on_rank_1)
    assert words[0].startswith("preflight: sum in the data group of ranks 0-1 came out wrong at rank 1 on ")


@pytest.mark.distributed
@pytest.mark.alone
def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    codes, words, seconds = ends(tmp_path, absent_on_rank_1)
    assert codes[0] == 2 and seconds < 3 + 2 + 8
    (word,) = words
    assert word.startswith("preflight: not done after 3 s: rank 1 silent (rank 1: has not come to the preflight); look at")


@pytest.mark.distributed
@pytest.mark.alone
def test_a_rank_that_is_stuck_within_is_named(tmp_path: Path) -> None:
    codes, words, _ = ends(tmp_path, stuck_on_rank_1)
    # rank 0 may hear its connection break as rank 1 ends, before it has decided itself: the cause is the first word
    assert codes[1] == 2 and codes[0] in (1, 2)
    assert words[0].startswith("preflight: not done after 3 s: does not get beyond rank 1: ")
    assert ": all_to_all, small, in the data group of ranks 0-1, in <lambda> (test_preflight.py:" in words[0]


def absent_on_rank_1(runtime: Runtime) -> None:
    with process_groups(ParallelConfig()) as groups:
        if runtime.rank == 1:
            time.sleep(30)
        preflight(groups, runtime, seconds=3)


def stuck_on_rank_1(runtime: Runtime) -> None:
    real = module.dist.all_to_all_single
    if runtime.rank == 1:
        module.dist.all_to_all_single = lambda *args, **settings: (time.sleep(60), real(*args, **settings))
    with process_groups(ParallelConfig()) as groups:
        preflight(groups, runtime, seconds=3)


def as_rank(rank: int, folder: Path, body: Callable[[Runtime], None]) -> None:
    place(rank, 2)
    os.environ["MOE_RL_ERROR_DIR"] = str(folder)
    with report_errors(), started(0, 1, 60.0, rendezvous=folder / "meet") as here:
        (folder / f"{rank}.up").touch()
        body(here)


def ends(folder: Path, body: Callable[[Runtime], None]) -> tuple[list[int | None], list[str], float]:
    """Exit codes of two ranks, the second killed once the first has ended; what they said, the cause first; seconds."""
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=as_rank, args=(rank, folder, body), daemon=True) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + 120
    while not all((folder / f"{rank}.up").exists() for rank in (0, 1)) and time.monotonic() < deadline:
        time.sleep(0.02)
    began = time.monotonic()
    ranks[0].join(60)
    seconds = time.monotonic() - began
    ranks[1].join(3)
    ranks[1].kill()
    ranks[1].join()
    return [rank.exitcode for rank in ranks], [w.message for w in sorted(recorded(folder), key=lambda one: one.time)], seconds
