"""The algorithms as one literal table: of which objective, aggregation and advantages each is made, and its constants."""

import math
from typing import Literal, NamedTuple, get_args

Name = Literal[
    "ppo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "gspo_token",
    "gmpo",
    "cispo",
    "sapo",
]
# What of the ratio and the advantage is maximised: a file each beside this one
ObjectiveName = Literal["clipped", "gspo", "gspo_token", "gmpo", "cispo", "sapo"]
# How terms become one number (aggregation.py)
Aggregation = Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum", "constant"]
# How rewards become advantages (advantages.py; batch and gae: token_advantages.py)
Estimator = Literal["group", "leave_one_out", "group_batch", "batch", "gae"]
# Schulman's estimators of a KL divergence (kl.py)
KLEstimator = Literal["k1", "k2", "k3"]

ANY_AGGREGATION: tuple[Aggregation, ...] = get_args(Aggregation)
ANY_ESTIMATOR: tuple[Estimator, ...] = get_args(Estimator)
# One number a response, as a sequence's term needs it; batch and gae give every token its own
SEQUENCE_ESTIMATORS: tuple[Estimator, ...] = ("group", "leave_one_out", "group_batch")


class Algorithm(NamedTuple):
    """The first of `aggregations` and of `advantages` is the default; the others leave the algorithm what it is.

    clip_low, clip_high: the ratio's range is [1 - clip_low, 1 + clip_high]; None where there is no clip. advantage_std: of the
    group estimator. kl_in_reward: where a KL penalty goes; kl_estimator: of one in the loss. dynamic_sampling, overlong_share
    (of the longest response: the zone of the soft penalty): DAPO's. why: what other aggregations and advantages would
    contradict.
    """

    objective: ObjectiveName
    clip_low: float | None
    clip_high: float | None
    aggregations: tuple[Aggregation, ...]
    advantages: tuple[Estimator, ...]
    paper: str
    why: str
    advantage_std: bool = True
    kl_in_reward: bool = False
    kl_estimator: KLEstimator = "k3"
    dynamic_sampling: bool = False
    overlong_share: float = 0.0


_TOKEN_MEAN_FIRST: tuple[Aggregation, ...] = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant")
_LENGTHS = "one term a sequence: its geometric mean has taken the length out"

ALGORITHMS: dict[Name, Algorithm] = {
    "ppo": Algorithm(
        "clipped",
        clip_low=0.2,
        clip_high=0.2,
        aggregations=_TOKEN_MEAN_FIRST,
        advantages=("gae",),
        paper="arXiv 1707.06347",
        why="its advantages come from a value model (without one it is grpo or reinforce_plus_plus)",
        kl_in_reward=True,
    ),
    "reinforce_plus_plus": Algorithm(
        "clipped",
        clip_low=0.2,
        clip_high=0.2,
        aggregations=_TOKEN_MEAN_FIRST,
        advantages=("batch",),
        paper="arXiv 2501.03262",
        why="it normalises over the whole batch and has no groups",
        kl_in_reward=True,
    ),
    "reinforce_plus_plus_baseline": Algorithm(
        "clipped",
        clip_low=0.2,
        clip_high=0.2,
        aggregations=_TOKEN_MEAN_FIRST,
        advantages=("group_batch",),
        paper="arXiv 2501.03262",
        why="it subtracts the group's mean and divides by the batch's deviation",
        kl_estimator="k2",
    ),
    "rloo": Algorithm(
        "clipped",
        clip_low=0.2,
        clip_high=0.2,
        aggregations=("seq_mean_token_sum", "constant", "token_mean", "seq_mean_token_mean"),
        advantages=("leave_one_out",),
        paper="arXiv 2402.14740",
        why="its baseline is the mean of the other responses",
        kl_in_reward=True,
    ),
    "grpo": Algorithm(
        "clipped",
        clip_low=0.2,
        clip_high=0.27,
        aggregations=ANY_AGGREGATION,
        advantages=("group",),
        paper="arXiv 2402.03300; clip range: 2507.18071, section 5.1",
        why="its advantage is relative to the group",
    ),
    "dr_grpo": Algorithm(
        "clipped",
        clip_low=0.2,
        clip_high=0.2,
        aggregations=("constant", "seq_mean_token_sum"),
        advantages=("group",),
        paper="arXiv 2503.20783",
        why="it removes GRPO's division by length and by the group's deviation; name grpo to have them",
        advantage_std=False,
    ),
    "dapo": Algorithm(
        "clipped",
        clip_low=0.2,
        clip_high=0.28,
        aggregations=("token_mean",),
        advantages=("group",),
        paper="arXiv 2503.14476",
        why="its loss is a mean over all tokens of a batch (section 3.3); name grpo to choose freely",
        dynamic_sampling=True,
        overlong_share=0.2,
    ),
    "gspo": Algorithm(
        "gspo",
        clip_low=3e-4,
        clip_high=4e-4,
        aggregations=("seq_mean_token_mean",),
        advantages=SEQUENCE_ESTIMATORS,
        paper="arXiv 2507.18071",
        why=f"it has {_LENGTHS}",
    ),
    "gspo_token": Algorithm(
        "gspo_token",
        clip_low=3e-4,
        clip_high=4e-4,
        aggregations=("seq_mean_token_mean",),
        advantages=ANY_ESTIMATOR,
        paper="arXiv 2507.18071, section 4.3",
        why="it is a mean over sequences of means over tokens, or it would not be gspo where advantages are equal",
    ),
    "gmpo": Algorithm(
        "gmpo",
        clip_low=-math.expm1(-0.4),
        clip_high=math.expm1(0.4),
        aggregations=("seq_mean_token_mean",),
        advantages=SEQUENCE_ESTIMATORS,
        paper="arXiv 2507.20673",
        why=f"it has {_LENGTHS}",
    ),
    "cispo": Algorithm(
        "cispo",
        clip_low=1.0,
        clip_high=4.0,  # the paper gives no number; TRL recommends a cap of 5
        aggregations=_TOKEN_MEAN_FIRST,
        advantages=ANY_ESTIMATOR,
        paper="arXiv 2506.13585",
        why="",
    ),
    "sapo": Algorithm(
        "sapo",
        clip_low=None,
        clip_high=None,
        aggregations=ANY_AGGREGATION,
        advantages=ANY_ESTIMATOR,
        paper="arXiv 2511.20347",
        why="",
    ),
}

SEQUENCE_OBJECTIVES: tuple[ObjectiveName, ...] = ("gspo", "gmpo")  # one term a sequence, not a token
