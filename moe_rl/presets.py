"""Named settings from papers and articles: `run.preset`. The file and the command line lie above them."""

from typing import Any, NamedTuple

from moe_rl import config_values
from moe_rl.config_errors import near, show
from parallel.errors import UsageError


class Preset(NamedTuple):
    """source: where the numbers are from. note: what of them was left out or read otherwise, and why."""

    source: str
    note: str
    values: dict[str, dict[str, Any]]


_ARTICLE = "the seed articles' table by model size; no paper was found that says so"

PRESETS: dict[str, Preset] = {
    "grpo_deepseekmath": Preset(
        "arXiv 2402.03300, section 4.2 (7B)",
        "16 prompts of 64 responses are its batch of 1024; one update a batch",
        {
            "rollout": {"prompts": 16, "responses": 64, "max_response_tokens": 1024},
            "algorithm": {"name": "grpo", "minibatches": 1, "kl_coefficient": 0.04},
            "optimizer": {"lr": 1e-6},
        },
    ),
    "dapo_32b": Preset(
        "arXiv 2503.14476, section 4.1 (32B, dense)",
        "512 prompts of 16 responses in 16 updates; responses of 20,480 tokens, the last 4,096 of them the soft zone",
        {
            "rollout": {"prompts": 512, "responses": 16, "max_response_tokens": 20480},
            "algorithm": {"name": "dapo", "minibatches": 16},
            "shaping": {"overlong_buffer": 4096},
            "optimizer": {"lr": 1e-6, "warmup_updates": 320},
        },
    ),
    "gspo_30b_a3b": Preset(
        "arXiv 2507.18071, section 5.1 (Qwen3-30B-A3B)",
        "the paper states the clip range and 4 updates a batch; batch, group size and learning rate it does not state",
        {"algorithm": {"name": "gspo", "minibatches": 4, "clip_low": 3e-4, "clip_high": 4e-4}},
    ),
    "under_7b": Preset(
        _ARTICLE,
        "the table says groups of 4, and elsewhere that 8 responses a prompt are the least; papers: 16 (DAPO), 64 (GRPO)",
        {"rollout": {"responses": 4}},
    ),
    "7b_to_70b": Preset(_ARTICLE, "papers: 16 (DAPO, 32B)", {"rollout": {"responses": 8}}),
    "over_70b": Preset(_ARTICLE, "", {"rollout": {"responses": 12}}),
    "over_70b_grpo": Preset(
        "a seed article's preset for 70B; no paper was found that says so",
        "its clip epsilon of 0.15 is taken for both sides; 32 is read as prompts a step",
        {
            "rollout": {"prompts": 32, "responses": 8},
            "algorithm": {"name": "grpo", "clip_low": 0.15, "clip_high": 0.15, "kl_coefficient": 0.02},
            "optimizer": {"lr": 5e-6},
        },
    ),
    "over_70b_gspo": Preset(
        "a seed article's preset for 70B; no paper was found that says so",
        "its clip epsilon of 0.1 is replaced by the GSPO paper's 3e-4 / 4e-4; its length penalty of 0.8 is left out: the "
        "article does not say what it multiplies",
        {
            "rollout": {"prompts": 24, "responses": 6},
            "algorithm": {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
            "optimizer": {"lr": 3e-6},
        },
    ),
}


def beneath(values: dict[str, Any]) -> dict[str, Any]:
    """`values` laid over those of the preset that they name, if they name one. Raises UsageError where there is none of that
    name, or where it belongs to another algorithm."""
    run, algorithm = values.get("run"), values.get("algorithm")
    name = run.get("preset") if isinstance(run, dict) else None
    if name is None:
        return values
    if not isinstance(name, str) or name not in PRESETS:
        raise UsageError(f"run.preset={show(name)}: must be one of {', '.join(PRESETS)}{near(str(name), PRESETS)}")
    own = PRESETS[name].values
    wanted, given = own.get("algorithm", {}).get("name"), algorithm.get("name") if isinstance(algorithm, dict) else None
    if wanted is not None and given is not None and wanted != given:
        raise UsageError(
            f"run.preset={name}: is for algorithm.name={wanted}, and here it is {show(given)}; set algorithm.name={wanted} or "
            "take another preset"
        )
    return config_values.merged(own, values)
