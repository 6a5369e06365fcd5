"""Lines that a run says at its start: settings that work, and that a user may not have meant."""

from moe_rl.algorithms.config import clip_warning
from moe_rl.config import RunConfig
from moe_rl.presets import PRESETS
from moe_rl.replay import replay_note

# Larger groups and smaller ones were published; below this a group's mean says little
_SMALL_GROUP = 4


def notes(config: RunConfig) -> list[str]:
    """One line each."""
    found = [
        preset_note(config),
        clip_warning(config.algorithm),
        replay_note(config.replay, config.algorithm),
        restricted_sampling_note(config),
        router_shift_note(config),
        group_note(config),
    ]
    return [note for note in found if note is not None]


def preset_note(config: RunConfig) -> str | None:
    if config.run.preset is None:
        return None
    preset = PRESETS[config.run.preset]
    mine = config.model_dump()
    other = [
        f"{section}.{key}"
        for section, values in preset.values.items()
        for key, value in values.items()
        if mine[section][key] != value
    ]
    text = f"run.preset={config.run.preset}: from {preset.source}{'; ' * bool(preset.note)}{preset.note}"
    return text + f"; set otherwise here: {', '.join(other)}" * bool(other)


def restricted_sampling_note(config: RunConfig) -> str | None:
    """Top-p and top-k draw from another distribution than the one that is trained."""
    rollout, correction = config.rollout, config.algorithm.correction
    if not rollout.is_restricted:
        return None
    keys = [f"rollout.top_p={rollout.top_p:g}"] * (rollout.top_p < 1) + [f"rollout.top_k={rollout.top_k}"] * (rollout.top_k > 0)
    text = (
        f"{', '.join(keys)}: samples are off-distribution: the tokens left out have a probability in training and none in "
        "sampling"
    )
    if rollout.logprobs == "full":
        return f"{text}; rollout.logprobs=full compares engine and trainer before that, so no correction sees it"
    effect = f"; algorithm.correction.mode={correction.mode} weighs that too" if correction.mode != "off" else ""
    return f"{text}, and rollout/logprob_gap_mean holds that difference{effect} (rollout.logprobs=full leaves it out)"


def router_shift_note(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    if not algorithm.router_shift or algorithm.spec.objective not in ("gspo", "gspo_token") or algorithm.clip is None:
        return None
    return (
        f"algorithm.router_shift=true with algorithm.name={algorithm.name}: its factors are at most 1 and the clip range is "
        f"{algorithm.clip[0]:g} / {algorithm.clip[1]:g}, so that negative advantages are soon clipped away; gmpo is the loss "
        "that the paper (arXiv 2510.23027) joins it with"
    )


def group_note(config: RunConfig) -> str | None:
    algorithm, responses = config.algorithm, config.rollout.responses
    if algorithm.estimator in ("batch", "gae") or responses >= _SMALL_GROUP:
        return None
    return f"rollout.responses={responses}: a small group makes a noisy baseline; 8 and more are usual (DAPO 16, GRPO 64)"
