"""What traces say, from numbers worked out by hand."""

import math

import numpy as np
import pytest

from moe_rl.drift import analysis
from moe_rl.drift.ratio_analysis import EDGES, Moments, by_sequence, clip_by_flip, histogram
from moe_rl.drift.trace_sums import TraceSums
from moe_rl.drift.traces import Header, Trace

# Two layers of 4 experts, 2 a token. Layer 0: token 0 keeps both, 1 keeps one of two, 2 none. Layer 1: token 2 is unknown.
OLD = np.array([[[0, 1], [0, 1]], [[0, 1], [2, 3]], [[0, 1], [-1, -1]]], np.int16)
NEW = np.array([[[0, 1], [0, 1]], [[1, 2], [2, 3]], [[2, 3], [0, 1]]], np.int16)
ALL = np.ones(3, bool)


def test_change_flips_and_jaccard() -> None:
    compared = analysis.compare(OLD, NEW)
    assert compared.known.tolist() == [[True, True], [True, True], [True, False]]
    assert compared.change[:, 0].tolist() == [0, 0.5, 1]
    assert compared.flips[:, 0].tolist() == [False, True, True]
    assert compared.jaccard[:, 0].tolist() == pytest.approx([1, 1 / 3, 0])
    rates = analysis.by_layer(compared, ALL).rates()
    assert rates["expert_change_rate"].tolist() == pytest.approx([0.5, 0])
    assert rates["flip_rate"].tolist() == pytest.approx([2 / 3, 0])
    assert rates["jaccard"].tolist() == pytest.approx([4 / 9, 1])
    assert analysis.by_layer(compared, ALL).tokens.tolist() == [3, 2]
    # only the last token, whose layer 1 is unknown: no value there
    last = analysis.by_layer(compared, np.array([False, False, True])).rates()
    assert last["expert_change_rate"][0] == 1 and math.isnan(last["expert_change_rate"][1])


def test_the_order_of_ids_does_not_matter() -> None:
    assert not analysis.compare(OLD[..., ::-1], OLD).flips.any()


def test_a_token_over_its_layers() -> None:
    flipped, share, known = analysis.compare(OLD, NEW).token_flips()
    assert flipped.tolist() == [False, True, True]
    assert share.tolist() == [0, 0.5, 1]  # of one known layer, in the last token
    assert known.all()


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="must both be"):
        analysis.compare(OLD, NEW[:2])


def test_flips_fall_with_the_margin() -> None:
    # Ten margins 0..9 in two bins: the edge is the median, 4.5. Below it 3 of 5 flip, above 1 of 5. NaN and inf are left out.
    margin = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, np.nan, np.inf])
    flips = np.array([1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 1, 1], bool)
    sums = analysis.flips_by_margin(margin, flips, bins=2)
    assert sums.pairs.tolist() == [5, 5]
    assert sums.flip_rate.tolist() == [0.6, 0.2]
    assert sums.mean_margin.tolist() == [2, 7]
    assert (sums + sums).flip_rate.tolist() == [0.6, 0.2]


def test_equal_margins_stay_in_one_bin() -> None:
    sums = analysis.flips_by_margin(np.zeros(6), np.ones(6, bool), bins=3)
    assert sums.pairs.tolist() == [0, 0, 6]
    assert math.isnan(sums.flip_rate[0]) and sums.flip_rate[2] == 1
    assert analysis.flips_by_margin(np.zeros(0), np.zeros(0, bool), bins=3).pairs.tolist() == [0, 0, 0]


def test_load() -> None:
    counts = analysis.load(NEW, np.array([True, True, False]), experts=4)
    assert counts.tolist() == [[1, 2, 1, 0], [1, 1, 1, 1]]
    assert analysis.load(OLD, ALL, experts=4).tolist() == [[3, 3, 0, 0], [1, 1, 1, 1]]  # -1 is not counted
    # shares 1/4, 1/2, 1/4: entropy 1.5 log 2 over log 4
    assert analysis.load_entropy(counts).tolist() == pytest.approx([0.75, 1])
    assert analysis.max_violation(counts).tolist() == [1, 0]
    assert analysis.dead_experts(counts).tolist() == [1, 0]
    nothing = np.zeros((1, 4), np.int64)
    assert math.isnan(analysis.load_entropy(nothing)[0]) and math.isnan(analysis.max_violation(nothing)[0])
    assert analysis.load_entropy(np.array([[5]])).tolist() == [1]


def test_log_ratio_bins() -> None:
    counts = histogram(np.array([0.0, 1e-6, -1e-6, 0.5, -0.5, 20.0]), np.array([0, 0, 0, 1, 1, 1], bool))
    assert counts.shape == (2, len(EDGES) + 1)
    middle = len(EDGES) // 2
    assert EDGES[middle - 1 : middle + 1].tolist() == pytest.approx([-1e-5, 1e-5])
    assert counts[0, middle] == 3 and counts[0].sum() == 3
    # 0.5 lies between 10^-0.5 = 0.316 and 10^-0.25 = 0.562
    (high,) = [i for i, edge in enumerate(EDGES) if math.isclose(edge, 10**-0.5)]
    assert counts[1, high + 1] == 1 and counts[1, len(EDGES) - 1 - high] == 1 and counts[1, -1] == 1


def test_clip_by_flip() -> None:
    found = clip_by_flip(np.array([1, 0, 0, 0, 1, 1], bool), np.array([0, 0, 0, 0, 1, 1], bool))
    assert found.total.tolist() == [4, 2]
    assert found.fraction.tolist() == [0.25, 1]
    assert math.isnan(clip_by_flip(np.array([True]), np.array([True])).fraction[0])


def test_correlation() -> None:
    # x 0, 1, 2; y 0, 2, 1: xx = 2, yy = 2, xy = 1
    one = Moments.of(np.array([0, 1, 2]), np.array([0, 2, 1]))
    assert one.correlation == pytest.approx(0.5)
    x, y = np.array([0.0, 1, 2, 5, 7]), np.array([0.0, 2, 1, 8, 6])
    parts = Moments.of(x[:3], y[:3]) + Moments.of(x[3:], y[3:])
    assert parts.correlation == pytest.approx(float(np.corrcoef(x, y)[0, 1]))
    # each group falls by itself (-1), and their means rise together
    low, high = Moments.of(np.array([0, 1]), np.array([1, 0])), Moments.of(np.array([10, 11]), np.array([11, 10]))
    assert (low + high).correlation > 0.9
    assert low.within(high).correlation == pytest.approx(-1)
    assert math.isnan(Moments.of(np.zeros(3), np.arange(3)).correlation)
    empty = Moments.of(np.zeros(0), np.zeros(0))
    assert (empty + empty).n == 0 and (empty + one).correlation == pytest.approx(0.5)


def test_sequences() -> None:
    found = by_sequence(
        sample=np.array([7, 3, 7]),
        log_ratio=np.array([0.2, 0.1, -0.6]),
        flip_share=np.array([0.5, 0, 0]),
        flipped=np.array([True, False, False]),
        clipped=np.array([False, True, False]),
    )
    assert found.log_ratio.tolist() == pytest.approx([0.1, 0.2])  # sample 3, then |mean(0.2, -0.6)| of sample 7
    assert found.flip_share.tolist() == [0, 0.25]
    assert found.flipped.tolist() == [False, True]
    assert found.clipped.tolist() == [True, False]


def trace(step: int) -> Trace:
    """The three tokens above as one step: token 0 is of the prompt, 1 and 2 respond, in updates 0 and 1."""
    columns = {
        "step": np.full(3, step),
        "update": np.array([0, 0, 1]),
        "sample": np.array([4, 4, 5]),
        "response": np.array([False, True, True]),
        "clipped": np.array([False, False, True]),
        "old_logprob": np.array([np.nan, -1.0, -1.0]),
        "train_logprob": np.array([np.nan, -1.0, -0.5]),
        "rollout_routes": OLD,
        "old_routes": OLD,
        "new_routes": NEW,
        "old_margin": np.array([[9.0, 9], [1, 4], [2, 9]]),
    }
    return Trace(Header("one", "grpo", "off", (0, 2), 4, 2), columns, 3)


def test_files_add_up() -> None:
    sums = TraceSums.collect([trace(3), trace(5)])
    assert (sums.files, sums.tokens, sums.steps) == (2, 6, [3, 5])
    total = sums.total(("update", ""))
    assert total is not None
    assert total.tokens.tolist() == [4, 2] and total.change.tolist() == [3, 0]
    assert {update: found.change.tolist() for update, found in sums.by_update(("update", "")).items()} == {0: [1, 0], 1: [2, 0]}
    assert {step: found.change.tolist() for step, found in sums.by_step(("update", "")).items()} == {3: [1.5, 0], 5: [1.5, 0]}
    engine, prompt = sums.total(("engine", "")), sums.total(("update", "prompt"))
    assert engine is not None and engine.flips.tolist() == [0, 0]
    assert prompt is not None and prompt.tokens.tolist() == [2, 2] and prompt.flips.tolist() == [0, 0]
    # three known pairs of response tokens a file: margins 1, 4, 2, of which 1 and 2 flip
    assert sums.margins is not None
    assert (sums.margins.pairs.sum(), sums.margins.flips.sum(), sums.margins.margin.sum()) == (6, 4, 14)
    assert sums.load is not None and sums.load.tolist() == [[0, 2, 4, 2], [2, 2, 2, 2]]
    assert sums.log_ratios is not None and sums.log_ratios.sum(1).tolist() == [0, 4]
    assert sums.clipped["token"].fraction[1] == 0.5 and sums.clipped["sequence"].fraction[1] == 0.5
    # share of layers 0.5 and 1 against |log r| 0 and 0.5: rises together; within an update nothing varies
    assert sums.correlation("token", within=False) == pytest.approx(1)
    assert math.isnan(sums.correlation("token", within=True))
    assert math.isnan(TraceSums().correlation("token", within=True))


def test_a_router_trace_has_load_alone() -> None:
    routes = Trace(Header("rank 0", "", "", (0, 2), 4, 2), {"step": np.zeros(3), "new_routes": NEW}, 3)
    sums = TraceSums.collect([routes])
    assert sums.load is not None and sums.load.sum() == 12
    assert not sums.drift and sums.margins is None and sums.log_ratios is None
