"""The report and the page of a study in a real browser: they draw, hold data, fetch nothing, and fit a narrow screen."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from moe_rl import cli, study
from tests.study_runs import small_grid
from tests.synthetic import make_run

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
# Every graph of the page: how many numbers each of its traces holds, and whether it is drawn
GRAPHS = """
return [...document.querySelectorAll('.plot')].map(graph => ({
  title: graph.closest('.chart').querySelector('h3').textContent,
  numbers: (graph.data || []).map(trace => (trace.z ? [...trace.z].flatMap(row => [...row]) : [...trace.y])
    .filter(value => typeof value === 'number' && isFinite(value)).length),
  drawn: graph.querySelectorAll('.main-svg').length,
}))
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        reason = "chromium and chromedriver are not installed (Debian: apt-get install chromium chromium-driver)"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}; with CI set this test must run")
        pytest.skip(reason)
    options = Options()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    started.set_page_load_timeout(120)
    yield started
    started.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs compared, and a run with nothing but rewards."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [make_run(folder / "gspo"), make_run(folder / "grpo <fast>", "grpo", scale=3, seed=1)]
    both = folder / "both.html"
    assert cli.main(["report", *map(str, runs), "--output", str(both)]) == 0
    bare = folder / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "reward/mean": 0.75}\n')
    assert cli.main(["report", str(bare)]) == 0
    return both, bare / "report.html"


def opened(browser: webdriver.Chrome, page: Path, width: int) -> None:
    """Loads the page at a width, by the device metrics: a window cannot be made narrower than 500 px."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    for log in ("performance", "browser"):
        browser.get_log(log)  # what came before
    browser.get(page.as_uri())
    WebDriverWait(browser, 120).until(lambda b: b.execute_script("return document.body.dataset.drawn") == "true")


def graphs(browser: webdriver.Chrome) -> list[dict[str, Any]]:
    return browser.execute_script(GRAPHS)


def requested(browser: webdriver.Chrome) -> list[str]:
    """The addresses that the page asked for; data that stands in the page itself is none."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [url for url in sent if not url.startswith("data:")]


def fits(browser: webdriver.Chrome) -> bool:
    root = "document.documentElement"
    return browser.execute_script(f"return {root}.scrollWidth <= {root}.clientWidth")


@pytest.mark.parametrize("width", [400, 1280, 2000])
def test_two_runs_compared(browser: webdriver.Chrome, pages: tuple[Path, Path], width: int) -> None:
    opened(browser, pages[0], width)
    found = graphs(browser)
    # 18 charts of one graph, one (KL to the reference) that only some runs have; 6 heat maps (update, prompt, engine, noise,
    # probe, load) and the histogram with one a run
    assert len(found) == 4 + 5 + 1 + 6 + 3 + 2 * 7
    for graph in found:
        assert graph["drawn"] and graph["numbers"] and all(graph["numbers"]), graph
    assert {"Reward", "Flips against margin", "Load by layer and expert"} <= {graph["title"] for graph in found}
    assert browser.execute_script("return document.querySelectorAll('.missing').length") == 0
    assert browser.execute_script("return [...document.querySelectorAll('.chip')].map(c => c.textContent)") == [
        "gspo",
        "grpo <fast>",
    ]
    assert browser.execute_script("return innerWidth") == width
    assert fits(browser)
    assert requested(browser) == [pages[0].as_uri()]
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def test_alarms_are_marked_in_the_runs_color(browser: webdriver.Chrome, pages: tuple[Path, Path]) -> None:
    opened(browser, pages[0], 1280)
    marks = browser.execute_script(
        "return [...document.querySelectorAll('.plot')].flatMap(g => g.data).filter(t => (t.name || '').endsWith(' alarm'))"
        ".map(t => [t.name, t.x, t.text, t.marker.color])"
    )
    # steps of 60 above 42 that 6 divides
    assert ["grpo <fast> alarm", [48, 54, 60], ["ratio_tail"] * 3, "#d55e00"] in marks
    assert {name for name, *_ in marks} == {"grpo <fast> alarm"}


def test_charts_without_data_say_what_to_switch_on(browser: webdriver.Chrome, pages: tuple[Path, Path]) -> None:
    opened(browser, pages[1], 400)
    (graph,) = graphs(browser)
    assert (graph["title"], graph["numbers"]) == ("Reward", [2])
    said = browser.execute_script("return [...document.querySelectorAll('.missing')].map(p => p.textContent)")
    assert len(said) == 3 + 5 + 8 + 3 + 1
    assert all(text.startswith("No data. ") and ("=" in text or "moe-rl train" in text) for text in said)
    assert any("drift.trace_every=N" in text for text in said)
    assert fits(browser)
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def test_dark_mode_changes_the_colors(browser: webdriver.Chrome, pages: tuple[Path, Path]) -> None:
    opened(browser, pages[0], 1280)
    look = """
    const graph = document.querySelector('.plot');
    return [getComputedStyle(document.body).backgroundColor, graph.layout.font.color]
    """
    assert browser.execute_script(look) == ["rgb(255, 255, 255)", "#1b2430"]
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    WebDriverWait(browser, 60).until(lambda b: b.execute_script(look) == ["rgb(18, 22, 28)", "#e6ebf2"])
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.parametrize("width", [400, 1400])
def test_a_study(browser: webdriver.Chrome, tmp_path: Path, width: int) -> None:
    study.write(tmp_path, small_grid(tmp_path))
    opened(browser, tmp_path / study.PAGE, width)
    found = graphs(browser)
    # three maps of two methods, two scatters over runs, two differences of the one method to the other
    assert len(found) == 3 * 2 + 2 + 2
    for graph in found:
        assert graph["drawn"] and graph["numbers"] and all(graph["numbers"]), graph
    cells = "return [...document.querySelectorAll('.plot')[0].querySelectorAll('.heatmap-label')].map(c => c.textContent)"
    assert any(text.startswith("0.600") and "1 collapsed" in text for text in browser.execute_script(cells))
    assert browser.execute_script("return document.querySelectorAll('.missing').length") == 0
    assert (
        browser.execute_script("return document.querySelectorAll('tbody tr').length") == 12 + 2
    )  # rules, runs that collapsed, without the same ones
    assert fits(browser)
    assert requested(browser) == [(tmp_path / study.PAGE).as_uri()]
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
