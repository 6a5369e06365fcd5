"""TRL's own methods, called on a stand-in for the trainer: no model, tokenizer or data set is needed.

TRL is not among the project's dependencies (scripts/compare_trl.sh installs it apart), so it is imported by name, on use.
"""

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from tests.comparison.batches import LONGEST, Batch

Trainer = Literal["GRPOTrainer", "RLOOTrainer", "GMPOTrainer"]

_MODULES: dict[Trainer, str] = {
    "GRPOTrainer": "trl.trainer.grpo_trainer",
    "RLOOTrainer": "trl.trainer.rloo_trainer",
    "GMPOTrainer": "trl.experimental.gmpo",
}
# Settings that a trainer reads from its `args`; it copies all others to itself.
_ARGS = ("delta", "use_bias_correction_kl", "sapo_temperature_pos", "sapo_temperature_neg")


def trainer_class(name: Trainer) -> Any:
    return getattr(importlib.import_module(_MODULES[name]), name)


def function(module: str, name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(module), name)


def score(batch: Batch, rewards: Tensor, trainer: Trainer = "GRPOTrainer", **settings: Any) -> dict[str, Any]:
    """What TRL makes of sampled responses: masks, old log-probabilities, importance_sampling_ratio, and advantages from
    rewards [B]. settings: names and values of TRL's configuration; others are at rest."""
    return _score(_stand_in(batch, rewards, trainer, settings), batch, trainer)


def loss(batch: Batch, trainer: Trainer = "GRPOTrainer", **settings: Any) -> Tensor:
    """TRL's loss of the batch with the batch's own advantages, one micro-batch a step."""
    stand_in = _stand_in(batch, torch.zeros(len(batch.advantages), dtype=torch.float64), trainer, settings)
    inputs = _score(stand_in, batch, trainer) | {"advantages": batch.advantages}
    trained = SimpleNamespace(logprobs=batch.train, entropy=batch.entropy)
    return trainer_class(trainer)._compute_loss(stand_in, trained, inputs)


def _score(stand_in: SimpleNamespace, batch: Batch, trainer: Trainer) -> dict[str, Any]:
    with _float64():
        return trainer_class(trainer)._generate_and_score_completions(stand_in, [{"prompt": "?"}] * len(batch.present))


def _stand_in(batch: Batch, rewards: Tensor, trainer: Trainer, settings: dict[str, Any]) -> SimpleNamespace:
    rows = batch.lists(torch.zeros_like(batch.old).long())
    tool_mask = batch.lists(batch.counted.long())
    generated = ([[0, 0]] * len(rows), rows, tool_mask, rows, batch.lists(batch.rollout), {}, None, None)
    args = {"delta": None, "per_device_train_batch_size": len(rows), "gradient_checkpointing_kwargs": None}
    # two iterations over a batch: TRL then computes old log-probabilities, and does not take the trained ones for them
    args |= {"gradient_accumulation_steps": 1, "steps_per_generation": 1}
    args |= {key: value for key, value in settings.items() if key in _ARGS}
    own = {
        "num_generations": 4,
        "num_iterations": 2,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": LONGEST,
        "importance_sampling_level": "token",
        "loss_type": "grpo",
        "beta": 0.0,
        "scale_rewards": "group",
        "use_vllm": "vllm_importance_sampling_mode" in settings,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_clip_min": None,
        "vllm_importance_sampling_clip_max": None,
        "entropy_coef": 0.0,
    }
    own |= {key: value for key, value in settings.items() if key not in _ARGS}
    alone = {"num_processes": 1, "process_index": 0, "device": torch.device("cpu"), "sync_gradients": True}
    logs = {"prompt": [], "completion": [], "advantages": [], "rewards": defaultdict(list), "extra": defaultdict(list)}
    return SimpleNamespace(
        **own,
        args=SimpleNamespace(**args),
        accelerator=SimpleNamespace(**alone, gather=_same, reduce=_same),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False, logprobs=batch.old, entropy=None),
        ref_model=SimpleNamespace(logprobs=batch.ref, entropy=None),
        _get_per_token_logps_and_entropies=lambda model, *_, **__: (model.logprobs, model.entropy, None),
        _generate=lambda _: (generated[0], generated[1], generated[3]) if trainer == "RLOOTrainer" else generated,
        _calculate_rewards=lambda *_: rewards[:, None],
        reward_weights=torch.ones(1),
        reward_funcs=[None],
        reward_func_names=["reward"],
        multi_objective_aggregation="sum_then_normalize",
        reward_clip_range=None,
        normalize_advantages=False,
        environment_factories=None,
        environments=None,
        tools=None,
        mask_truncated_completions=False,
        pad_to_multiple_of=None,
        log_multimodal=False,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        _entropy_bonus_enabled=own["entropy_coef"] != 0,
        use_adaptive_entropy=False,
        _metrics={"train": defaultdict(list)},
        _logs=logs,
        _pending_extra_logs={},
        _pending_metrics={},
    )


def _same(value: Tensor, **_: Any) -> Tensor:
    return value


@contextmanager
def _float64() -> Iterator[None]:
    """TRL makes tensors of lists, in torch's default type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
