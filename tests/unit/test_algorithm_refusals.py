"""Settings that contradict the algorithm: one line each, with the key, its value, the reason and what to do."""

import re
from pathlib import Path

import pytest

from moe_rl.algorithms.table import ALGORITHMS, ANY_AGGREGATION, ANY_ESTIMATOR, SEQUENCE_OBJECTIVES, Name
from moe_rl.config import RunConfig, load
from parallel.errors import UsageError

BASE = "model: {preset: tiny_moe}\nrollout: {prompts: 4, responses: 4, max_response_tokens: 16}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(BASE)
    return path


def run(file: Path, name: str, *keys: str) -> RunConfig:
    return load(file, [f"algorithm.name={name}", *keys])


def refusal(file: Path, name: str, *keys: str) -> str:
    with pytest.raises(UsageError) as caught:
        run(file, name, *keys)
    text = str(caught.value)
    assert "\n" not in text and "Value error" not in text
    return text


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_other_aggregation_is_refused(file: Path, name: Name) -> None:
    spec = ALGORITHMS[name]
    for kind in ANY_AGGREGATION:
        if kind in spec.aggregations:
            assert run(file, name, f"algorithm.aggregation={kind}").algorithm.aggregates == kind
            continue
        says = refusal(file, name, f"algorithm.aggregation={kind}")
        assert says.startswith(f"algorithm.aggregation={kind}: contradicts algorithm.name={name}: {spec.why}")
        assert says.endswith(f"; must be {' or '.join(spec.aggregations)}")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_other_advantage_is_refused(file: Path, name: Name) -> None:
    spec = ALGORITHMS[name]
    for estimator in ANY_ESTIMATOR:
        if estimator in spec.advantages:
            assert run(file, name, f"algorithm.advantage={estimator}").algorithm.estimator == estimator
            continue
        says = refusal(file, name, f"algorithm.advantage={estimator}")
        assert says.startswith(f"algorithm.advantage={estimator}: contradicts algorithm.name={name}: {spec.why}")
        assert says.endswith(f"; must be {' or '.join(spec.advantages)}")


def test_what_is_refused_is_what_the_papers_say(file: Path) -> None:
    """By name, beside the table: DAPO's loss is a token mean, GSPO and GMPO have one term a sequence, and so on."""
    for name, key in [
        ("dapo", "aggregation=seq_mean_token_mean"),
        ("dr_grpo", "aggregation=seq_mean_token_mean"),
        ("dr_grpo", "aggregation=token_mean"),
        ("gspo", "aggregation=token_mean"),
        ("gspo", "aggregation=constant"),
        ("gspo_token", "aggregation=token_mean"),
        ("gmpo", "aggregation=seq_mean_token_sum"),
        ("grpo", "advantage=leave_one_out"),
        ("grpo", "advantage=gae"),
        ("rloo", "advantage=group"),
        ("ppo", "advantage=group"),
        ("gspo", "advantage=gae"),
        ("gmpo", "advantage=batch"),
        ("reinforce_plus_plus", "advantage=group"),
    ]:
        assert refusal(file, name, f"algorithm.{key}").startswith(f"algorithm.{key}: contradicts")


@pytest.mark.parametrize(
    ("name", "keys", "says"),
    [
        (
            "dr_grpo",
            ["algorithm.advantage_std=true"],
            "algorithm.advantage_std=true: contradicts algorithm.name=dr_grpo: .*group's deviation; name grpo to have them",
        ),
        (
            "rloo",
            ["algorithm.advantage_std=false"],
            "algorithm.advantage_std=false: only the group estimator .* algorithm.advantage is leave_one_out; leave it out",
        ),
        ("ppo", ["algorithm.advantage_std=true"], "algorithm.advantage_std=true: .* algorithm.advantage is gae; leave it out"),
        (
            "grpo",
            ["algorithm.clip_low=1"],
            "algorithm.clip_low=1: must be below 1; only cispo goes without a lower bound",
        ),
        ("gmpo", ["algorithm.clip_low=1.0"], "algorithm.clip_low=1: must be below 1; only cispo"),
        ("cispo", ["algorithm.clip_low=1.5"], "algorithm.clip_low=1.5: must be less than or equal to 1"),
        ("grpo", ["algorithm.clip_low=0"], "algorithm.clip_low=0: must be greater than 0"),
        (
            "sapo",
            ["algorithm.clip_high=0.3"],
            "algorithm.clip_high=0.3: algorithm.name=sapo has no clip range.* set algorithm.sapo_tau",
        ),
        (
            "sapo",
            ["algorithm.clip_low=0.2"],
            "algorithm.clip_low=0.2: algorithm.name=sapo has no clip range.* set algorithm.sapo_tau",
        ),
        ("sapo", ["algorithm.sapo_tau_negative=0"], "algorithm.sapo_tau_negative=0: must be greater than 0"),
        (
            "grpo",
            ["algorithm.aggregation_length=8"],
            "algorithm.aggregation_length=8: only algorithm.aggregation=constant .* seq_mean_token_mean; leave it out",
        ),
        (
            "dr_grpo",
            ["algorithm.aggregation=seq_mean_token_sum", "algorithm.aggregation_length=8"],
            "algorithm.aggregation_length=8: only algorithm.aggregation=constant",
        ),
        (
            "grpo",
            ["algorithm.kl_target=0.1"],
            "algorithm.kl_target=0.1: there is no KL term; set algorithm.kl_coefficient above",
        ),
        ("grpo", ["algorithm.kl_placement=reward"], "algorithm.kl_placement=reward: there is no KL term; set algorithm.kl_co"),
        ("grpo", ["algorithm.kl_estimator=k2"], "algorithm.kl_estimator=k2: there is no KL term; set algorithm.kl_coefficient"),
        ("grpo", ["algorithm.router_shift_floor=0"], "algorithm.router_shift_floor=0: must be greater than 0"),
        (
            "dapo",
            ["shaping.overlong_buffer=16"],
            "shaping.overlong_buffer=16: must be below rollout.max_response_tokens=16",
        ),
        (
            "gspo",
            ["algorithm.router_shift=true", "model.router_fusion=true", "drift.enabled=false"],
            "model.router_fusion=true: .* so algorithm.router_shift=true would do nothing, silently; set model.router_fusion=",
        ),
        (
            "gmpo",
            ["algorithm.router_shift=true", "model.dense_layers=[0,1,2,3]"],
            "algorithm.router_shift=true: model.dense_layers leaves no layer that routes; leave it out",
        ),
        (
            "gmpo",
            ["algorithm.router_shift=true", "model.experts=0", "model.topk=0", "model.moe_ffn=0"],
            "algorithm.router_shift=true: model.experts=0 leaves no layer that routes; leave it out",
        ),
        ("gspo_tokens", [], "algorithm.name=gspo_tokens: must be .*; did you mean gspo_token?"),
    ],
)
def test_contradictions(file: Path, name: str, keys: list[str], says: str) -> None:
    assert re.match(says.replace("?", r"\?"), refusal(file, name, *keys))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_response_a_prompt_needs_advantages_that_do_without_groups(file: Path, name: str) -> None:
    keys = ["rollout.responses=1"]
    if name in ("ppo", "reinforce_plus_plus"):
        assert run(file, name, *keys).rollout.responses == 1
        says = refusal(file, name, *keys, "algorithm.dynamic_sampling=true")
        assert says.startswith("rollout.responses=1: algorithm.dynamic_sampling=true compares") and "at least 2" in says
    else:
        says = refusal(file, name, *keys)
        assert says.startswith(f"rollout.responses=1: algorithm.name={name} with algorithm.advantage=") and "at least 2" in says


@pytest.mark.parametrize("name", ALGORITHMS)
def test_weights_of_tokens_need_terms_of_tokens(file: Path, name: Name) -> None:
    by_sequence = ALGORITHMS[name].objective in SEQUENCE_OBJECTIVES
    assert by_sequence == (name in ("gspo", "gmpo"))
    for mode in ("tis", "mis", "icepop"):
        key = f"algorithm.correction.mode={mode}"
        if by_sequence:
            says = refusal(file, name, key)
            assert says.startswith(f"{key}: weighs tokens one by one, and algorithm.name={name} has one term a sequence; set ")
        else:
            assert run(file, name, key).algorithm.correction.mode == mode
    for keys in (["mode=sequence_mask"], ["mode=tis", "level=sequence"], ["mode=mis", "level=sequence"]):
        assert run(file, name, *(f"algorithm.correction.{key}" for key in keys)).algorithm.correction.mode != "off"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["mode=icepop", "level=sequence"], "algorithm.correction.level=sequence: icepop decides for each token; set "),
        (["mode=tis", "low=0.5"], "algorithm.correction.low=0.5: tis has no lower bound; leave it out, or set "),
        (["mode=mis", "low=0.5"], "algorithm.correction.low=0.5: mis has no lower bound; leave it out, or set "),
        (["mode=icepop", "low=5"], "algorithm.correction.low=5: must be below algorithm.correction.high=5"),
        (["mode=icepop", "high=0.4"], "algorithm.correction.low=0.5: must be below algorithm.correction.high=0.4"),
        (["mode=sequence_mask", "low=1.0005"], "algorithm.correction.low=1.0005: must be at most 1, the ratio of an engine"),
        (["mode=sequence_mask", "high=0.9995"], "algorithm.correction.high=0.9995: must be at least 1, the ratio of an engine"),
        (["mode=tis", "high=0.5"], "algorithm.correction.high=0.5: must be at least 1, the ratio of an engine"),
        (["mode=icepop", "low=2"], "algorithm.correction.low=2: must be at most 1, the ratio of an engine"),
        (["high=3"], "algorithm.correction.high=3: nothing is corrected; set algorithm.correction.mode"),
        (["mode=tis", "high=0"], "algorithm.correction.high=0: must be greater than 0"),
    ],
)
def test_bounds_of_corrections(file: Path, keys: list[str], says: str) -> None:
    assert refusal(file, "grpo", *(f"algorithm.correction.{key}" for key in keys)).startswith(says)


@pytest.mark.parametrize(
    ("mode", "bounds"),
    [
        ("tis", (None, 2.0)),  # verl's default
        ("mis", (None, 2.0)),
        ("icepop", (0.5, 5.0)),  # arXiv 2510.18855
        ("sequence_mask", (0.999, 1.001)),
    ],
)
def test_default_bounds_of_corrections(file: Path, mode: str, bounds: tuple[float | None, float]) -> None:
    assert run(file, "grpo", f"algorithm.correction.mode={mode}").algorithm.correction.bounds == bounds


def test_a_critics_optimizer_keeps_its_own_defaults(file: Path) -> None:
    assert run(file, "ppo").critic.optimizer.lr == 1e-5
    found = run(file, "ppo", "critic.optimizer.grad_clip=0.5").critic.optimizer
    assert (found.lr, found.grad_clip) == (1e-5, 0.5)
    assert run(file, "ppo").optimizer.lr == 1e-6
