"""Megatron-Core's own router traces (`--moe-routing-trace-path`): router_trace_rankR.jsonl, one file a rank.

A line is one call of one layer's router: {"step", "block", "layer", "rank", "num_tokens", "topk", "top_indices"}. They hold
one pass, without tokens or log-probabilities, and pair nothing: load can be read from them, drift cannot.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.drift.traces import Header, Trace, TraceError

PATTERN = "router_trace_rank*.jsonl"
_RANK = re.compile(r"router_trace_rank(\d+)")

# (step, layer) -> the ids of each call, [tokens, K], in order
Calls = dict[int, dict[int, list[np.ndarray]]]


def files(directory: Path) -> list[Path]:
    """The router traces in a directory, by rank."""
    return sorted(directory.glob(PATTERN), key=lambda path: (len(path.name), path.name))


def read(path: Path, on_skip: Callable[[str], None] = lambda text: None) -> Trace:
    """One rank's file, as the columns `step` and `new_routes` (-1 where a layer is missing from a step).

    The k-th call of every layer in a step is taken as the same tokens. Layers are numbered as the rank's own blocks are:
    under pipeline parallelism every stage begins at 0. The number of experts is the highest id + 1. Multi-token-prediction
    blocks are left out, since their layer numbers meet those of the decoder. A last line cut short, and a step whose layers
    saw different numbers of tokens, are skipped and named to `on_skip`.
    Raises TraceError where no complete line is left or where a line is not such a record.
    """
    calls: Calls = {}
    topk: int | None = None
    for number, record in _records(path, on_skip):
        ids = _ids(path, number, record)
        if record["block"] != "decoder":
            continue
        if topk not in (None, ids.shape[1]):
            raise TraceError(f"{path}:{number}: topk {ids.shape[1]}, and {topk} before")
        topk = ids.shape[1]
        calls.setdefault(int(record["step"]), {}).setdefault(int(record["layer"]), []).append(ids)
    layers = tuple(sorted({layer for by_layer in calls.values() for layer in by_layer}))
    parts, steps = [], []
    for step, by_layer in sorted(calls.items()):
        stacked = {layer: np.concatenate(ids) for layer, ids in by_layer.items()}
        lengths = {len(ids) for ids in stacked.values()}
        if len(lengths) > 1:
            on_skip(f"{path}: step {step}: its layers saw different numbers of tokens")
            continue
        tokens = lengths.pop()
        missing = np.full((tokens, topk or 0), -1, np.int16)
        parts.append(np.stack([stacked.get(layer, missing) for layer in layers], axis=1))
        steps.append(np.full(tokens, step, np.int32))
    if not parts:
        raise TraceError(f"{path}: holds no complete record of a decoder's router")
    routes = np.sort(np.concatenate(parts), axis=-1)
    rank = _RANK.match(path.name)
    header = Header(f"rank {rank[1] if rank else '?'}", "", "", layers, int(routes.max()) + 1, routes.shape[2])
    return Trace(header, {"step": np.concatenate(steps), "new_routes": routes}, len(routes))


def _records(path: Path, on_skip: Callable[[str], None]) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith("\n"):
                    on_skip(f"{path}:{number}: cut short")
                    return
                yield number, json.loads(line)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise TraceError(f"{path}: is not one JSON object a line: {error}") from error


def _ids(path: Path, number: int, record: Any) -> np.ndarray:
    if not isinstance(record, dict):
        raise TraceError(f"{path}:{number}: is no record of a router")
    if missing := [key for key in ("step", "block", "layer", "topk", "top_indices") if key not in record]:
        raise TraceError(f"{path}:{number}: is no record of a router (no {missing[0]})")
    try:
        ids = np.array(record["top_indices"], dtype=np.int16).reshape(-1, int(record["topk"]))
    except (ValueError, TypeError, OverflowError) as error:
        raise TraceError(f"{path}:{number}: top_indices must be [tokens, topk] ids: {error}") from error
    if ids.size and ids.min() < 0:
        raise TraceError(f"{path}:{number}: expert {ids.min()}; ids begin at 0")
    return ids
