"""`moe-rl plan` as a user meets it: what it prints, writes, refuses and returns; and the large configurations."""

import json
import re
from pathlib import Path

import pytest

from moe_rl import cli
from moe_rl.config import check, load
from moe_rl.plan import planner
from moe_rl.plan.cluster import GIB, Cluster
from moe_rl.plan.planner import Plan
from parallel.config import ParallelConfig

ROOT = Path(__file__).parents[2]
LARGE = sorted((ROOT / "configs" / "large").glob("*.yaml"))
QUICK = str(ROOT / "configs" / "quickstart.yaml")
ON_8 = ["--nodes", "1", "--gpus-per-node", "8"]


def test_the_best_layout_is_a_section_that_a_file_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "plans.json"
    assert cli.main(["plan", QUICK, *ON_8, "--json", str(found), "model.layers=5"]) == 0
    shown = capsys.readouterr().out
    assert "yours: the parallel: of the file fits" in shown
    block = re.search(r"^parallel:.*?(?=\n\n|\Z)", shown, re.DOTALL | re.MULTILINE)
    assert block is not None
    pasted = tmp_path / "run.yaml"
    pasted.write_text("model: {preset: tiny_moe, layers: 5}\n" + block[0])
    config = load(pasted)
    check(config, 8)
    plans = json.loads(found.read_text())
    best = plans["plans"][0]
    assert ParallelConfig.model_validate(best["parallel"]) == config.parallel and best["fits"]
    memory = best["memory"]
    total = f"{memory['total'] / GIB:.2f}  in all, of 80"
    assert total in shown and plans["gpu_memory"] == 80 * GIB
    rows = re.findall(r"^ +\d+ ", shown, re.MULTILINE)
    assert len(rows) == min(10, len(plans["plans"]))


def test_all_and_top(capsys: pytest.CaptureFixture[str]) -> None:
    def rows(*options: str) -> int:
        assert cli.main(["plan", QUICK, *ON_8, *options]) == 0
        return len(re.findall(r"^ +\d+ +\d+ ", capsys.readouterr().out, re.MULTILINE))

    assert rows("--top", "3") == 3
    assert rows("--all") > 10


def test_overrides_and_an_impossible_layout_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", QUICK, *ON_8, "parallel.expert=3"]) == 0
    shown = capsys.readouterr().out
    assert "yours: not possible on this cluster: parallel.expert=3: must divide model.experts=8; choose a divisor of 8" in shown


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """A script learns of it by the exit code; a person, what is short and what would do."""
    large = ["model={preset: deepseek_v3}", "rollout.max_batch=8", "algorithm.microbatch_tokens=1024"]
    assert cli.main(["plan", QUICK, *ON_8, *large, "parallel.expert=1"]) == 1
    shown = capsys.readouterr().out
    short = re.search(r"nothing fits: the layout that needs least is ([\d.]+) GiB short \(GiB: optimizer ([\d.]+)", shown)
    assert short is not None and float(short[1]) > 1000 and float(short[2]) > 500
    assert re.search(r"it would fit on \d+ nodes, with parallel\.\w+=.*; needs less memory: model.recompute=full", shown)
    assert cli.main(["plan", QUICK, *ON_8, "--gpu-memory", "6"]) == 1
    assert "more nodes alone would not do, up to 1024; needs less memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nodes", "0", "--gpus-per-node", "8"], "argument --nodes: 0: must be an integer of at least 1"),
        (["--nodes", "2"], "the following arguments are required: --gpus-per-node"),
        ([*ON_8, "--gpu-memory", "-1"], "argument --gpu-memory: -1: must be a number above 0"),
        ([*ON_8, "--gpu-memory", "nan"], "argument --gpu-memory: nan: must be a number above 0"),
        ([*ON_8, "--imbalance", "0.5"], "argument --imbalance: 0.5: must be a number of at least 1"),
        ([*ON_8, "model.topk=9"], "model.topk=9: must be at most model.experts=8"),
        ([*ON_8, "model.layrs=9"], "unknown key model.layrs; did you mean model.layers?"),
        ([*ON_8, "--json", "/no/such/folder/x.json"], "--json=/no/such/folder/x.json: cannot be written: No such file"),
    ],
)
def test_bad_input_ends_with_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", QUICK, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"moe-rl: error: {text}") and shown.err.count("\n") == 1


def test_there_is_one_of_each_model_and_algorithm() -> None:
    models = "olmoe_1b_7b gpt_oss_20b deepseek_v2_lite qwen3_30b_a3b mixtral_8x7b gpt_oss_120b qwen3_235b_a22b deepseek_v3"
    assert {path.stem for path in LARGE} == {f"{model}_{way}" for model in models.split() for way in ("grpo_r3", "gspo")}


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_a_large_configuration_fits_the_cluster_that_it_names(path: Path) -> None:
    """With 5 GiB left over; its layout is the planner's choice for that much, or as good."""
    text, config = path.read_text(), load(path)
    named = re.search(rf"moe-rl plan configs/large/{path.name} --nodes (\d+) --gpus-per-node 8\n", text)
    assert named is not None and f"on {named[1]} node" in text
    cluster = Cluster(int(named[1]), 8, memory=75 * GIB)
    planned = planner.make(config, cluster)
    yours, best = planned.yours, planned.best
    assert isinstance(yours, Plan) and best is not None
    assert yours.fits and yours.cost.seconds <= 1.02 * best.cost.seconds
    assert config.run.name == path.stem and path.stem.startswith(f"{config.model.preset}_")
    grpo = path.stem.endswith("grpo_r3")
    assert (config.algorithm.name, config.replay.mode) == (("grpo", "r3") if grpo else ("gspo", "off"))
