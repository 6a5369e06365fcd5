"""A run of one layout that goes on in another: its next step is the same. Weights, optimizer, schedule, reference."""

import shutil
from pathlib import Path

import pytest

from tests.distributed.layouts import LAYOUTS, assert_close
from tests.distributed.ranks import train_on_ranks
from tests.distributed.runs import Runs

pytestmark = pytest.mark.distributed

SHARED = [
    *("checkpoint.every=1", "checkpoint.keep=9", "optimizer.schedule=linear", "optimizer.decay_updates=12"),
    *("algorithm.kl_coefficient=0.1", "algorithm.kl_target=0.001", "algorithm.kl_horizon=50"),
]
OTHERS = {"one": 1, "DP2": 2, "TP2": 2, "PP2": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two steps in EP2, and from there the third in EP2 and in each of the others."""
    found = Runs(tmp_path_factory.mktemp("runs"))
    train_on_ranks(2, [found.config("EP2", *LAYOUTS["EP2"][1], *SHARED, "run.steps=2")])
    for name in OTHERS:
        copy = Path(shutil.copytree(found.folder / "EP2", found.folder / name)) / "config.yaml"
        copy.write_text(copy.read_text(encoding="utf-8").replace("name: EP2", f"name: {name}"), encoding="utf-8")
    for world in (1, 2):
        layouts = [name for name, size in OTHERS.items() if size == world] + (["EP2"] if world == 2 else [])
        train_on_ranks(world, [found.config(name, *LAYOUTS[name][1], *SHARED, "run.steps=3") for name in layouts])
    return found


@pytest.mark.parametrize("layout", OTHERS)
def test_the_next_step_is_that_of_the_layout_it_began_in(runs: Runs, layout: str) -> None:
    ours, wanted = runs.steps(layout), runs.steps("EP2")
    assert ours[:3] == wanted[:3] and len(ours) == len(wanted) == 4
    assert_close(ours[3], wanted[3])
    assert wanted[3]["optimizer/lr"] < wanted[1]["optimizer/lr"] and wanted[3]["kl/ref"] > 0
    assert "continuing after step 2" in (runs.folder / layout / "log.txt").read_text(encoding="utf-8")
