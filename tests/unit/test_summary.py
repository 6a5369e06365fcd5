"""The closing table, from numbers worked out by hand."""

import io
from pathlib import Path

from rich.console import Console

from moe_rl.display import describe
from moe_rl.summary import change_by_layer, plain, show

RUN = Path("runs/one")


def lines(steps: int, layers: int = 2, minibatches: int = 2) -> list[dict[str, float | None]]:
    """Step s has reward s / 10 and change rates layer + minibatch / 10 + s / 1000; pass@1 at the first and the last step."""
    found: list[dict[str, float | None]] = []
    for step in range(1, steps + 1):
        line: dict[str, float | None] = {
            "step": step,
            "reward/mean": step / 10,
            "time/rollout_tokens_per_second": 1000.0 * step,
        }
        if step in (1, steps):
            line["eval/pass_at_1"] = 0.25 if step == 1 else 0.75
        for layer in range(layers):
            for minibatch in range(minibatches):
                key = f"drift/update/expert_change_rate/layer_{layer:02d}/minibatch_{minibatch}"
                line[key] = layer + minibatch / 10 + step / 1000
            line[f"drift/update/expert_change_rate/layer_{layer:02d}"] = 99.0  # of all minibatches: another key
        found.append(line)
    return found


def rows(text: str) -> dict[str, list[str]]:
    """First words of a row -> its numbers."""
    found = {}
    for row in text.splitlines():
        cells = row.split("  ")
        cells = [cell.strip() for cell in cells if cell.strip()]
        if len(cells) > 1:
            found[cells[0]] = cells[1:]
    return found


def test_means_over_the_first_and_the_last_steps() -> None:
    found = rows(plain(lines(6), RUN, last=2))
    assert found["reward, first and last 2 steps"] == ["0.150", "0.550"]
    assert found["held-out pass@1"] == ["0.250", "0.750"]
    assert found["generated tokens a second"] == ["5,500"]
    assert found["layer"] == ["0", "1"]
    assert found["00"] == ["0.0055", "0.1055"]
    assert found["01"] == ["1.0055", "1.1055"]
    assert found["mean"] == ["0.5055", "0.6055"]
    assert plain(lines(6), RUN).endswith("run directory: runs/one")


def test_pass_at_1_has_its_standard_error_where_the_step_knows_one() -> None:
    some = lines(3)
    some[-1]["eval/pass_at_1_stderr"] = 0.0126
    assert rows(plain(some, RUN))["held-out pass@1"] == ["0.250", "0.750 +- 0.013"]


def test_change_rates_skip_steps_that_lack_them() -> None:
    some = lines(3, layers=1)
    key = "drift/update/expert_change_rate/layer_00/minibatch_1"
    some[1][key] = None  # not finite
    del some[2][key]
    assert change_by_layer(some, last=2) == {0: {0: (0.002 + 0.003) / 2, 1: 0.1 + 0.001}}


def test_under_replay_it_is_the_routers_own_choice_that_is_shown() -> None:
    """Here and on the line of a step: of the routes used the rate would be 0."""
    forced = lines(2)
    for line in forced:
        for key in [key for key in line if "expert_change_rate" in key]:
            line[key.replace("update/", "update/local/")] = line[key]
            line[key] = 0.0
    assert change_by_layer(forced, last=2) == change_by_layer(lines(2), last=2)
    assert "change rate of the routers' own choice (local)" in " ".join(plain(forced, RUN).split())
    rates = {"drift/update/expert_change_rate/mean": 0.0, "ratio/clip_fraction": 0.5}
    assert describe(rates) == "change 0.0000 clip 0.500"
    assert describe(rates | {"drift/update/local/expert_change_rate/mean": 0.25}) == "change 0.2500 clip 0.500"


def test_few_steps() -> None:
    found = rows(plain(lines(3), RUN))
    assert found["reward, first and last 1 step"] == ["0.100", "0.300"]
    once = lines(1)
    assert rows(plain(once, RUN))["held-out pass@1"] == ["0.250", "-"]
    assert rows(plain([], RUN))["held-out pass@1"] == ["-", "-"]
    assert "expert change rate" not in plain([], RUN)


def test_large_runs_fit_80_columns() -> None:
    text = plain(lines(2, layers=94, minibatches=16), Path("runs") / ("long_name_" * 12))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    found = rows(text)
    assert found["layer"] == ["0", "3", "6", "9", "12", "15"]
    assert {"00", "93", "all 94"} <= set(found)
    # the mean is over all layers, also those that have no row: 0..93, step 1.5, no minibatch part
    assert found["all 94"][0] == "46.5015"


def test_no_colour_nor_boxes_without_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=80)
    show(lines(4), RUN, console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().isascii()
    terminal = Console(file=io.StringIO(), width=80, force_terminal=True)
    show(lines(4), RUN, terminal)
    assert isinstance(terminal.file, io.StringIO)
    assert "\x1b[" in terminal.file.getvalue()
