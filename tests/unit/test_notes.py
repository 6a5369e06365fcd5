"""What a run says at its start about settings that work and may not be meant."""

from typing import Any

import pytest

from models.config import PRESETS
from moe_rl.config import RunConfig
from moe_rl.notes import group_note, notes, restricted_sampling_note, router_shift_note


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": dict(PRESETS["tiny_moe"]), **sections})


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
    assert group_note(config(rollout={"responses": 4})) is None
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
