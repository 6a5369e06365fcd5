"""What a run says at its start about settings that work and may not be meant."""

from pathlib import Path
from typing import Any

import pytest

from models.convert import huggingface
from models.presets import PRESETS
from moe_rl.config import RunConfig
from moe_rl.notes import (
    changed_model_note,
    correction_note,
    group_note,
    idle_note,
    kl_note,
    notes,
    restricted_sampling_note,
    router_shift_note,
    warmup_note,
)
from tests.hf_checkpoints import make


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": dict(PRESETS["tiny_moe"]), **sections})


def test_a_model_that_is_made_another_is_exported_only_beside_a_fitting_configuration(tmp_path: Path) -> None:
    make("qwen3_moe", tmp_path)
    values = huggingface.describe(tmp_path).values
    assert changed_model_note(config(model={**values, "path": tmp_path, "max_positions": 64})) is None
    said = changed_model_note(config(model={**values, "path": tmp_path, "topk": 2}))
    assert said is not None and said.startswith(
        "model.topk=2: config.json of model.path says 3; the weights will be exported only"
    )


def test_plain_runs_are_told_nothing() -> None:
    assert notes(config()) == []
    assert notes(config(algorithm={"name": "grpo"}, replay={"mode": "r3"})) == []


def test_restricted_sampling_is_off_distribution() -> None:
    both = restricted_sampling_note(config(rollout={"top_p": 0.9, "top_k": 20}))
    assert both == (
        "rollout.top_p=0.9, rollout.top_k=20: samples are off-distribution: the tokens left out have a probability in training "
        "and none in sampling, and rollout/logprob_gap_mean holds that difference (rollout.logprobs=full leaves it out)"
    )
    one = restricted_sampling_note(config(rollout={"top_k": 5}))
    assert one is not None and one.startswith("rollout.top_k=5: samples")


def test_a_correction_weighs_what_top_p_left_out_unless_the_log_probabilities_are_full() -> None:
    algorithm = {"name": "grpo", "correction": {"mode": "tis"}}
    weighed = restricted_sampling_note(config(rollout={"top_p": 0.5}, algorithm=algorithm))
    assert weighed is not None and "; algorithm.correction.mode=tis weighs that too (rollout.logprobs=full" in weighed
    full = restricted_sampling_note(config(rollout={"top_p": 0.5, "logprobs": "full"}, algorithm=algorithm))
    assert full is not None and full.endswith(
        "; rollout.logprobs=full compares engine and trainer before that, so no correction sees it"
    )


@pytest.mark.parametrize("rollout", [{}, {"top_p": 1.0, "top_k": 0}, {"temperature": 0.7}, {"logprobs": "full"}])
def test_the_whole_distribution_needs_no_note(rollout: dict[str, Any]) -> None:
    assert restricted_sampling_note(config(rollout=rollout)) is None


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_router_shift_meets_gspos_narrow_clip(name: str) -> None:
    found = router_shift_note(config(algorithm={"name": name, "router_shift": True}))
    assert found is not None and found.startswith(f"algorithm.router_shift=true with algorithm.name={name}: ")
    assert "the clip range is 0.0003 / 0.0004" in found and "gmpo is the loss that the paper" in found
    assert router_shift_note(config(algorithm={"name": name})) is None


@pytest.mark.parametrize("name", ["gmpo", "grpo", "sapo", "cispo"])
def test_router_shift_is_no_surprise_elsewhere(name: str) -> None:
    assert router_shift_note(config(algorithm={"name": name, "router_shift": True})) is None


def test_small_groups() -> None:
    small = {"responses": 3, "prompts": 4}
    found = group_note(config(rollout=small))
    assert found == ("rollout.responses=3: a small group makes a noisy baseline; 8 and more are usual (DAPO 16, GRPO 64)")
    assert group_note(config(rollout={"responses": 8})) is None
    for name in ("reinforce_plus_plus", "ppo"):  # they compare with no group
        assert group_note(config(rollout=small, algorithm={"name": name})) is None


def test_every_note_is_one_line_of_the_run() -> None:
    found = notes(
        config(
            rollout={"responses": 2, "prompts": 4, "top_p": 0.9},
            algorithm={"name": "gspo", "clip_high": 0.2, "router_shift": True},
            replay={"mode": "r2"},
        )
    )
    assert [line.split("=")[0].split(":")[0] for line in found] == [
        "algorithm.clip_low",
        "replay.mode",
        "rollout.top_p",
        "algorithm.router_shift",
        "rollout.responses",
    ]
    assert not any("\n" in line for line in found)


def test_k1_in_the_loss_is_noise() -> None:
    found = kl_note(config(algorithm={"kl_coefficient": 0.1, "kl_estimator": "k1"}))
    assert found is not None and found.startswith("algorithm.kl_estimator=k1 in the loss: ")
    for algorithm in ({"kl_coefficient": 0.1}, {"kl_coefficient": 0.1, "kl_estimator": "k1", "kl_placement": "reward"}):
        assert kl_note(config(algorithm={"name": "rloo", **algorithm})) is None  # k1 in the reward is what it is for


def test_a_penalty_in_the_reward_under_a_division_by_the_deviation() -> None:
    algorithm = {"name": "grpo", "kl_coefficient": 0.1, "kl_placement": "reward"}
    found = kl_note(config(algorithm=algorithm))
    assert found is not None and "set algorithm.advantage_std=false or algorithm.kl_placement=loss" in found
    assert kl_note(config(algorithm=algorithm | {"advantage_std": False})) is None


def test_greedy_responses_to_a_problem_are_all_the_same() -> None:
    (found,) = notes(config(eval={"samples": 8}))
    assert found.startswith("eval.samples=8 with eval.temperature=0: greedy, the responses to a problem are all the same")
    assert notes(config(eval={"samples": 8, "temperature": 0.1})) == notes(config(eval={"samples": 1})) == []


def test_a_warm_up_that_never_ends() -> None:
    for steps, noted in ((3, True), (5, True), (6, False), (0, False)):
        found = warmup_note(config(algorithm={"name": "ppo"}, critic={"warmup_steps": 5}, run={"steps": steps}))
        assert (found is not None) == noted
    assert warmup_note(config(critic={"warmup_steps": 500})) is None  # no critic


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"critic": {"warmup_steps": 3}}, "critic (needs algorithm.name=ppo or algorithm.advantage=gae)"),
        ({"algorithm": {"sapo_tau_positive": 2.0}}, "algorithm.sapo_tau_positive (needs algorithm.name=sapo)"),
        ({"algorithm": {"router_shift_floor": 0.5}}, "algorithm.router_shift_floor (needs algorithm.router_shift=true)"),
        ({"algorithm": {"sampling_rounds": 9}}, "algorithm.sampling_rounds (needs algorithm.dynamic_sampling=true)"),
        (
            {"algorithm": {"kl_coefficient": 0.1, "kl_horizon": 5, "kl_error_limit": 0.5}},
            "algorithm.kl_horizon, algorithm.kl_error_limit (needs algorithm.kl_target)",
        ),
        ({"algorithm": {"reference_on_cpu": True}}, "algorithm.reference_on_cpu (needs algorithm.kl_coefficient above 0)"),
        (
            {"algorithm": {"correction": {"mode": "sequence_mask", "level": "sequence"}}},
            "algorithm.correction.level (needs algorithm.correction.mode=tis or mis)",
        ),
        (
            {"shaping": {"overlong_penalty": 2, "length_power": 1}},
            "shaping.overlong_penalty (needs shaping.overlong_buffer above 0); "
            "shaping.length_power (needs shaping.length_target)",
        ),
        (
            {"algorithm": {"name": "dr_grpo", "advantage_epsilon": 1e-3}, "replay": {"source": "r3"}},
            "algorithm.advantage_epsilon (needs an advantage that divides by a deviation); "
            "replay.source (needs replay.mode=filtered)",
        ),
        (
            {"algorithm": {"name": "gmpo", "router_shift": True, "minibatches": 1}},
            "algorithm.router_shift (needs several updates a batch: algorithm.minibatches or algorithm.epochs above 1)",
        ),
        ({"rollout": {"logprobs": "full"}}, "rollout.logprobs (needs rollout.top_p or rollout.top_k)"),
    ],
)
def test_settings_without_effect_are_named_with_what_they_need(sections: dict[str, Any], says: str) -> None:
    assert idle_note(config(**sections)) == f"without effect here: {says}"
    assert f"without effect here: {says}" in notes(config(**sections))


def test_settings_with_their_switch_are_not() -> None:
    shaping = {"overlong_penalty": 2, "overlong_buffer": 4, "length_power": 1, "length_target": 8}
    algorithm = {"name": "ppo", "kl_coefficient": 0.1, "kl_target": 1.0, "kl_horizon": 5, "reference_on_cpu": True}
    found = config(algorithm=algorithm, shaping=shaping, critic={"warmup_steps": 3}, rollout={"top_k": 9, "logprobs": "full"})
    assert idle_note(found) is None


def test_the_embedded_engine_needs_no_correction_but_for_what_top_p_leaves_out() -> None:
    algorithm = {"name": "grpo", "correction": {"mode": "tis"}}
    found = correction_note(config(algorithm=algorithm))
    assert found is not None and found.startswith("algorithm.correction.mode=tis: the embedded engine is the trained model")
    assert correction_note(config(algorithm=algorithm, rollout={"top_p": 0.9, "logprobs": "full"})) == found
    assert correction_note(config(algorithm=algorithm, rollout={"top_p": 0.9})) is None
    assert correction_note(config()) is None
