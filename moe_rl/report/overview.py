"""The two tables at the head of the page: what the runs are and what came out."""

from collections.abc import Callable, Sequence

from moe_rl.drift.history import History
from moe_rl.drift.runs import Run
from moe_rl.evaluation_files import read_pass_at_1
from moe_rl.report.routing import RATE

_LAST = 10
_MOST_EVALUATIONS = 4

# heading, dotted keys of config.yaml whose values are shown, joined
SETTINGS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("algorithm", ("algorithm.name",)),
    ("replay", ("replay.mode",)),
    ("clip range (unset: the algorithm's)", ("algorithm.clip_low", "algorithm.clip_high")),
    ("updates a rollout batch", ("algorithm.minibatches", "algorithm.epochs")),
    ("learning rate", ("optimizer.lr", "optimizer.schedule")),
    ("prompts x responses", ("rollout.prompts", "rollout.responses")),
    ("longest response", ("rollout.max_response_tokens",)),
    ("model: layers, hidden", ("model.layers", "model.hidden")),
    ("experts, top-k", ("model.experts", "model.topk")),
    ("load balancing", ("model.load_balancing",)),
    ("task", ("task.name",)),
    ("steps", ("run.steps",)),
    ("seed", ("run.seed",)),
    ("weights from", ("checkpoint.load",)),
)

Row = tuple[str, list[str]]


def settings(runs: Sequence[Run]) -> list[Row]:
    """Rows that some run knows."""
    rows = [(heading, [_joined(run, keys) for run in runs]) for heading, keys in SETTINGS]
    return [(heading, cells) for heading, cells in rows if any(text != "-" for text in cells)]


def results(runs: Sequence[Run]) -> list[Row]:
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("reward, first and last steps", lambda run: _first_and_last(run.history, "reward/mean")),
        ("held-out pass@1, before and after, with standard errors", _pass_at_1),
        ("pass@1 by moe-rl eval", _evaluations),
        ("clip fraction", lambda run: _recent(run.history, "ratio/clip_fraction")),
        ("mean |log r|", lambda run: _recent(run.history, "ratio/log_abs_mean", ".2e")),
        ("expert change rate, mean over layers (under replay: local)", _change),
        ("layer that changes most", _worst),
        ("load entropy", lambda run: _recent(run.history, "drift/load/load_entropy/mean", ".3f")),
        ("alarms", _alarms),
    ]
    found = [(heading, [of(run) for run in runs]) for heading, of in rows]
    return [(heading, cells) for heading, cells in found if any(text != "-" for text in cells)]


def _joined(run: Run, keys: Sequence[str]) -> str:
    values = [run.setting(key) for key in keys]
    if all(value is None for value in values) and not run.settings:
        header = run.traces.header if run.traces is not None else None
        known = {"algorithm.name": header.algorithm, "replay.mode": header.replay} if header is not None else {}
        return known.get(keys[0]) or "-"
    return ", ".join("unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in values)


def _first_and_last(history: History, key: str) -> str:
    values = [value for value in history.series(key) if value is not None]
    if not values:
        return "-"
    span = min(_LAST, max(1, len(values) // 2))
    return f"{sum(values[:span]) / span:.3f} → {sum(values[-span:]) / span:.3f}"


def _pass_at_1(run: Run) -> str:
    keys = ("eval/pass_at_1", "eval/pass_at_1_stderr")
    found = [
        _with_error(value, stderr) for value, stderr in zip(*map(run.history.series, keys), strict=True) if value is not None
    ]
    return f"{found[0]} → {found[-1]}" if len(found) > 1 else found[0] if found else "-"


def _evaluations(run: Run) -> str:
    found = [f"{name}: {_with_error(one.value, one.stderr)}" for name, one in read_pass_at_1(run.path).items()]
    return "; ".join(found[-_MOST_EVALUATIONS:]) or "-"


def _with_error(value: float, stderr: float | None) -> str:
    return f"{value:.3f}" if stderr is None else f"{value:.3f} ± {stderr:.3f}"


def _recent(history: History, key: str, form: str = ".4f") -> str:
    value = history.recent(key, _LAST)
    return "-" if value is None else f"{value:{form}}"


def _change(run: Run) -> str:
    value = run.history.over_layers("update", run.history.natural_view, RATE, None, _LAST)
    return "-" if value is None else f"{value:.4f}"


def _worst(run: Run) -> str:
    worst = run.history.worst("update", run.history.natural_view, RATE, _LAST)
    return "-" if worst is None else f"layer {worst[0]:02d}: {worst[1]:.4f}"


def _alarms(run: Run) -> str:
    if not run.history.lines:
        return "-"
    fired = run.history.alarms()
    return "; ".join(f"{rule} from step {steps[0]} ({len(steps)})" for rule, steps in sorted(fired.items())) or "none"
