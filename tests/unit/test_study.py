"""The study of a grid, on runs whose numbers are worked out by hand."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_rl import study
from moe_rl.drift.scoring import Score
from moe_rl.drift.watch_rules import RULES
from moe_rl.study.results import Result, Settings, Spread, cells, differences, distinct, read, rule_scores
from moe_rl.study.tables import lr, summary, tables
from moe_rl.summary import as_text
from parallel.errors import UsageError
from tests.study_runs import FALLING, FAR, RISING, make, small_grid


def result(directory: Path) -> Result:
    found = read(directory)
    assert isinstance(found, Result), found
    return found


def test_a_run_that_collapsed(tmp_path: Path) -> None:
    probe = [
        {"drift/probe/expert_change_rate/mean": c, "drift/probe/router_shift/mean": s} for c, s in ((0.1, 0.01), (0.2, 0.03))
    ]
    more = {
        1: probe[0] | {"drift/noise/expert_change_rate/mean": 0.002},
        4: FAR,
        8: probe[1] | {"drift/noise/expert_change_rate/mean": 0.001},
    }
    change = [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.5, 0.5]
    found = result(make(tmp_path, "grpo_r2", 2, 6e-4, 1, FALLING, (0.4, 0.3), change, more))
    assert (found.name, found.settings, found.seed, found.steps) == (
        "grpo_r2-m2-lr0.0006-s1",
        Settings("grpo_r2", 2, 6e-4),
        1,
        8,
    )
    assert (found.before, found.after, found.gain) == (0.4, 0.3, pytest.approx(-0.1))
    assert found.collapse == 7 and found.collapsed  # though pass@1 is above half
    assert found.change_peak == pytest.approx(0.04)  # steps 2 to 6: those from the collapse on are not looked at
    assert found.change_mean == pytest.approx((0.21 + 1.0) / 8)
    assert (found.probe_change, found.router_shift, found.noise) == (0.2, 0.03, 0.002)
    # reward: means .24 .2 .171 from step 5 on, where its best begins; below 0.75 of it at step 7
    # change: the median of five passes 0.05 at step 8, 0.06
    assert found.alarms == {"ratio_mean": 4, "reward": 7, "expert_change_level": 8}
    assert (found.first_alarm, found.lead) == (4, 3)


def test_an_alarm_that_comes_again_counts_from_the_first_time(tmp_path: Path) -> None:
    found = result(make(tmp_path, "grpo", 1, 1e-4, 0, [0.3] * 14, (0.3, 0.3), more={2: FAR, 14: FAR}))  # 11 quiet steps
    assert found.alarms == {"ratio_mean": 2}
    assert (found.collapse, found.lead, found.collapsed) == (None, None, False)


def test_a_calm_run_and_what_it_lacks(tmp_path: Path) -> None:
    found = result(make(tmp_path, "gspo", 4, 5e-5, 0, RISING, (0.4, 0.6)))
    assert found.settings == Settings("gspo", 4, 5e-5)
    assert found.reward_first == pytest.approx((2 * 0.2 + 8 * 0.3) / 10)
    assert found.reward_last == pytest.approx((8 * 0.3 + 2 * 0.5) / 10)
    assert (found.change_peak, found.change_mean, found.probe_change, found.router_shift, found.noise) == (None,) * 5
    assert (found.collapsed, found.first_alarm) == (False, None)


def test_a_peak_of_fewer_steps_than_are_averaged(tmp_path: Path) -> None:
    found = result(make(tmp_path, "grpo", 2, 5e-5, 0, [0.3, 0.3], (0.3, 0.3), [0.1, 0.2]))
    assert found.change_peak == pytest.approx(0.15)


@pytest.mark.parametrize(("after", "collapsed"), [(0.2, False), (0.19, True)])
def test_half_of_the_pass_rate_gone_is_a_collapse_without_a_step(tmp_path: Path, after: float, collapsed: bool) -> None:
    found = result(make(tmp_path, "grpo", 1, 5e-5, 0, RISING, (0.4, after)))
    assert (found.collapse, found.collapsed, found.lead) == (None, collapsed, None)


def test_runs_that_are_not_complete_say_why(tmp_path: Path) -> None:
    going = make(tmp_path, "grpo", 1, 5e-5, 0, [0.3] * 3, None)
    assert read(going) == "not finished: step 3 of 3"
    (going / "summary.json").write_text('{"step": 2, "eval/pass_at_1": 0.5}')  # of a shorter run that goes on
    assert read(going) == "not finished: step 3 of 3"
    (going / "summary.json").write_text('{"step": 3, "eval')
    assert read(going) == "not finished: step 3 of 3"
    (going / "summary.json").write_text('{"step": 3}')
    assert read(going) == "has no evaluation before and after"
    assert read(tmp_path / "grpo-m2-lr5e-05-s0") == "not begun"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "an empty run" in str(read(empty))


def test_seeds_of_a_cell(tmp_path: Path) -> None:
    made = [
        make(tmp_path, "gspo", 2, 5e-5, 0, RISING, (0.4, 0.6), [0.02] * 12),
        make(tmp_path, "grpo", 2, 6e-4, 1, FALLING, (0.3, 0.0), [0.3] * 8, {4: FAR}),
        make(tmp_path, "grpo", 2, 6e-4, 0, FALLING, (0.4, 0.1), [0.1] * 8, {6: FAR}),
        make(tmp_path, "grpo", 2, 6e-4, 2, RISING, (0.5, 0.5), [0.2] * 12),
        make(tmp_path, "gspo", 1, 6e-4, 0, RISING, (0.4, 0.5)),
    ]
    found = cells([result(directory) for directory in made])
    assert [cell.settings for cell in found] == [
        Settings("gspo", 1, 6e-4),
        Settings("gspo", 2, 5e-5),
        Settings("grpo", 2, 6e-4),
    ]
    cell = found[2]
    assert [r.seed for r in cell.results] == [0, 1, 2]
    assert cell.spread("after") == pytest.approx((0.2, 0.0, 0.5))
    assert cell.spread("change_peak") == pytest.approx((0.2, 0.1, 0.3))
    assert cell.spread("probe_change") is None
    assert cell.spread("lead") == Spread(2.5, 2, 3)  # from steps 5 (a change rate above 0.05) and 4
    assert cell.collapsed == 2
    assert summary([r for cell in found for r in cell.results]) == (
        "5 complete runs, 2 of them collapsed (median step 7, from 7 to 7)"
    )


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    made = [
        make(tmp_path, "grpo", 4, 2e-4, 0, RISING, (0.4, 0.5), [0.25] * 12),
        make(tmp_path, "grpo", 4, 2e-4, 1, RISING, (0.4, 0.75), [0.5] * 12),
        make(tmp_path, "grpo_r2", 4, 2e-4, 0, RISING, (0.4, 0.75), [0.125] * 12),
        make(tmp_path, "grpo_r2", 4, 2e-4, 1, RISING, (0.4, 0.5), [0.5] * 12),
        make(tmp_path, "grpo_r2", 4, 2e-4, 2, RISING, (0.4, 0.9)),  # no partner
        make(tmp_path, "grpo_r2", 8, 2e-4, 0, RISING, (0.4, 0.9)),
        make(tmp_path, "gspo", 4, 2e-4, 1, RISING, (0.4, 0.75)),  # without a change rate
    ]
    replayed, sequence = differences([result(directory) for directory in made])
    assert replayed.settings == Settings("grpo_r2", 4, 2e-4)
    assert (replayed.gains, replayed.changes) == ((0.25, -0.25), (-0.125, 0.0))
    assert (sequence.settings.method, sequence.gains, sequence.changes) == ("gspo", (0.0,), ())


def test_rules_over_all_runs(tmp_path: Path) -> None:
    made = [
        make(tmp_path, "grpo", 1, 6e-4, 0, FALLING, (0.4, 0.0), more={4: FAR}),  # collapses at 7
        make(tmp_path, "grpo", 1, 5e-5, 0, RISING, (0.4, 0.3), more={2: FAR}),  # calm, but worse than before
        make(tmp_path, "grpo", 1, 5e-5, 1, RISING, (0.4, 0.6), more={3: FAR}),
        make(tmp_path, "grpo", 1, 5e-5, 2, RISING, (0.4, 0.1), more={3: FAR}),  # halved, no step known: left out
    ]
    rules = {rule.score.rule: rule for rule in rule_scores([result(directory) for directory in made])}
    assert list(rules) == list(RULES)
    # 24 calm steps: none of the collapsed run is more than the horizon of 50 before its collapse
    assert rules["ratio_mean"].score == Score("ratio_mean", 1, 0, 0, 3, 2, 100 * 2 / 24, 2)
    assert (rules["ratio_mean"].threshold, rules["ratio_mean"].false_lost) == (0.1, 1)
    assert [rules[name].ahead for name in ("ratio_mean", "reward", "signal")] == [3, 0, None]  # reward fires at 7
    assert rules["reward"].score == Score("reward", 1, 0, 0, 0, 0, 0.0, 0)
    assert rules["entropy_low"].score == Score("entropy_low", 0, 0, 1, None, 0, 0.0, 0)


def test_runs_that_earned_the_same_count_once(tmp_path: Path) -> None:
    made = [
        make(tmp_path, "grpo", 1, 5e-5, 0, RISING, (0.4, 0.6)),
        make(tmp_path, "grpo_r2", 1, 5e-5, 0, RISING, (0.4, 0.6)),
        make(tmp_path, "gspo", 1, 5e-5, 0, [*RISING[:-1], 0.4], (0.4, 0.6)),  # another reward in one step
        make(tmp_path, "gspo", 2, 5e-5, 0, RISING, (0.4, 0.6)),
        make(tmp_path, "grpo", 1, 5e-5, 1, RISING, (0.4, 0.6)),
        make(tmp_path, "gspo", 1, 2e-4, 0, RISING, (0.4, 0.7)),
    ]
    results = [result(directory) for directory in made]
    assert [r.name for r in distinct(results)] == [directory.name for directory in made if "r2" not in directory.name]


@pytest.mark.parametrize(
    ("value", "text"), [(5e-5, "5e-5"), (2e-4, "2e-4"), (1.5e-4, "1.5e-4"), (0.001, "1e-3"), (1.0, "1e+0")]
)
def test_learning_rates_are_short(value: float, text: str) -> None:
    assert lr(value) == text


def test_tables_fit_eighty_columns(tmp_path: Path) -> None:
    results = [found for path in small_grid(tmp_path) if isinstance(found := read(path), Result)]
    text = "\n".join(as_text(part, 80) for part in tables(cells(results), differences(results), rule_scores(results)))
    assert max(map(len, text.split("\n"))) <= 80
    rows = [line.split() for line in text.split("\n")]
    assert ["4", "6e-4", "0.400", "0.000", "0.000-0.000", "0.0900", "0.100", "0.010", "1/1", "3"] in rows
    assert ["4", "5e-5", "0.400", "0.650", "0.650-0.650", "0.0300", "0.100", "0.010", "0/1", "-"] in rows  # with replay
    assert ["1", "5e-5", "+0.050", "+0.050", "to", "+0.050", "1", "/", "0", "/", "0", "+0.0000"] in rows
    # of the three that collapsed, two are the same; ratio_mean fires at 4 and reward at 7
    assert ["ratio_mean", "2", "0", "0", "3", "0", "0.00", "0", "0", "3"] in rows
    assert "…" not in text


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_what_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study.write(tmp_path, small_grid(tmp_path))
    shown = capsys.readouterr().out
    assert "7 complete runs (1 the same as another), 3 of them collapsed (median step 7, from 7 to 7)" in shown
    assert "left out: grpo_r2-m4-lr0.0006-s0: not begun" in shown
    names = ["results.csv", "cells.csv", "rules.csv", "study.html"]
    assert shown.strip().split("\n")[-4:] == [f"written: {tmp_path / name}" for name in names]

    runs = {row["run"]: row for row in rows(tmp_path / "results.csv")}
    assert len(runs) == 7
    row = runs["grpo-m4-lr0.0006-s0"]
    wanted = {"method": "grpo", "minibatches": "4", "lr": "0.0006", "seed": "0", "steps": "8", "before": "0.4", "after": "0.0"}
    wanted |= {"collapsed": "1", "collapse": "7", "first_alarm": "4", "lead": "3", "alarm_ratio_mean": "4", "alarm_reward": "7"}
    assert {key: row[key] for key in wanted} == wanted
    assert float(row["change_peak"]) == pytest.approx(0.09)
    assert (row["alarm_signal"], row["noise"]) == ("", "")
    assert runs["grpo-m4-lr5e-05-s0"]["collapse"] == ""
    cell = next(row for row in rows(tmp_path / "cells.csv") if row["method"] == "grpo_r2" and row["minibatches"] == "4")
    assert (cell["seeds"], cell["collapsed"], cell["lead_median"]) == ("1", "0", "")
    assert [float(cell[f"after_{part}"]) for part in ("mean", "low", "high")] == [0.65] * 3
    rule = next(row for row in rows(tmp_path / "rules.csv") if row["rule"] == "ratio_mean")
    assert (rule["hits"], rule["misses"], float(rule["lead_median"]), rule["false"]) == ("2", "0", 3.0, "0")
    assert float(rule["ahead_median"]) == 3.0


def test_the_page_holds_the_grid(tmp_path: Path) -> None:
    study.write(tmp_path, small_grid(tmp_path))
    page = (tmp_path / study.PAGE).read_text()
    found = re.search(r'<script id="figures" type="application/json">(.*?)</script>', page)
    assert found
    figures = json.loads(found[1])
    # pass@1, change rate and probe for two methods; two scatters; two differences
    assert len(figures) == 3 * 2 + 2 + 2
    (plain,), (replayed,) = figures[0]["data"], figures[1]["data"]
    assert (plain["x"], plain["y"], plain["z"]) == (["5e-5", "6e-4"], ["1", "4"], [[0.6, 0.0], [0.6, 0.0]])
    assert replayed["z"] == [[0.65, 0.0], [0.65, None]]  # the run that is missing
    assert plain["text"][1] == [
        "<b>0.600</b><br>0.600 to 0.600<br>0 of 1 collapsed",
        "<b>0.000</b><br>0.000 to 0.000<br>1 of 1 collapsed<br>lead 3",
    ]
    assert [row[0] for row in figures[2]["data"][0]["z"]] == [0.0, 0.03]
    scatter = figures[6]["data"][0]
    assert scatter["marker"]["symbol"] == ["circle", "x", "circle", "x"]
    assert scatter["y"] == [0.2, -0.4, 0.2, -0.4]
    assert figures[8]["data"][0]["y"] == [0.05, 0.0, 0.05]
    assert "<th>of these, pass@1 fell</th>" in page and "grpo_r2-m4-lr0.0006-s0: not begun" in page


def test_the_report_shows_a_calm_and_a_collapsed_run_of_each_method(tmp_path: Path) -> None:
    directories = small_grid(tmp_path)
    results = [found for path in directories if isinstance(found := read(path), Result)]
    # routing is measured where there are minibatches; r2 has no collapse there
    assert [r.name for r in study.examples(results)] == [
        "grpo-m4-lr5e-05-s0",
        "grpo-m4-lr0.0006-s0",
        "grpo_r2-m4-lr5e-05-s0",
        "grpo_r2-m1-lr0.0006-s0",
    ]
    study.write(tmp_path, directories)
    assert all(r.name in (tmp_path / study.REPORT).read_text() for r in study.examples(results))


def test_nothing_complete_is_an_error(tmp_path: Path) -> None:
    wanted = "holds no complete run of 2; the first: grpo-m1-lr5e-05-s0: not finished: step 3 of 3"
    with pytest.raises(UsageError, match=wanted):
        study.write(tmp_path, [make(tmp_path, "grpo", 1, 5e-5, 0, [0.3] * 3, None), tmp_path / "other"])


def test_it_needs_no_torch() -> None:
    code = "import sys, moe_rl.study; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
