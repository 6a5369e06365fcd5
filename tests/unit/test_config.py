"""Configurations: files, overrides, presets, and what is said about a wrong one."""

import re
from pathlib import Path

import pytest

from models.presets import PRESETS
from moe_rl import yaml_text
from moe_rl.config import RunConfig, check, dump, load
from parallel.errors import UsageError

ROOT = Path(__file__).parents[2]
FILE = """\
run: {name: one}
model: {preset: tiny_moe}
rollout:
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "one.yaml"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.name)
def test_every_config_loads_and_comes_back_from_its_dump(path: Path, tmp_path: Path) -> None:
    config = load(path)
    check(config, config.run.processes or config.parallel.fewest_processes)
    assert_same(config, tmp_path)


def assert_same(config: RunConfig, folder: Path) -> None:
    resolved = folder / "resolved.yaml"
    resolved.write_text(dump(config))
    assert load(resolved) == config


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["replay.mode=r2", "drift.enabled=false"], "replay.mode=r2"),
        (["replay.mode=r3"], "replay.mode=r3"),
        (["replay.mode=filtered", "drift.enabled=false"], "replay.mode=filtered"),
        ([], "drift.enabled=true"),
        (["drift.enabled=false", "drift.watch.grad_norm.action=replay"], "drift.watch.grad_norm.action=replay"),
    ],
)
def test_a_fused_router_is_refused_where_it_would_be_replayed_or_observed(file: Path, keys: list[str], reason: str) -> None:
    """Case 15."""
    with pytest.raises(UsageError, match=rf"^model\.router_fusion=true: .* so {re.escape(reason)} would do nothing, silently;"):
        load(file, ["model.router_fusion=true", *keys])
    free = ["model.router_fusion=true", "drift.enabled=false"]
    assert load(file, free).model.router_fusion
    assert load(file, [*free, "drift.watch.reward.action=replay", "drift.watch.enabled=false"]).model.router_fusion
    with pytest.raises(UsageError, match=r"^model\.router_fusion=true: its recomputation could choose other experts"):
        load(file, ["model.router_fusion=true", "drift.enabled=false", "model.recompute=full"])


@pytest.mark.parametrize(
    ("key", "constraint"),
    [
        ("replay.mode=r4", "'filtered'"),
        ("replay.source=off", "'r2' or 'r3'"),
        ("replay.keep_share=0", "greater than 0"),
        ("replay.keep_share=1.5", "less than or equal to 1"),
        ("drift.scores_share=1.5", "less than or equal to 1"),
    ],
)
def test_what_replay_and_drift_may_be(file: Path, key: str, constraint: str) -> None:
    with pytest.raises(UsageError, match=rf"^{re.escape(key)}: must be .*{constraint}"):
        load(file, [key])


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load_and_lie_beneath_the_file(file: Path, tmp_path: Path, name: str) -> None:
    windows = ["model.window_layers=[0]"] * ("window" in PRESETS[name])
    config = load(file, [f"model.preset={name}", "model.layers=3", "model.dense_layers=[0]", *windows])
    assert config.model.hidden == PRESETS[name]["hidden"]
    assert (config.model.layers, config.model.dense_layers) == (3, [0])
    assert_same(config, tmp_path)


def test_overrides(file: Path, tmp_path: Path) -> None:
    config = load(
        file,
        [
            "optimizer.lr=1e-6",  # YAML 1.1 takes this for text
            "replay.mode=off",  # and this for false
            "run.steps=1_000",
            "run.steps=20",
            "task.options={digits: 3}",
            "task.options.note='1e-6'",
            "checkpoint.load=",
            "run.dir=a b/c",
            "eval={every: 5}",
            "run.name=off",
        ],
    )
    assert (config.optimizer.lr, config.replay.mode, config.run.steps) == (1e-6, "off", 20)
    assert config.task.options == {"digits": 3, "note": "1e-6"}
    assert config.checkpoint.load is None
    assert config.run.dir == Path("a b/c")
    assert (config.eval.every, config.eval.samples) == (5, 1)
    assert config.run.name == "off"
    assert_same(config, tmp_path)


def test_overrides_three_levels_deep(file: Path, tmp_path: Path) -> None:
    config = load(
        file,
        ["drift.watch.reward.threshold=0.5", "drift.watch.reward={action: stop}", "drift.watch.signal.action=off"],
    )
    watch = config.drift.watch  # the second one of a key counts, a mapping as a whole
    assert (watch.reward.threshold, watch.reward.action, watch.signal.action) == (0.75, "stop", "off")
    assert load(file, ["drift.watch.reward.threshold=0.5"]).drift.watch.reward.threshold == 0.5
    assert_same(config, tmp_path)


def test_sections_with_nothing_under_them_are_empty(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text("run:\nmodel: {preset: tiny_moe}\ndrift:\n  watch:\n    reward:\n")
    assert load(path).drift == load(path, ["drift.watch.reward.threshold=0.75"]).drift
    path.write_text("model: {preset: tiny_moe}\ndrift:\n  watch:\n    reward: {threshold: 0.5}\n    signal:\n")
    assert load(path, ["drift.watch.signal.threshold=0.25"]).drift.watch.reward.threshold == 0.5


def test_the_base_lies_beneath_the_file(file: Path) -> None:
    base = {"run": {"name": "below", "steps": 7}, "rollout": {"prompts": 2}}
    config = load(file, [], base)
    assert (config.run.name, config.run.steps, config.rollout.prompts) == ("one", 7, 2)
    assert base["run"] == {"name": "below", "steps": 7}


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rollout.promts=4", "unknown key rollout.promts; did you mean rollout.prompts?"),
        ("run.lr=1", "unknown key run.lr; did you mean optimizer.lr?"),
        ("algorithm.router_shift=perhaps", "algorithm.router_shift=perhaps: must be true or false"),
        ("critic.lr=1", "unknown key critic.lr; did you mean critic.optimizer.lr?"),
        ("promts=4", "unknown key promts; did you mean rollout.prompts?"),
        ("drift.watch.reward.treshold=1", "key drift.watch.reward.treshold; did you mean drift.watch.reward.threshold?"),
        ("drift.watch.rewards.threshold=1", "unknown key drift.watch.rewards; did you mean drift.watch.reward?"),
        ("drift.wach.reward.threshold=1", "unknown key drift.wach; did you mean drift.watch?"),
        ("watch.reward.threshold=1", "unknown key watch; did you mean drift.watch?"),
        ("drift.reward.threshold=1", "unknown key drift.reward; did you mean drift.watch.reward?"),
        ("drift.watch.reward.threshold=1", "drift.watch.reward.threshold=1: must be less than 1"),
        ("drift.watch.reward.threshold=true", "drift.watch.reward.threshold=true: must be a number"),
        ("drift.watch.reward.threshold=.nan", "drift.watch.reward.threshold=nan: must be finite"),
        ("drift.watch.reward.threshold=", "drift.watch.reward.threshold=null: must be a valid number"),
        ("drift.watch.reward.action=sotp", "drift.watch.reward.action=sotp: must be 'off', 'log', 'save', 'stop' or 'replay'"),
        ("drift.watch.reward.action=sotp", "did you mean stop?"),
        ("drift.watch.reward=0.5", "drift.watch.reward=0.5: must be a section, a mapping of keys to values"),
        ("drift.watch=off", "drift.watch=off: must be a section, a mapping of keys to values"),
        (
            "drift.watch.reward.threshold.x=1",
            "override drift.watch.reward.threshold.x=1: drift.watch.reward.threshold is no section, it holds one value",
        ),
        ("rolout.prompts=4", "unknown key rolout; did you mean rollout?"),
        ("run.steps=many", "run.steps=many: must be a valid integer"),
        ("run.steps=-1", "run.steps=-1: must be greater than or equal to 0"),
        ("run.steps=1.5", "run.steps=1.5: must be a valid integer"),
        ("run.steps=true", "run.steps=true: must be a number"),
        ("run.steps=[1, 2]", "run.steps=[1, 2]: must be a valid integer"),
        ("run.name=12", "run.name=12: must be a valid string; put it in quotes"),
        ("run.name=../x", "run.name=../x: must match pattern"),
        ("run=5", "run=5: must be a section, a mapping of keys to values"),
        ("run.steps.x=3", "override run.steps.x=3: run.steps is no section, it holds one value"),
        ("run.optimizer=1", "unknown key run.optimizer; did you mean optimizer?"),
        ("run.warmup_steps=1", "unknown key run.warmup_steps; did you mean critic.warmup_steps?"),
        ("algorithm.name=gsp", "algorithm.name=gsp: must be 'ppo', 'reinforce_plus_plus', "),
        ("algorithm.name=gsp", " or 'sapo'; did you mean gspo?"),
        ("algorithm.minibatches=3", "algorithm.minibatches=3: must divide the batch"),
        ("optimizer.lr=.nan", "optimizer.lr=nan: must be finite"),
        ("optimizer.lr=.inf", "optimizer.lr=inf: must be finite"),
        ("model.preset=tiny_mo", "model.preset=tiny_mo: must be one of tiny_moe,"),
        ("model.preset=tiny_mo", "did you mean tiny_moe?"),
        ("model.preset=[1]", "model.preset=[1]: must be one of"),
        ("model.topk=9", "model.topk=9: must be at most model.experts=8"),
        ("model.dense_layers=[a]", "model.dense_layers[0]=a: must be a valid integer"),
        ("model=", "model=null: must be a section"),
        ("run.steps", "override run.steps: must be key.path=value, such as run.steps=20"),
        ("=3", "override =3: must be key.path=value"),
        ("run..steps=3", "override run..steps=3: must be key.path=value"),
        ("run.name={", "override run.name={: not valid YAML"),
        ("run={name: a, name: b}", "the key 'name' stands here twice"),
    ],
)
def test_what_is_said_about_an_override(file: Path, override: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        load(file, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run: [\n", "not valid YAML"),
        ("run:\n  name: a\n  steps: 3\n  name: b\n", ":4: not valid YAML: the key 'name' stands here twice"),
        ("run:\n\tname: a\n", ":2: not valid YAML"),
        ("- run\n", "must hold a mapping of sections (run:, model:, ...), not ['run']"),
        ("hello\n", "must hold a mapping of sections"),
        ("1: 2\nmodel: {preset: tiny_moe}\n", "unknown key 1"),
        ("", "model: missing; give model.preset"),
        ("model: {layers: 2}\n", "model.hidden: missing; give model.preset or the whole shape"),
        (
            "model: {preset: tiny_moe}\nrun: {stps: 1, nme: 2, steps: x}\n",
            "unknown key run.stps; did you mean run.steps? (and 2 more)",
        ),
    ],
)
def test_what_is_said_about_a_file(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path, file: Path) -> None:
    with pytest.raises(UsageError, match=f"on.yaml: no such file; did you mean {re.escape(str(file))}"):
        load(tmp_path / "on.yaml")
    with pytest.raises(UsageError, match="cannot be read as text: Is a directory"):
        load(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="binary.yaml: cannot be read as text"):
        load(tmp_path / "binary.yaml")


def test_the_layout_is_checked_against_model_and_world(file: Path) -> None:
    config = load(file, ["parallel.expert=2"])
    check(config, 2)
    with pytest.raises(UsageError, match="run.processes=3: must be a multiple of 2"):
        check(config, 3)
    with pytest.raises(UsageError, match="parallel.expert=3: must divide model.experts=8"):
        check(load(file, ["parallel.expert=3"]), 3)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("1e-6", 1e-6),
        ("1.", 1.0),
        (".5", 0.5),
        ("-3", -3),
        ("010", 10),
        ("0x10", 16),
        ("1_000", 1000),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("e5", "e5"),
        ("~", None),
        ("", None),
        ("none", "none"),
    ],
)
def test_scalars(text: str, value: object) -> None:
    read = yaml_text.parse(f"key: {text}", "here")["key"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "value", ["off", "1e-6", "true", "~", "", "0x1", "1_000", "a: b", "ä\n b", "1:30", 1e-300, 0.1, -0.0, None, True, 3]
)
def test_what_is_dumped_comes_back(value: object) -> None:
    assert yaml_text.parse(yaml_text.dump({"key": value}), "here") == {"key": value}


def test_values_of_a_mapping_may_be_shared() -> None:
    text = "w: &w {lr: 1, beta1: 0.5}\nx: &x {<<: *w, lr: 2}\ny: {<<: *x, steps: 2}\n"
    assert yaml_text.parse(text, "here")["y"] == {"lr": 2, "beta1": 0.5, "steps": 2}
