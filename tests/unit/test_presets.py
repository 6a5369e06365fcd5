"""run.preset: what it lays beneath a file, what wins over it, and what it refuses."""

from pathlib import Path

import pytest

from moe_rl.config import RunConfig, dump, load
from moe_rl.notes import notes
from moe_rl.presets import PRESETS
from parallel.errors import UsageError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("model: {preset: tiny_moe, max_positions: 40000}\n")
    return path


def values(config: RunConfig, name: str) -> list[object]:
    found = config.model_dump()
    return [found[section][key] for section, keys in PRESETS[name].values.items() for key in keys]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_run_with_its_values_and_its_source_in_the_log(file: Path, name: str) -> None:
    config = load(file, [f"run.preset={name}"])
    assert values(config, name) == [value for keys in PRESETS[name].values.values() for value in keys.values()]
    (note,) = [note for note in notes(config) if note.startswith(f"run.preset={name}: from ")]
    assert PRESETS[name].source in note and "set otherwise" not in note


def test_published_figures() -> None:
    # arXiv 2503.14476, section 4.1; 2402.03300, section 4.2; the articles' table by model size
    dapo, grpo = PRESETS["dapo_32b"].values, PRESETS["grpo_deepseekmath"].values
    assert (dapo["rollout"]["prompts"], dapo["rollout"]["responses"], dapo["shaping"]["overlong_buffer"]) == (512, 16, 4096)
    assert (grpo["rollout"]["responses"], grpo["algorithm"]["kl_coefficient"], grpo["optimizer"]["lr"]) == (64, 0.04, 1e-6)
    sizes = [PRESETS[name].values["rollout"]["responses"] for name in ("under_7b", "7b_to_70b", "over_70b")]
    assert sizes == [4, 8, 12]
    # the article's 0.1 would be three orders above the paper's
    assert PRESETS["over_70b_gspo"].values["algorithm"]["clip_high"] == 4e-4


def test_the_file_wins_and_the_log_says_what_is_otherwise(file: Path) -> None:
    config = load(file, ["run.preset=over_70b_grpo", "rollout.prompts=4", "optimizer.lr=1e-3"])
    assert (config.rollout.prompts, config.rollout.responses, config.optimizer.lr) == (4, 8, 1e-3)
    (note,) = [note for note in notes(config) if note.startswith("run.preset")]
    assert note.endswith("; set otherwise here: rollout.prompts, optimizer.lr")


def test_a_resolved_configuration_repeats_the_run(file: Path, tmp_path: Path) -> None:
    config = load(file, ["run.preset=dapo_32b"])
    (tmp_path / "again.yaml").write_text(dump(config))
    assert load(tmp_path / "again.yaml") == config


def test_a_preset_of_another_algorithm_is_refused(file: Path) -> None:
    says = "run.preset=over_70b_grpo: is for algorithm.name=grpo, and here it is gspo; set algorithm.name=grpo or take another"
    with pytest.raises(UsageError, match=says):
        load(file, ["run.preset=over_70b_grpo", "algorithm.name=gspo"])
    assert load(file, ["run.preset=under_7b", "algorithm.name=sapo"]).rollout.responses == 4  # of none in particular


def test_a_typo_is_likened(file: Path) -> None:
    with pytest.raises(UsageError, match=r"run.preset=over_70b_gpso: must be one of .*; did you mean over_70b_gspo\?"):
        load(file, ["run.preset=over_70b_gpso"])


def test_an_error_says_which_value_is_the_presets(file: Path) -> None:
    says = r"shaping.overlong_buffer=4096 \(from run.preset=dapo_32b\): must be below rollout.max_response_tokens=64"
    with pytest.raises(UsageError, match=says):
        load(file, ["run.preset=dapo_32b", "rollout.max_response_tokens=64"])
