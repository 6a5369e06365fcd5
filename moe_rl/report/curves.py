"""Curves over the steps of a run: reward, pass@1, entropy, gradient norm, ratios, drift; alarms as marks on them."""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_rl.drift import hints
from moe_rl.drift.runs import Run
from moe_rl.report.figure import Chart, Panel, Style, Trace, layout, line, log_axis
from moe_rl.report.series import MOST_POINTS, rounded, smooth, thin

_SMOOTH_FROM = 40  # points from which a running mean is drawn over them


@dataclass(frozen=True)
class Curve:
    """keys: in each step the first one that it holds is drawn."""

    title: str
    keys: tuple[str, ...]
    unit: str
    how: str
    missing: str = "`moe-rl train` writes it to metrics.jsonl."
    log: bool = False
    form: str = ".4f"


LEARNING = (
    Curve("Reward", ("reward/mean",), "mean reward", "Higher is better. A fall after a rise is what the watch looks for."),
    Curve(
        "Held-out pass@1",
        ("eval/pass_at_1",),
        "pass@1",
        "Share of held-out problems answered; the first point is before training.",
        "eval.every=N evaluates every N steps.",
    ),
    Curve("Entropy", ("entropy/mean",), "nats", "Of the policy, a token. Near 0 it has stopped to explore."),
    Curve(
        "Gradient norm",
        ("optimizer/grad_norm",),
        "norm",
        "Mean over the updates of a step, before clipping. Log scale.",
        log=True,
    ),
)
RATIOS = (
    Curve(
        "Size of the log-ratio",
        ("ratio/log_abs_mean",),
        "mean |log r|, nats",
        "How far the policy moved from the one that sampled. Log scale.",
        log=True,
        form=".3e",
    ),
    Curve("Clip fraction", ("ratio/clip_fraction",), "share", "Share of tokens (GSPO: of sequences) whose gradient is cut."),
    Curve(
        "Tail of the ratio",
        ("ratio/tail_fraction",),
        "share",
        "Share of ratios beyond a factor of 2 either way; a heavy tail comes before many collapses.",
        form=".3e",
    ),
    Curve("Largest ratio", ("ratio/max",), "ratio", "The largest importance ratio of a step. Log scale.", log=True),
    Curve(
        "Effective sample share",
        ("ratio/effective_sample_share",),
        "share",
        "E[r]^2 / E[r^2]: 1 where all ratios are equal; what of the batch still counts where they are not.",
    ),
)
# Of what not every run has: shown where one recorded it
AROUND = (
    Curve("Value loss", ("critic/loss",), "loss", "Of PPO's value model, half the squared error. Log scale.", log=True),
    Curve(
        "Explained variance",
        ("critic/explained_variance",),
        "share",
        "Of the returns, by the value model: 1 is perfect, 0 no better than their mean.",
    ),
    Curve("KL to the reference", ("kl/ref",), "nats", "A token, estimated by k3. Log scale.", log=True),
    Curve("KL coefficient", ("kl/coefficient",), "coefficient", "Moves where algorithm.kl_target is set. Log scale.", log=True),
    Curve(
        "Corrected",
        ("correction/touched_fraction",),
        "share",
        "Of tokens or sequences, cut or masked for what engine and trainer disagree by.",
    ),
    Curve(
        "Router-shift factor",
        ("router_shift/factor_mean",),
        "factor",
        "Mean factor on the ratio: 1 where routers did not move since the old policy.",
    ),
    Curve(
        "Groups kept",
        ("sampling/kept_fraction",),
        "share",
        "Of the groups sampled, those with right and wrong responses; the others were replaced.",
    ),
    Curve("Shaped reward", ("reward/shaped_mean",), "reward", "After penalties for length and spread."),
    Curve("Replay: forced gap", ("replay/forced_gap",), "nats", "Mean |log p forced - log p free| under routing replay."),
    Curve(
        "Explained by routing",
        ("attribution/routing_share",),
        "share",
        "Of the variance of log-ratios, what changed experts explain; the rest is changed weights.",
    ),
)
DRIFT = (
    Curve(
        "Expert change rate",
        ("drift/update/local/expert_change_rate/mean", "drift/update/expert_change_rate/mean"),
        "share",
        "Share of a token's experts that differ between old and new weights, mean over layers; under replay by the routers' "
        "own choice (local).",
        f"{hints.DRIFT} records it.",
    ),
    Curve(
        "Expert change rate of the worst layer",
        ("drift/update/local/expert_change_rate/worst", "drift/update/expert_change_rate/worst"),
        "share",
        "The layer that changes most in each step, under replay by the routers' own choice. Far above the mean: one router "
        "runs away.",
        f"{hints.DRIFT} records it.",
    ),
    Curve(
        "Router KL",
        ("drift/update/router_kl/mean",),
        "nats",
        "KL of the routers' distributions, old to new, mean over layers. It moves before choices do.",
        f"{hints.SCORES} records it.",
        form=".3e",
    ),
    Curve(
        "Load entropy",
        ("drift/load/load_entropy/mean",),
        "1 = even",
        "How evenly tokens spread over experts, mean over layers. A fall means experts fall out of use.",
        f"{hints.DRIFT} records it.",
    ),
    Curve(
        "Noise floor",
        ("drift/noise/expert_change_rate/mean",),
        "share",
        "Expert change rate between two passes with the same weights in other batch shapes: drift below it says nothing.",
        f"{hints.PROBE} records it.",
    ),
    Curve(
        "Engine against trainer",
        ("drift/engine/expert_change_rate/mean",),
        "share",
        "Expert change rate between the engine that sampled and the trainer's recomputation, the same weights.",
        f"{hints.PROBE} records it.",
    ),
)


_ZERO = "Every value is 0, which has no place on a log scale."


def recorded(curves: Sequence[Curve], runs: Sequence[Run]) -> list[Curve]:
    """Those that some run has a value for."""
    return [c for c in curves if any(value is not None for run in runs for value in run.history.first_of(c.keys))]


def charts(curves: Sequence[Curve], runs: Sequence[Run], styles: Sequence[Style]) -> list[Chart]:
    return [_chart(curve, runs, styles) for curve in curves]


def _chart(curve: Curve, runs: Sequence[Run], styles: Sequence[Style]) -> Chart:
    data: list[Trace] = []
    notes: set[str] = set()
    zero = False
    for run, style in zip(runs, styles, strict=True):
        found = run.history.first_of(curve.keys)
        values = [value if not (curve.log and value is not None and value <= 0) else None for value in found]
        pairs = [(step, value) for step, value in zip(run.history.steps, values, strict=True) if value is not None]
        if not pairs:
            zero |= any(value is not None for value in found)
            continue
        steps, rows, width = thin([step for step, _ in pairs], [[value for _, value in pairs]], MOST_POINTS)
        points = [rounded(value) for value in rows[0]]
        if len(points) > _SMOOTH_FROM:
            window = max(3, len(points) // 20)
            data.append(line(run.name, style, steps, points, curve.form, opacity=0.3, hoverinfo="skip", hovertemplate=None))
            data.append(line(run.name, style, steps, [rounded(v) for v in smooth(points, window)], curve.form))
            notes.add(f"bold: mean of the last {window * width} steps")
        else:
            data.append(line(run.name, style, steps, points, curve.form))
        if marks := _alarms(run, style, steps, points):
            data.append(marks)
            notes.add("crosses: alarms")
    if not data:
        return Chart(curve.title, curve.how, missing=_ZERO if zero else curve.missing)
    shape = layout("step", curve.unit, hovermode="x unified")
    longest = max(step for run in runs for step in [0, *run.history.steps])
    shape["xaxis"]["range"] = [-0.02 * longest, 1.02 * longest]  # of every curve, so that they can be read one below the other
    if curve.log:
        shape["yaxis"] = log_axis(curve.unit, [value for trace in data for value in trace["y"]])
    how = " ".join([curve.how, *([f"({'; '.join(sorted(notes))})"] if notes else [])])
    return Chart(curve.title, how, [Panel(data, shape)])


def _alarms(run: Run, style: Style, steps: Sequence[int], points: Sequence[float | None]) -> Trace | None:
    """A cross at the first drawn step at or after each alarm."""
    rules: dict[int, list[str]] = {}
    for rule, fired in run.history.alarms().items():
        for step in fired:
            place = next((place for place, drawn in enumerate(steps) if drawn >= step), None)
            if place is not None and rule not in rules.setdefault(place, []):
                rules[place].append(rule)
    if not rules:
        return None
    marker = {"symbol": "x", "size": 9, "color": style.color}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{run.name} alarm",
        "x": [steps[place] for place in rules],
        "y": [points[place] for place in rules],
        "text": [", ".join(names) for names in rules.values()],
        "marker": marker,
        "hovertemplate": "%{text}",
    }
