"""`moe-rl drift` and `moe-rl report` on run directories: what they say, write and refuse, without torch."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_rl import cli, config_errors
from moe_rl.config import RunConfig
from moe_rl.drift import hints
from moe_rl.drift.history import DriftKey, History, parse
from moe_rl.drift.runs import load
from moe_rl.report import curves, overview, routing
from moe_rl.report.figure import styles
from moe_rl.report.series import smooth, thin
from tests.synthetic import make_run

ROOT = Path(__file__).parents[2]
RATE = "drift/update/expert_change_rate"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def small(directory: Path, lines: list[dict[str, float | None]]) -> Path:
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


@pytest.mark.parametrize(
    ("key", "parsed"),
    [
        ("drift/update/expert_change_rate/layer_03", DriftKey("update", "", "expert_change_rate", "layer", 3)),
        (
            "drift/update/free/flip_rate/layer_103/minibatch_12",
            DriftKey("update", "free", "flip_rate", "layer", 103, 12),
        ),
        ("drift/engine/prompt/jaccard/worst", DriftKey("engine", "prompt", "jaccard", "worst")),
        ("drift/update/local/router_kl/mean/minibatch_0", DriftKey("update", "local", "router_kl", "mean", None, 0)),
        ("drift/update/any_layer_flip_rate/minibatch_1", DriftKey("update", "", "any_layer_flip_rate", "", None, 1)),
        ("drift/load/load_entropy/mean", DriftKey("load", "", "load_entropy", "mean")),
        ("drift/probe/logprob_shift", DriftKey("probe", "", "logprob_shift", "")),
        ("drift/other/flip_rate/mean", None),
        ("reward/mean", None),
    ],
)
def test_keys(key: str, parsed: DriftKey | None) -> None:
    assert parse(key) == parsed


def test_history_by_hand() -> None:
    lines: list[dict[str, float | None]] = [
        {"step": 1, f"{RATE}/layer_00": 0.1, f"{RATE}/layer_02": 0.5, "alarm/entropy": 1.0},
        {"step": 2, f"{RATE}/layer_00": 0.3, f"{RATE}/layer_02": None, f"{RATE}/layer_00/minibatch_1": 0.7},
        {"step": 4, f"{RATE}/layer_00": 0.5, "alarm/entropy": 0.0, "alarm/reward": 1.0},
    ]
    history = History(lines)
    assert history.steps == [1, 2, 4]
    assert history.series(f"{RATE}/layer_02") == [0.5, None, None]
    assert history.recent(f"{RATE}/layer_00", 2) == pytest.approx(0.4)  # of the last two that have it
    assert history.layers("update", "", "expert_change_rate") == [0, 2]
    assert history.minibatches("update", "", "expert_change_rate") == [1]
    assert history.worst("update", "", "expert_change_rate", 2) == (2, 0.5)
    # there is no key `mean`: the mean of the layers 0.4 and 0.5
    assert history.over_layers("update", "", "expert_change_rate", None, 2) == pytest.approx(0.45)
    assert history.alarms() == {"entropy": [1], "reward": [4]}
    assert history.views() == [("update", "")]
    assert History([]).alarms() == {} and History([]).views() == []


def test_thinning_and_smoothing() -> None:
    steps, found, width = thin([1, 2, 3, 4, 5], [[1, 3, None, None, 9], [None, 2, 4, None, 1]], most=3)
    assert (steps, found, width) == ([2, 4, 5], [[2, None, 9], [2, 4, 1]], 2)
    assert thin([1, 2], [[1.0, 2.0]], most=5) == ([1, 2], [[1.0, 2.0]], 1)
    assert smooth([1, 3, None, 5, 7], window=2) == [1, 2, None, 4, 6]


def test_tables_and_files_of_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "one", steps=20, traced=2)
    assert cli.main(["drift", str(run), "--last", "5"]) == 0
    text = capsys.readouterr().out
    assert f"{run}, gspo, replay off, 4 MoE layers, 2 of 8 experts, 21 steps of metrics" in text
    assert "traces: 2 files, steps 1 to 20, 384 tokens" in text
    assert "update: expert change rate by layer and minibatch, last 5 steps" in text
    for title in ("flips against margin", "share that is clipped", "correlation of flips with |log r|"):
        assert title in text
    assert "lacks" not in text  # everything that this run can have is there
    names = {"alarms", "clipping", "correlations", "layers", "load", "log_ratios", "margins", "steps", "trace_layers"}
    assert {path.stem for path in (run / "drift").iterdir()} == names - {"alarms"}  # none fired

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (cell,) = [
        row
        for row in rows(run / "drift" / "layers.csv")
        if (row["comparison"], row["view"], row["metric"], row["layer"], row["minibatch"])
        == ("update", "", "expert_change_rate", "5", "3")
    ]
    expected = sum(line[f"{RATE}/layer_05/minibatch_3"] for line in lines[-5:]) / 5
    assert float(cell["value"]) == pytest.approx(expected)
    assert f"{expected:.4f}" in text
    # every response token goes to 2 experts: 9 of the 12 places of 16 sequences in 2 files predict one
    load = [row for row in rows(run / "drift" / "load.csv") if row["layer"] == "5"]
    assert len(load) == 8 and sum(int(row["tokens"]) for row in load) == 2 * 9 * 16 * 2
    assert sum(int(row["steady"]) + int(row["flipped"]) for row in rows(run / "drift" / "log_ratios.csv")) == 9 * 16 * 2
    assert sum(int(row["pairs"]) for row in rows(run / "drift" / "margins.csv")) == 9 * 16 * 2 * 4


def test_several_runs_are_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = small(tmp_path / "quiet", [{"step": 1, f"{RATE}/layer_00": 0.125, f"{RATE}/layer_00/minibatch_1": 0.25}])
    loud = small(tmp_path / "loud", [{"step": 1, f"{RATE}/layer_00": 0.5, "alarm/entropy": 1.0}])
    assert cli.main(["drift", str(quiet), str(loud)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["layer", "quiet", "loud"] in lines
    assert ["00", "0.1250", "0.5000"] in lines
    assert ["1", "0.2500", "-"] in lines  # minibatch 1
    assert ["entropy", "-", "1", "(first:", "step", "1)"] in lines
    assert rows(loud / "drift" / "alarms.csv") == [{"step": "1", "rule": "entropy"}]


def test_under_replay_the_page_shows_what_routers_would_choose(tmp_path: Path) -> None:
    """Replay was switched on after step 1: from then on the routes used agree by force, and 0 would say nothing."""
    local = RATE.replace("update/", "update/local/")
    lines: list[dict[str, float | None]] = [
        {"step": 1, f"{RATE}/mean": 0.5, f"{RATE}/layer_00": 0.5, f"{RATE}/mean/minibatch_1": 0.5},
        {"step": 2, f"{RATE}/mean": 0.0, f"{RATE}/layer_00": 0.0, f"{RATE}/mean/minibatch_1": 0.0, f"{local}/mean": 0.25},
    ]
    lines[1] |= {f"{local}/layer_00": 0.25, f"{local}/mean/minibatch_1": 0.25, f"{local}/layer_00/minibatch_1": 0.25}
    runs = load([small(tmp_path / "one", lines), small(tmp_path / "off", lines[:1])])
    looks = styles(2)
    curve = next(curve for curve in curves.DRIFT if curve.title == "Expert change rate")
    (chart,) = curves.charts([curve], runs, looks)
    assert [trace["y"] for trace in chart.panels[0].data] == [[0.5, 0.25], [0.5]]
    assert [trace["y"] for trace in routing.by_minibatch(runs, looks).panels[0].data] == [[0.25], [0.5]]
    shown = dict(overview.results(runs))
    assert shown["expert change rate, mean over layers (under replay: local)"] == ["0.2500", "0.5000"]
    assert shown["layer that changes most"] == ["layer 00: 0.2500", "layer 00: 0.5000"]


def test_runs_of_one_name_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [small(tmp_path / folder / "run", [{"step": 1, f"{RATE}/layer_00": 0.5}]) for folder in "ab"]
    assert cli.main(["drift", *map(str, paths)]) == 0
    assert "b/run lacks" in capsys.readouterr().out
    assert cli.main(["drift", str(paths[0]), str(paths[0])]) == 2
    assert "given twice" in capsys.readouterr().err


def test_metrics_alone_and_traces_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = small(tmp_path / "bare", [{"step": 1, "attribution/flip_rate/margin_0": 0.5, "attribution/flip_rate/margin_1": 0.1}])
    assert cli.main(["drift", str(bare)]) == 0
    text = capsys.readouterr().out
    (lacks,) = [line for line in text.splitlines() if "lacks" in line]
    assert "update, update/prompt: drift.enabled=true" in lacks
    assert "drift.trace_every=N" in lacks and "drift.probe_every=N" in lacks
    assert [row["flip_rate"] for row in rows(bare / "drift" / "margins.csv")] == ["0.5", "0.1"]

    traced = make_run(tmp_path / "traced", traced=2)
    (traced / "metrics.jsonl").unlink()
    assert cli.main(["drift", str(traced)]) == 0
    text = capsys.readouterr().out
    assert "update by layer, from all traces" in text and "load by layer, from all traces" in text
    assert "traced lacks drift over the steps, alarms: `moe-rl train` writes metrics.jsonl" in text
    assert (traced / "drift" / "trace_layers.csv").exists() and not (traced / "drift" / "steps.csv").exists()


def test_a_broken_trace_is_named_and_the_rest_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "one", traced=3)
    broken = sorted((run / "traces").iterdir())[1]
    broken.write_bytes(broken.read_bytes()[:100])
    for command in ("drift", "report"):
        assert cli.main([command, str(run)]) == 0
        assert f"skipped {broken}: cut short" in capsys.readouterr().out
    assert f"skipped {broken}: cut short" in (run / "report.html").read_text()


def test_megatrons_router_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"step": 0, "block": "decoder", "rank": 0, "topk": 2}
    for rank, layers, ids in ((0, (0, 1), [[0, 1], [0, 2]]), (1, (0, 1), [[0, 3]]), (2, (0,), [[0, 1]])):
        lines = [json.dumps(record | {"layer": layer, "top_indices": ids}) for layer in layers]
        (tmp_path / f"router_trace_rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
    assert cli.main(["drift", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "Megatron-Core router traces: 2 files" in text and "pair nothing" in text
    assert "router_trace_rank2.jsonl: of other layers" in text
    load = [int(row["tokens"]) for row in rows(tmp_path / "drift" / "load.csv") if row["layer"] == "1"]
    assert load == [3, 1, 1, 1]
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "Load by layer and expert" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("command", ["drift", "report"])
@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("nowhere", None, "nowhere: no such run; "),
        ("file", "x", "file: is a file; give the run directory"),
        ("empty/x", "", "empty: an empty run; it holds none of metrics.jsonl"),
        ("broken/metrics.jsonl", '{"step": 1}\n{"step"\n{"step": 3}\n', "metrics.jsonl:2: is not a JSON object"),
        ("list/metrics.jsonl", "[1]\n", "metrics.jsonl:1: is no step"),
        ("nostep/metrics.jsonl", '{"reward/mean": 1}\n', "metrics.jsonl:1: is no step"),
        (
            "text/metrics.jsonl",
            '{"step": 1, "reward/mean": "high"}\n',
            "metrics.jsonl:1: reward/mean is 'high': must be a number",
        ),
        ("trace/traces/step_000001.parquet", "PAR1", "step_000001.parquet: cut short or no Parquet file"),
        ("yaml/config.yaml", "run: [\n", "yaml: an empty run"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, name: str, content: str | None, says: str
) -> None:
    small(tmp_path / "beside", [{"step": 1}])
    if content is not None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert cli.main([command, str(tmp_path / name.split("/")[0])]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("moe-rl: error: ") and printed.err.count("\n") == 1
    assert says in printed.err
    assert printed.out == ""


def test_numbers_that_are_not_finite_are_missing_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small(tmp_path / "one", [{"step": 1, "reward/mean": float("nan"), f"{RATE}/layer_00": float("inf")}, {"step": 2}])
    assert "NaN" in (run / "metrics.jsonl").read_text()
    for command in ("drift", "report"):
        assert cli.main([command, str(run)]) == 0
    assert capsys.readouterr().err == ""
    assert load([run])[0].history.series("reward/mean") == [None, None]


def test_settings_that_are_no_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small(tmp_path / "one", [{"step": 1}])
    (run / "config.yaml").write_text("run: [\n")
    assert cli.main(["drift", str(run)]) == 2
    assert "config.yaml:2: not valid YAML" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5"])
def test_last_must_be_a_number_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str) -> None:
    assert cli.main(["drift", str(tmp_path), f"--last={value}"]) == 2
    assert f"{value}: must be an integer of at least 1" in capsys.readouterr().err


def test_where_a_page_cannot_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small(tmp_path / "one", [{"step": 1, "reward/mean": 0.5}])
    assert cli.main(["report", str(run), "--output", str(tmp_path / "no" / "page.html")]) == 2
    assert "page.html: cannot be written: No such file or directory" in capsys.readouterr().err


def test_a_page_is_whole_and_names_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "<b>&co", steps=20, traced=1)
    assert cli.main(["report", str(run)]) == 0
    assert f"written: {run / 'report.html'} (" in capsys.readouterr().out
    page = (run / "report.html").read_text()
    size = len(page)
    assert 4.5e6 < size < 6e6
    ours, library, last = page.split("<script>")  # plotly.js holds words of its own
    assert library.startswith("/**\n* plotly.js v")
    for text in (ours, last):
        assert "<b>&co" not in text and "src=" not in text and "http" not in text.replace("http-equiv", "")
    assert "&lt;b&gt;&amp;co" in ours


def test_neither_command_loads_torch_or_megatron(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", steps=3, traced=1)
    shutil.rmtree(tmp_path / "one" / "drift", ignore_errors=True)
    code = f"""
import sys
from moe_rl import cli, config_errors
from moe_rl.config import RunConfig
from moe_rl.drift import hints
assert cli.main(["drift", {str(run)!r}]) == 0 and cli.main(["report", {str(run)!r}]) == 0
print("loaded:", [name for name in ("torch", "megatron", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("loaded: []\n")


def test_every_setting_that_is_recommended_exists() -> None:
    named = {name for value in vars(hints).values() if isinstance(value, str) for name in re.findall(r"\w+\.\w+(?==)", value)}
    assert named >= {"drift.enabled", "drift.trace_every", "drift.scores_share", "drift.probe_every", "replay.mode"}
    for name in named:
        assert config_errors.holds_one_value(RunConfig, name.split(".")), name


def test_the_evaluation_after_the_last_step_closes_the_curve(tmp_path: Path) -> None:
    run = small(tmp_path / "a", [{"step": 0, "eval/pass_at_1": 0.25}, {"step": 1, "reward/mean": 0.5}])
    (run / "summary.json").write_text('{"step": 1, "eval/pass_at_1": 0.75}')
    (found,) = load([run])
    assert [line.get("eval/pass_at_1") for line in found.history.lines] == [0.25, 0.75]
    (run / "summary.json").write_text('{"step": 1, "eval')
    assert [line.get("eval/pass_at_1") for line in load([run])[0].history.lines] == [0.25, None]


def test_the_page_gives_pass_at_1_its_standard_error_and_shows_what_eval_found(tmp_path: Path) -> None:
    first = {"step": 0, "eval/pass_at_1": 0.25, "eval/pass_at_1_stderr": 0.0315}
    run = small(tmp_path / "a", [first, {"step": 1, "reward/mean": 0.5, "eval/pass_at_1": 0.75}])
    (run / "eval").mkdir()
    found = {"z-first": {"value": 0.5, "stderr": 0.02}, "b": {"value": 1, "stderr": None}}
    for place, (name, figure) in enumerate(found.items()):
        (run / "eval" / f"{name}.json").write_text(json.dumps({"figures": {"pass_at_1": figure}}))
        os.utime(run / "eval" / f"{name}.json", (place, place))
    shown = dict(overview.results(load([run, small(tmp_path / "b", [{"step": 1, "reward/mean": 0.5}])])))
    assert shown["held-out pass@1, before and after, with standard errors"] == ["0.250 ± 0.032 → 0.750", "-"]
    assert shown["pass@1 by moe-rl eval"] == ["z-first: 0.500 ± 0.020; b: 1.000", "-"]
