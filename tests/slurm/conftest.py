"""The cluster that jobs are submitted to: that of SLURM_CONF where it is a sandbox, else one started for these tests."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, is_sandbox, sandbox, skip_without


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    conf = os.environ.get("SLURM_CONF", "")
    if is_sandbox(conf):
        yield Cluster(Path(conf))
        return
    skip_without()
    with tempfile.TemporaryDirectory(prefix="moe-rl-slurm-") as folder:  # short: a socket's path has 107 characters at most
        yield from sandbox(Path(folder))
