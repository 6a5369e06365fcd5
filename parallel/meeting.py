"""Where the ranks of a run meet, and who has not come."""

import os
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from parallel.errors import UsageError
from parallel.launch import World, node_name

MEETING_SECONDS = 600.0  # nodes of one job may start minutes apart
_LOOK_SECONDS = (0.05, 2.0)  # the longer one has waited, the longer until one looks again: thousands may


def met(world: World, seconds: float, rendezvous: Path | None = None) -> Store:
    """The store of all ranks, after all have come to it. `rendezvous`: a file instead of MASTER_ADDR, for tests.

    Raises UsageError that names the ranks which did not come within `seconds`.
    """
    timeout = timedelta(seconds=seconds)
    if rendezvous is not None:
        return FileStore(str(rendezvous.absolute()), world.size)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun
    try:
        main = world.rank == 0 and not hosted
        tcp = TCPStore(address, port, world.size, main, timeout, wait_for_workers=False, multi_tenant=True)
    except dist.DistError as error:
        raise UsageError(
            f"MASTER_ADDR={address}, MASTER_PORT={port}: rank {world.rank} on {node_name()} does not reach rank 0 "
            f"there within {seconds:.0f} s: {str(error).splitlines()[0]}; look at that node, its name and its firewall"
        ) from error
    store = PrefixStore(f"moe_rl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", tcp)
    store.set(f"came/{world.rank}", "")
    if store.add("came", 1) == world.size:
        store.set("all", "")
    came, shortest, longest = time.monotonic(), *_LOOK_SECONDS
    while not store.check(["all"]):  # rather than wait inside the store, where no signal is heard
        waited = time.monotonic() - came
        if waited > seconds:
            absent = [str(rank) for rank in range(world.size) if not store.check([f"came/{rank}"])]
            raise UsageError(
                f"rank {', '.join(absent)} of {world.size} did not start within {seconds:.0f} s; look at what these ranks "
                "printed, and at their nodes"
            )
        time.sleep(min(longest, max(shortest, waited / 10), seconds))
    return store
