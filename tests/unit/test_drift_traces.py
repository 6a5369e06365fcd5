"""Trace files: what is written comes back, and a broken file costs only itself."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moe_rl.drift import megatron_trace, traces
from moe_rl.drift.traces import Header, TraceError, TraceWarning

HEADER = Header(run="one", algorithm="grpo", replay="off", layers=(1, 3), experts=8, topk=2)


def columns(step: int = 7) -> dict[str, np.ndarray]:
    """Three tokens. Row 1 has no old routes; ids are given in falling order, with gates that say which id they are of."""
    old = np.array([[[3, 1], [7, 0]], [[-1, -1], [-1, -1]], [[5, 4], [2, 1]]])
    new = np.array([[[3, 2], [7, 0]], [[6, 5], [1, 0]], [[5, 4], [2, 1]]])
    return {
        "step": np.full(3, step),
        "update": np.array([0, 1, 1]),
        "response": np.array([False, True, True]),
        "clipped": np.array([False, True, False]),
        "old_logprob": np.array([np.nan, -1.5, -0.25], np.float32),
        "old_routes": old,
        "new_routes": new,
        "new_gates": new / 10,
        "old_margin": np.array([[0.5, 0.25], [np.nan, np.nan], [0.125, 0.0]]),
    }


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    path = traces.write(tmp_path, 7, HEADER, columns())
    assert path == tmp_path / "traces" / "step_000007.parquet"
    assert list(path.parent.iterdir()) == [path]
    trace = traces.read(path)
    assert (trace.header, trace.tokens) == (HEADER, 3)
    assert trace.columns["update"].tolist() == [0, 1, 1]
    assert trace.columns["clipped"].tolist() == [False, True, False]
    assert np.isnan(trace.columns["old_logprob"][0]) and trace.columns["old_logprob"][1:].tolist() == [-1.5, -0.25]
    assert trace.columns["old_routes"].tolist() == [[[1, 3], [0, 7]], [[-1, -1], [-1, -1]], [[4, 5], [1, 2]]]
    assert trace.columns["new_gates"][0].tolist() == pytest.approx(np.array([[0.2, 0.3], [0.0, 0.7]]))  # beside their ids
    assert np.isnan(trace.columns["old_margin"][1]).all()
    assert trace.columns["old_margin"][2].tolist() == [0.125, 0.0]
    for absent in ("rollout_routes", "reward", "old_gates", "train_logprob", "token"):
        assert trace.get(absent) is None
    assert set(traces.read(path, ["step", "response"]).columns) == {"step", "response"}


def test_the_file_is_what_the_format_says(tmp_path: Path) -> None:
    path = traces.write(tmp_path, 1, HEADER, columns())
    schema = pq.read_schema(path)
    assert tuple(schema.names) == traces.COLUMNS
    assert schema.field("old_routes").type == pa.list_(pa.uint8(), 4)  # field names differ, the type does not
    assert schema.field("old_margin").type == pa.list_(pa.float32(), 2)
    assert schema.field("policy_version").type == pa.int32()
    assert json.loads(schema.metadata[b"moe_rl"]) == {
        "run": "one",
        "algorithm": "grpo",
        "replay": "off",
        "layers": [1, 3],
        "experts": 8,
        "topk": 2,
        "version": 1,
    }
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"
    table = pq.read_table(path)
    assert table.column("old_routes").null_count == 1
    assert table.column("old_logprob").null_count == 1
    assert table.column("rollout_routes").null_count == 3


def test_an_unknown_id_beside_known_ones_and_many_experts(tmp_path: Path) -> None:
    one = {"step": np.array([1]), "old_routes": np.array([[[2, -1], [-1, -1]]]), "new_routes": np.array([[[0, 1], [2, 3]]])}
    path = traces.write(tmp_path, 1, HEADER, one)
    assert pq.read_schema(path).field("old_routes").type == pa.list_(pa.int16(), 4)
    assert pq.read_schema(path).field("new_routes").type == pa.list_(pa.uint8(), 4)
    assert traces.read(path).columns["old_routes"].tolist() == [[[-1, 2], [-1, -1]]]
    many = Header("one", "grpo", "off", (0,), 300, 2)
    path = traces.write(tmp_path, 2, many, {"step": np.array([2]), "new_routes": np.array([[[299, 4]]])})
    assert traces.read(path).columns["new_routes"].tolist() == [[[4, 299]]]


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("old_routs", np.zeros(3), "columns old_routs: must be among step, update"),
        ("reward", np.zeros(2), r"reward: shape \(2,\), must be \(3,\)"),
        ("old_margin", np.zeros((3, 4)), r"old_margin: shape \(3, 4\), must be \(3, 2\)"),
        ("new_routes", np.full((3, 2, 2), 8), r"new_routes: ids must be -1 \(unknown\) or in \[0, 8\)"),
    ],
)
def test_what_cannot_be_written(tmp_path: Path, name: str, values: np.ndarray, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        traces.write(tmp_path, 1, HEADER, {**columns(), name: values})
    assert not (tmp_path / "traces").exists()


def test_broken_files_are_skipped_by_name_and_the_rest_is_read(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        path = traces.write(tmp_path, step, HEADER, columns(step))
    whole = path.read_bytes()
    folder = path.parent
    (folder / "step_000002.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "step_000003.parquet").write_bytes(b"")
    pq.write_table(pa.table({"a": [1]}), folder / "step_000004.parquet")
    traces.write(tmp_path, 6, Header("one", "grpo", "off", (1,), 8, 2), {"step": np.array([6])})
    (folder / ".step_000007.parquet.part").write_bytes(whole[:10])  # being written
    skipped: list[str] = []
    assert [trace.columns["step"][0] for trace in traces.read_run(tmp_path, skipped.append)] == [1, 5]
    assert [Path(text.split(":")[0]).name for text in skipped] == [f"step_00000{n}.parquet" for n in (2, 3, 4, 6)]
    assert "cut short" in skipped[0] and "cut short" in skipped[1]
    assert "not a trace" in skipped[2] and "other layers" in skipped[3]
    with pytest.warns(TraceWarning, match=r"skipped .*step_00000\d\.parquet: ") as warned:
        assert len(list(traces.read_run(tmp_path))) == 2
    assert len(warned) == 4
    assert list(traces.read_run(tmp_path / "nowhere")) == []


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = traces.write(tmp_path, 1, Header("one", "grpo", "off", (1, 3), 8, 2, version=2), columns())
    with pytest.raises(TraceError, match="trace version 2; this moe-rl reads version 1"):
        traces.read(path)


def test_bytes_of_a_token(tmp_path: Path) -> None:
    # 11 numbers of 4 bytes, update of 2 and two bits: 47. Then 2 layers x (2 experts x (3 ids of 1 + 2 gates of 4) + 2 margins)
    assert traces.bytes_per_token(2, 2, 8) == 47 + 2 * (2 * (3 + 8) + 8)
    assert traces.bytes_per_token(2, 2, 300, routes=2, gates=0, margins=1) == 47 + 2 * (2 * 4 + 4)
    assert traces.bytes_per_token(48, 8, 128) == 47 + 48 * (8 * 11 + 8) == 4655
    # the arithmetic is that of the arrays: random values do not compress, and the file holds little else
    rng = np.random.default_rng(0)
    tokens, header = 2000, Header("one", "grpo", "off", tuple(range(12)), 128, 8)
    routes = {name: np.argsort(rng.random((tokens, 12, 128)), -1)[..., :8] for name in traces.ROUTES}
    floats = {name: rng.random((tokens, 12, 8)) for name in traces.GATES}
    margins = {name: rng.random((tokens, 12)) for name in traces.MARGINS}
    path = traces.write(tmp_path, 1, header, {"step": np.full(tokens, 1), **routes, **floats, **margins})
    expected = traces.bytes_per_token(12, 8, 128) * tokens
    assert 0.7 * expected < path.stat().st_size < 1.02 * expected


def record(step: int, layer: int, ids: list[list[int]], **more: object) -> str:
    fields = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": 0, "num_tokens": len(ids)}
    return json.dumps({**fields, "topk": len(ids[0]), "top_indices": ids, **more}) + "\n"


def test_megatrons_router_trace(tmp_path: Path) -> None:
    path = tmp_path / "router_trace_rank3.jsonl"
    path.write_text(
        record(0, 1, [[5, 2], [0, 1]])
        + record(0, 2, [[1, 0], [3, 4]])
        + record(0, 0, [[7, 6], [7, 6]], block="mtp", mtp_idx=0)  # shares no layer with the decoder
        + record(0, 1, [[4, 3]])  # a second microbatch of the step
        + record(0, 2, [[2, 1]])
        + record(1, 1, [[0, 2]])  # layer 2 is missing from this step
        + record(2, 1, [[0, 2]])
        + record(2, 2, [[0, 2], [1, 2]])  # other tokens than layer 1
        + record(3, 1, [[0, 2]])[:40]  # the file ends in the middle
    )
    skipped: list[str] = []
    trace = megatron_trace.read(path, skipped.append)
    assert (trace.header.run, trace.header.layers, trace.header.experts, trace.header.topk) == ("rank 3", (1, 2), 6, 2)
    assert trace.columns["step"].tolist() == [0, 0, 0, 1]
    assert trace.columns["new_routes"].tolist() == [[[2, 5], [0, 1]], [[0, 1], [3, 4]], [[3, 4], [1, 2]], [[0, 2], [-1, -1]]]
    assert skipped == [f"{path}:9: cut short", f"{path}: step 2: its layers saw different numbers of tokens"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no complete record"),
        ("no json\n", "is not one JSON object a line"),
        ("[1]\n", ":1: is no record of a router"),
        ('{"step": 1}\n', r":1: is no record of a router \(no block\)"),
        (record(0, 1, [[1, 2]]) + record(0, 2, [[1]]), ":2: topk 1, and 2 before"),
        (record(0, 1, [[1, -2]]), ":1: expert -2"),
        (record(0, 1, [[1, 2]], topk=4), ":1: top_indices must be"),
    ],
)
def test_what_is_no_router_trace(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "router_trace_rank0.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=says):
        megatron_trace.read(path)
