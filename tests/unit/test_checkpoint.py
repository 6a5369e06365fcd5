"""Checkpoints: which one is found, which stay, and what is in them. Other layouts and whole runs: tests/distributed."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.config import OptimizerConfig
from models.convert import manifest
from models.initialise import global_shards
from models.model import MoEModel
from models.optimizer import Optimizer
from moe_rl import checkpoint, checkpoint_paths
from moe_rl.checkpoint import Progress
from parallel.errors import UsageError
from parallel.runtime import Runtime, started
from tests.distributed.passes import Case, built
from tests.distributed.updates import update

SETTINGS = OptimizerConfig(lr=1e-2, schedule="linear", warmup_updates=3, min_lr=1e-4, weight_decay=0.1)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


@pytest.fixture(scope="module")
def saved(runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a model of two layers."""
    path = tmp_path_factory.mktemp("saved") / "weights"
    with built(Case(model=dict(layers=2)), runtime) as model:
        checkpoint.save_weights(path, model)
    return path


def directories(folder: Path, *names: str) -> Path:
    """Each as a checkpoint of one file."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "metadata.json").write_text("{}", encoding="utf-8")
        manifest.write(folder / name, manifest.listed(folder / name, {}))
    return folder


def test_the_newest_is_the_highest_number_among_complete_ones(tmp_path: Path) -> None:
    directories(
        tmp_path, "step_000009", "step_000010", "step_1000000", ".step_000011.part", "reference", "step_12", "step_000013x"
    )
    (tmp_path / "step_9999999").write_text("a file", encoding="utf-8")
    assert checkpoint_paths.newest(tmp_path) == tmp_path / "step_1000000"


def test_a_half_written_one_counts_for_nothing(tmp_path: Path) -> None:
    directories(tmp_path, ".step_000011.part")
    assert checkpoint_paths.newest(tmp_path) is None
    assert checkpoint_paths.newest(tmp_path / "missing") is None
    with pytest.raises(UsageError, match=r"checkpoint\.load=.*holds no complete checkpoint; name a run"):
        checkpoint_paths.find(tmp_path)


def test_a_run_its_checkpoints_or_one_of_them_may_be_named(tmp_path: Path) -> None:
    directories(tmp_path, "checkpoints/step_000002", "checkpoints/step_000001")
    older, newer = (tmp_path / "checkpoints" / f"step_00000{i}" for i in (1, 2))
    assert [checkpoint_paths.find(p) for p in (tmp_path, tmp_path / "checkpoints", newer, older)] == [
        newer,
        newer,
        newer,
        older,
    ]


@pytest.mark.parametrize("path", ["", "missing", "checkpoints"])
def test_where_nothing_is_found_the_key_and_the_path_are_named(tmp_path: Path, path: str) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UsageError, match=re.escape(f"checkpoint.load={tmp_path / path}: holds no complete checkpoint")):
        checkpoint_paths.find(tmp_path / path)


def made(model: MoEModel) -> Optimizer:
    return model.optimizer(SETTINGS, total_updates=20)


def weights(model: MoEModel) -> dict[str, Tensor]:
    return {shard.key: shard.data.clone() for shard in global_shards(model.bare, model.groups)}


def state(optimizer: Optimizer) -> list[Tensor]:
    """Of every part in order: master weights, moments and step counts."""
    parts = [part.optimizer for part in optimizer.megatron.chained_optimizers]
    pairs = [(p, part.state[p]) for part in parts for group in part.param_groups for p in group["params"]]
    return [t.detach().clone() for p, moments in pairs for t in (p, *(moments[name] for name in sorted(moments)))]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


VARIANTS: list[dict[str, Any]] = [
    {},
    dict(dtype="bfloat16"),
    dict(router_score="sigmoid", load_balancing="expert_bias", expert_bias_rate=0.1, dense_layers=[1], shared_ffn=32),
    dict(tie_embeddings=True, recompute="full"),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=["plain", "bfloat16", "expert bias", "tied"])
@pytest.mark.parametrize("seed", range(2))
def test_training_goes_on_as_if_it_had_not_stopped(
    runtime: Runtime, tmp_path: Path, variant: dict[str, Any], seed: int
) -> None:
    """Two updates, saved, two more; against: loaded into a model of other weights, two more. All equal to the bit."""
    with built(Case(model=variant, seed=seed), runtime) as model:
        optimizer = made(model)
        for i in range(2):
            update(model, optimizer, i)
        torch.rand(5)
        path = checkpoint.save(tmp_path, Progress(3, 48, 12, 0.25), model, optimizer, keep=2)
        drawn = torch.rand(3)
        norms = [update(model, optimizer, i) for i in (2, 3)]
        wanted, wanted_state, lr = weights(model), state(optimizer), optimizer.lr
    with built(Case(model=variant, seed=seed + 100), runtime) as model:
        optimizer = made(model)
        assert checkpoint.load(path, model, optimizer) == Progress(3, 48, 12, 0.25)
        assert torch.equal(torch.rand(3), drawn)
        assert [update(model, optimizer, i) for i in (2, 3)] == norms
        ours = weights(model)
        assert ours.keys() == wanted.keys() and all(torch.equal(ours[key], wanted[key]) for key in wanted)
        assert same(state(optimizer), wanted_state)
        assert optimizer.lr == lr


def test_the_newest_stay(runtime: Runtime, tmp_path: Path) -> None:
    directories(tmp_path, "reference")
    with built(Case(model=dict(layers=1)), runtime) as model:
        optimizer = made(model)
        for step in (1, 2, 10):
            checkpoint.save(tmp_path, Progress(step, 0, 0, 0.0), model, optimizer, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["reference", "step_000002", "step_000010"]


def test_saving_again_replaces_and_what_was_cut_off_is_cleared(runtime: Runtime, tmp_path: Path) -> None:
    directories(tmp_path, ".step_000001.part")
    (tmp_path / ".step_000001.part" / "__0_0.distcp").write_text("rubbish", encoding="utf-8")
    with built(Case(model=dict(layers=1)), runtime) as model:
        optimizer = made(model)
        checkpoint.save(tmp_path, Progress(1, 5, 0, 0.0), model, optimizer, keep=2)
        update(model, optimizer, 0)
        wanted = weights(model)
        path = checkpoint.save(tmp_path, Progress(1, 6, 0, 0.0), model, optimizer, keep=2)
        update(model, optimizer, 1)
        assert checkpoint.load(path, model, optimizer).position == 6
        assert all(torch.equal(tensor, wanted[key]) for key, tensor in weights(model).items())
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (dict(layers=1), r"decoder\.layers\.1\.\S+ is \(.*\) there and absent here"),
        (dict(layers=3), r"decoder\.layers\.2\.\S+ is absent there and \(.*\) here"),
        (dict(hidden=32), r"is \(64,\) there and \(32,\) here"),
        (dict(experts=4), r"experts\.experts\.linear_fc1\.weight is \(8, 96, 64\) there and \(4, 96, 64\) here"),
        (dict(shared_ffn=32), r"shared_experts\.\S+ is absent there and \(64, 64\) here"),
        (dict(tie_embeddings=True), r"output_layer\.weight is \(320, 64\) there and absent here"),
        (dict(vocab_size=500), r"word_embeddings\.weight is \(320, 64\) there and \(512, 64\) here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(runtime: Runtime, saved: Path, other: dict[str, Any], text: str) -> None:
    """Whether it has less, more, or the same in another shape (case 26)."""
    wanted = rf"checkpoint\.load={re.escape(str(saved))}: does not fit this model: .*{text}; the model section must be"
    with built(Case(model=dict(layers=2) | other), runtime) as model, pytest.raises(UsageError, match=wanted):
        checkpoint.load_weights(saved, model)


def test_a_checkpoint_that_lost_a_file_cannot_be_read(runtime: Runtime, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "weights")
    (tmp_path / "weights" / "__0_0.distcp").unlink()
    with (
        built(Case(model=dict(layers=2)), runtime) as model,
        pytest.raises(UsageError, match=r"^checkpoint\.load=.*weights: is damaged: .*/__0_0\.distcp: No such file"),
    ):
        checkpoint.load_weights(tmp_path / "weights", model)


def test_weights_alone_load_into_a_model_that_trains_from_them(runtime: Runtime, tmp_path: Path) -> None:
    """The optimizer is made afterwards; its master weights are the loaded ones."""
    with built(Case(seed=1), runtime) as model:
        checkpoint.save_weights(tmp_path / "weights", model)
        optimizer = made(model)
        norm, wanted = update(model, optimizer, 0), weights(model)
    with built(Case(seed=2), runtime) as model:
        checkpoint.load_weights(tmp_path / "weights", model)
        optimizer = made(model)
        assert update(model, optimizer, 0) == norm
        assert all(torch.equal(tensor, wanted[key]) for key, tensor in weights(model).items())
