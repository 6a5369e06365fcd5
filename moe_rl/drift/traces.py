"""Trace files: what every token chose and how likely it was. One Parquet file a traced step: traces/step_NNNNNN.parquet.

A row is one token that entered the model in one update. Neither torch nor a GPU is needed to read or write them.
L MoE layers, K experts a token. In memory a list that is null reads -1 (routes) or NaN (gates, margins), and a number that
is null reads NaN.
"""

import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from parallel.errors import UsageError

VERSION = 1
FOLDER = "traces"
PATTERN = "step_*.parquet"
ROUTES = ("rollout_routes", "old_routes", "new_routes")
GATES = {"old_gates": "old_routes", "new_gates": "new_routes"}  # the gate of each id in the routes beside it
MARGINS = ("old_margin", "new_margin")
SCALARS: dict[str, pa.DataType] = {
    "step": pa.int32(),
    "update": pa.int16(),  # the minibatch's number in the step
    "policy_version": pa.int32(),  # of the weights that sampled
    "sample": pa.int32(),  # index of the rollout in the step
    "position": pa.int32(),  # in prompt + response
    "token": pa.int32(),  # the id that enters
    "target": pa.int32(),  # the id that is predicted
    "response": pa.bool_(),  # the target is a response token
    "advantage": pa.float32(),
    "reward": pa.float32(),  # of the sequence
    "clipped": pa.bool_(),  # the gradient of the token, or of its sequence, is cut
    "rollout_logprob": pa.float32(),  # nats; null where response is false
    "old_logprob": pa.float32(),
    "train_logprob": pa.float32(),
}
COLUMNS = (*SCALARS, *ROUTES, *GATES, *MARGINS)
_KEY = b"moe_rl"
# Floats hardly repeat: split by byte they take a quarter less than under Parquet's default, which begins a dictionary
_FLOATS = [name for name, dtype in SCALARS.items() if dtype == pa.float32()]
_ENCODING = {
    "compression": "zstd",
    "use_dictionary": [name for name in SCALARS if name not in _FLOATS],
    "use_byte_stream_split": [*_FLOATS, *(f"{name}.list.element" for name in (*GATES, *MARGINS))],
}


class TraceError(UsageError):
    """A file that is no complete trace. The text names it and says why."""


class TraceWarning(UserWarning):
    """A trace file that was skipped."""


@dataclass(frozen=True)
class Header:
    """What holds for every row. layers: 0-based model layers of the L MoE layers, in order. replay: replay.mode."""

    run: str
    algorithm: str
    replay: str
    layers: tuple[int, ...]
    experts: int
    topk: int
    version: int = VERSION


@dataclass(frozen=True)
class Trace:
    """One file. columns: name -> array of T rows; a column without a single value is absent.

    Routes int16 [T, L, K], gates float32 [T, L, K], margins float32 [T, L], the others [T].
    """

    header: Header
    columns: Mapping[str, np.ndarray]
    tokens: int

    def get(self, name: str) -> np.ndarray | None:
        return self.columns.get(name)


def bytes_per_token(
    layers: int, topk: int, experts: int, routes: int = 3, gates: int = 2, margins: int = 2, unknown: bool = False
) -> int:
    """Bytes of a row before compression: 47 of numbers, and L x K ids, L x K gates and L margins for each pass.

    routes, gates, margins: how many of the 3, 2 and 2 such columns are recorded. An id takes 1 byte up to 256 experts and
    none unknown, else 2. By default 4,655 for 48 layers of 8 in 128 experts.
    """
    numbers = sum(dtype.bit_width for dtype in SCALARS.values()) / 8
    width = 1 if experts <= 256 and not unknown else 2
    return math.ceil(numbers) + layers * (topk * (routes * width + gates * 4) + margins * 4)


def write(directory: Path, step: int, header: Header, columns: Mapping[str, np.ndarray]) -> Path:
    """Writes `directory`/traces/step_NNNNNN.parquet (directory: the run's), aside first and then renamed.

    columns: as `Trace` has them, routes [T, L, K] or [T, L * K] in any order of ids: they are sorted within a layer, with
    their gates. A column that is left out, a row of routes that is -1 throughout, and NaN become null.
    Raises ValueError at an unknown name or a wrong shape.
    """
    if unknown := sorted(set(columns) - set(COLUMNS)):
        raise ValueError(f"columns {', '.join(unknown)}: must be among {', '.join(COLUMNS)}")
    tokens = len(next(iter(columns.values()))) if columns else 0
    arranged = _arranged(header, columns, tokens)
    arrays = {name: _to_arrow(name, arranged.get(name), header, tokens) for name in COLUMNS}
    table = pa.table(arrays).replace_schema_metadata({_KEY: json.dumps(asdict(header)).encode()})
    path = directory / FOLDER / f"step_{step:06d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        pq.write_table(table, file, **_ENCODING)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    return path


def files(directory: Path) -> list[Path]:
    """The trace files of a run directory, in order of steps."""
    return sorted((directory / FOLDER).glob(PATTERN))


def read(path: Path, columns: Sequence[str] = COLUMNS) -> Trace:
    """One file, or only some of its columns. Raises TraceError where it is cut short, or no trace."""
    try:
        with pq.ParquetFile(path) as file:
            header = _header(path, file.schema_arrow.metadata or {})
            if missing := [name for name in columns if name not in file.schema_arrow.names]:
                raise TraceError(f"{path}: has no column {missing[0]}")
            table = file.read(columns=list(columns))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise TraceError(f"{path}: cut short or no Parquet file: {' '.join(str(error).split())[:120]}") from error
    found = {name: _from_arrow(path, name, table.column(name), header) for name in columns}
    return Trace(header, {name: values for name, values in found.items() if values is not None}, table.num_rows)


def read_run(
    directory: Path, on_skip: Callable[[str], None] | None = None, columns: Sequence[str] = COLUMNS
) -> Iterator[Trace]:
    """Every complete file of a run directory, in order of steps, one in memory at a time.

    A file that is cut short, or of a model of another shape than the first one's, is skipped: its name and the reason go
    to `on_skip`, or into a TraceWarning.
    """
    shape = None
    for path in files(directory):
        try:
            trace = read(path, columns)
            its = (trace.header.layers, trace.header.experts, trace.header.topk)
            if shape not in (None, its):
                raise TraceError(f"{path}: of a model with other layers, experts or topk than the files before it")
        except TraceError as error:
            if on_skip is None:
                warnings.warn(f"skipped {error}", TraceWarning, stacklevel=2)
            else:
                on_skip(str(error))
            continue
        shape = its
        yield trace


def _header(path: Path, metadata: Mapping[bytes, bytes]) -> Header:
    if _KEY not in metadata:
        raise TraceError(f"{path}: is a Parquet file, but not a trace (no metadata under {_KEY.decode()})")
    try:
        values: dict[str, Any] = json.loads(metadata[_KEY])
        header = Header(**{**values, "layers": tuple(values["layers"])})
    except (ValueError, TypeError, KeyError) as error:
        raise TraceError(f"{path}: its metadata is not that of a trace: {error}") from error
    if header.version != VERSION:
        raise TraceError(f"{path}: trace version {header.version}; this moe-rl reads version {VERSION}")
    return header


def _arranged(header: Header, columns: Mapping[str, np.ndarray], tokens: int) -> dict[str, np.ndarray]:
    """Columns of the right shape, ids ascending within a layer."""
    layers, topk = len(header.layers), header.topk
    found: dict[str, np.ndarray] = {}
    for name, values in columns.items():
        shape = (tokens,) if name in SCALARS else (tokens, layers) if name in MARGINS else (tokens, layers, topk)
        array = np.asarray(values)
        if array.shape[:1] != shape[:1] or array.size != math.prod(shape):
            raise ValueError(f"{name}: shape {array.shape}, must be {shape}")
        found[name] = array.reshape(shape)
    for name in ROUTES:
        if name not in found:
            continue
        ids = found[name]
        if ids.size and (ids.min() < -1 or ids.max() >= header.experts):
            raise ValueError(f"{name}: ids must be -1 (unknown) or in [0, {header.experts})")
        order = np.argsort(ids, axis=-1, kind="stable")
        for place in (name, *(gates for gates, routes in GATES.items() if routes == name)):
            if place in found:
                found[place] = np.take_along_axis(found[place], order, -1)
    return found


def _to_arrow(name: str, values: np.ndarray | None, header: Header, tokens: int) -> pa.Array:
    if name in SCALARS:
        if values is None:
            return pa.nulls(tokens, SCALARS[name])
        null = np.isnan(values) if values.dtype.kind == "f" else None
        return pa.array(values, SCALARS[name], mask=null)
    size = len(header.layers) * (1 if name in MARGINS else header.topk)
    if values is None:
        values = np.full((tokens, size), -1 if name in ROUTES else np.nan)
    values = values.reshape(tokens, size)
    if name in ROUTES:
        null = (values == -1).all(-1)
        narrow = header.experts <= 256 and not (values[~null] == -1).any()
        flat = np.where(null[:, None], 0, values).astype(np.uint8 if narrow else np.int16)
    else:
        null, flat = np.isnan(values).all(-1), values.astype(np.float32)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), size, mask=pa.array(null))


def _from_arrow(path: Path, name: str, column: pa.ChunkedArray, header: Header) -> np.ndarray | None:
    if len(column) and column.null_count == len(column):
        return None
    kind = column.type
    if name in SCALARS:
        if kind != SCALARS[name]:
            raise TraceError(f"{path}: {name} is {kind}, must be {SCALARS[name]}")
        if kind == pa.float32():
            return column.to_numpy()  # null -> NaN
        return column.fill_null(False if kind == pa.bool_() else -1).to_numpy()
    layers, topk = len(header.layers), header.topk
    size = layers * (1 if name in MARGINS else topk)
    if not pa.types.is_fixed_size_list(kind) or kind.list_size != size:
        raise TraceError(f"{path}: {name} is {kind}, must be lists of {size}")
    array = column.combine_chunks()
    known = array.is_valid().to_numpy(zero_copy_only=False)
    values = np.full((len(array), size), -1 if name in ROUTES else np.nan, np.int16 if name in ROUTES else np.float32)
    values[known] = array.flatten().to_numpy(zero_copy_only=False).reshape(-1, size)
    if name in ROUTES and values.size and values.max() >= header.experts:
        raise TraceError(f"{path}: {name} holds expert {values.max()}; the model has {header.experts}")
    return values if name in MARGINS else values.reshape(-1, layers, topk)
