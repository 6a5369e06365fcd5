"""Lines that a run says at its start: settings that work, and that a user may not have meant."""

from collections.abc import Callable

from pydantic import BaseModel

from moe_rl.algorithms.config import AlgorithmSection
from moe_rl.algorithms.table import SEQUENCE_ESTIMATORS
from moe_rl.config import RunConfig
from moe_rl.eval_config import EvalSection
from moe_rl.presets import PRESETS
from moe_rl.replay import replay_note

# Larger groups and smaller ones were published; below this a group's mean says little
_SMALL_GROUP = 8
# Above this a sequence ratio is practically never clipped: the paper's range is 3e-4 / 4e-4
_GSPO_WIDE_CLIP = 0.01


def notes(config: RunConfig) -> list[str]:
    """One line each."""
    found = [
        preset_note(config),
        changed_model_note(config),
        clip_note(config.algorithm),
        replay_note(config.replay, config.algorithm),
        restricted_sampling_note(config),
        router_shift_note(config),
        group_note(config),
        kl_note(config),
        warmup_note(config),
        correction_note(config),
        repeated_samples_note(config.eval),
        idle_note(config),
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


def changed_model_note(config: RunConfig) -> str | None:
    """Where a Hugging Face model is made to compute something else than its config.json says."""
    if config.model.path is None:
        return None
    from models.convert.exporting import differing
    from models.convert.files import huggingface_directory
    from models.convert.huggingface import describe

    published = describe(huggingface_directory(config.model.path)).model()
    if (key := differing(config.model, published)) is None:
        return None
    return (
        f"model.{key}={getattr(config.model, key)}: config.json of model.path says {getattr(published, key)}; the weights will "
        "be exported only with --like, beside a config.json that says the same"
    )


def clip_note(section: AlgorithmSection) -> str | None:
    """Where GSPO's clip range looks like one meant for token ratios."""
    if section.spec.objective not in ("gspo", "gspo_token") or section.clip is None or max(section.clip) <= _GSPO_WIDE_CLIP:
        return None
    low, high = section.clip
    return (
        f"algorithm.clip_low={low:g}, algorithm.clip_high={high:g}: above {_GSPO_WIDE_CLIP:g} GSPO's sequence ratio"
        " is practically never clipped; the paper (arXiv 2507.18071) uses 3e-4 / 4e-4"
    )


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
    if algorithm.estimator not in SEQUENCE_ESTIMATORS or responses >= _SMALL_GROUP:
        return None
    return f"rollout.responses={responses}: a small group makes a noisy baseline; 8 and more are usual (DAPO 16, GRPO 64)"


def kl_note(config: RunConfig) -> str | None:
    """KL terms that are legal and seldom meant."""
    algorithm = config.algorithm
    if not algorithm.kl_coefficient:
        return None
    if not algorithm.kl_in_reward and algorithm.estimates_kl == "k1":
        return (
            "algorithm.kl_estimator=k1 in the loss: the expectation of its gradient is 0, so it only adds noise; take k2 or k3"
        )
    if algorithm.kl_in_reward and algorithm.estimator == "group" and algorithm.divides_by_std:
        return (
            "algorithm.kl_placement=reward with algorithm.advantage=group: in a group of equal rewards the penalty is all that "
            "differs, and dividing by the deviation makes it as large as a reward; set algorithm.advantage_std=false or "
            "algorithm.kl_placement=loss"
        )
    return None


def correction_note(config: RunConfig) -> str | None:
    """The embedded engine is the trained model: there is nothing to correct unless it draws from less than all of it."""
    mode = config.algorithm.correction.mode
    if mode == "off" or (config.rollout.is_restricted and config.rollout.logprobs == "renormalised"):
        return None
    return (
        f"algorithm.correction.mode={mode}: the embedded engine is the trained model itself and agrees with it to rounding, so "
        "that nothing is corrected (see rollout/logprob_gap_max)"
    )


def warmup_note(config: RunConfig) -> str | None:
    if not config.algorithm.trains_critic or not 0 < config.run.steps <= config.critic.warmup_steps:
        return None
    return (
        f"critic.warmup_steps={config.critic.warmup_steps}: covers all of run.steps={config.run.steps}: the critic alone is "
        "trained, and the policy stays as it is"
    )


def repeated_samples_note(section: EvalSection) -> str | None:
    if section.samples == 1 or section.temperature:
        return None
    return (
        f"eval.samples={section.samples} with eval.temperature=0: greedy, the responses to a problem are all the same, and "
        "every pass@k is pass@1; set eval.temperature above 0"
    )


# (settings, what they need to have an effect, whether it is there)
_NEEDS: list[tuple[tuple[str, ...], str, Callable[[RunConfig], bool]]] = [
    (("critic",), "algorithm.name=ppo or algorithm.advantage=gae", lambda c: c.algorithm.trains_critic),
    (
        ("algorithm.sapo_tau_positive", "algorithm.sapo_tau_negative"),
        "algorithm.name=sapo",
        lambda c: c.algorithm.name == "sapo",
    ),
    (("algorithm.router_shift_floor",), "algorithm.router_shift=true", lambda c: c.algorithm.router_shift),
    (("algorithm.sampling_rounds",), "algorithm.dynamic_sampling=true", lambda c: c.algorithm.samples_dynamically),
    (
        ("algorithm.advantage_epsilon",),
        "an advantage that divides by a deviation",
        lambda c: c.algorithm.divides_by_std if c.algorithm.estimator == "group" else c.algorithm.estimator != "leave_one_out",
    ),
    (("replay.source", "replay.keep_share"), "replay.mode=filtered", lambda c: c.replay.mode == "filtered"),
    (
        ("algorithm.router_shift",),
        "several updates a batch: algorithm.minibatches or algorithm.epochs above 1",
        lambda c: c.algorithm.minibatches * c.algorithm.epochs > 1,
    ),
    (
        ("algorithm.kl_horizon", "algorithm.kl_error_limit"),
        "algorithm.kl_target",
        lambda c: c.algorithm.kl_target is not None,
    ),
    (("algorithm.reference_on_cpu",), "algorithm.kl_coefficient above 0", lambda c: c.algorithm.kl_coefficient > 0),
    (
        ("algorithm.correction.level",),
        "algorithm.correction.mode=tis or mis",
        lambda c: c.algorithm.correction.mode in ("tis", "mis"),
    ),
    (("shaping.overlong_penalty",), "shaping.overlong_buffer above 0", lambda c: c.overlong_buffer > 0),
    (("shaping.length_power",), "shaping.length_target", lambda c: c.shaping.length_target is not None),
    (("rollout.logprobs",), "rollout.top_p or rollout.top_k", lambda c: c.rollout.is_restricted),
]


def idle_note(config: RunConfig) -> str | None:
    """Settings other than their defaults that do nothing without another."""
    idle = []
    for keys, needed, present in _NEEDS:
        changed = [key for key in keys if not present(config) and _is_changed(config, key)]
        if changed:
            idle.append(f"{', '.join(changed)} (needs {needed})")
    return f"without effect here: {'; '.join(idle)}" if idle else None


def _is_changed(config: RunConfig, dotted: str) -> bool:
    holder, _, name = dotted.rpartition(".")
    section: BaseModel = config
    for part in holder.split(".") if holder else ():
        section = getattr(section, part)
    return getattr(section, name) != type(section).model_fields[name].default
