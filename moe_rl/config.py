"""The whole YAML, typed. A component receives its own section, never the whole."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from models.config import ModelConfig, OptimizerConfig
from models.presets import PRESETS
from moe_rl import config_errors, config_values, presets, yaml_text
from moe_rl.algorithms.config import AlgorithmSection, CriticSection
from moe_rl.algorithms.table import SEQUENCE_ESTIMATORS
from moe_rl.drift.watch_config import RuleSection, WatchSection
from moe_rl.eval_config import EvalSection
from moe_rl.rollouts.config import RolloutSection
from moe_rl.section import Section
from moe_rl.shaping_config import ShapingSection
from moe_rl.slurm.config import SlurmSection
from moe_rl.task_config import TaskSection
from parallel.config import ParallelConfig
from parallel.errors import UsageError


class RunSection(Section):
    name: str = Field(
        default="run", pattern=r"^[\w-][\w.-]*$", max_length=200, description="the run directory is run.dir/run.name"
    )
    dir: Path = Path("runs")
    seed: NonNegativeInt = 0
    steps: NonNegativeInt = Field(default=100, description="RL steps: one rollout batch each")
    preset: str | None = Field(
        default=None, description="settings from a paper or article (docs/algorithms.md), which all other keys override"
    )
    processes: PositiveInt | None = Field(
        default=None, description="local processes to start; none: the fewest the layout allows"
    )
    threads: PositiveInt = Field(default=1, description="CPU threads a process")
    saving_seconds: PositiveFloat = Field(
        default=300.0,
        description="after SIGTERM or SIGUSR1: to finish the update and save; then the run is ended",
    )
    preflight: bool = Field(
        default=True, description="before the model is built, each rank and each group of ranks is tried, in under a minute"
    )
    hang_seconds: NonNegativeFloat = Field(
        default=1800.0,
        description="without progress on any rank: all write their stacks to RUN/stacks, and the run ends; 0: never",
    )


class ReplaySection(Section):
    mode: Literal["off", "r2", "r3", "filtered"] = Field(
        default="off",
        description="r2: the update replays the routes of the old pass; r3: old pass and update replay the rollout's; "
        "filtered: as replay.source, with a threshold",
    )
    source: Literal["r2", "r3"] = Field(default="r2", description="filtered: whose routes")
    keep_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="filtered: a replayed expert stays while its live score is at least this share of the live k-th best",
    )


class DriftSection(Section):
    enabled: bool = Field(default=True, description="routes of the old and the update passes, compared by layer and minibatch")
    scores_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="share of tokens whose routers' scores over all experts are kept, for router_kl, gate_shift and margin",
    )
    probe_every: NonNegativeInt = Field(
        default=20,
        description="steps between comparisons that need passes of their own (engine, noise, free, probe); 0: none",
    )
    probe_sequences: PositiveInt = Field(default=16, description="sequences in those passes")
    trace_every: NonNegativeInt = Field(default=20, description="steps between trace files; 0: none")
    trace_sequences: PositiveInt = Field(default=8, description="sequences a trace file holds, in each update")
    watch: WatchSection = WatchSection()


class SftSection(Section):
    """Supervised steps: all of `moe-rl sft`, and the warm start of `moe-rl train` when it starts from fresh weights."""

    steps: NonNegativeInt = 0
    batch: PositiveInt = Field(default=64, description="examples a step")
    lr: NonNegativeFloat = 1e-3
    warmup_updates: NonNegativeInt = 10
    schedule: Literal["constant", "linear", "cosine"] = Field(default="constant", description="decay to 0 after the warm-up")
    weight_decay: NonNegativeFloat = 0.0
    train_on: Literal["last", "all"] = Field(
        default="last", description="of a conversation: the answer, or every turn of the assistant"
    )
    too_long: Literal["error", "skip"] = Field(
        default="error", description="an example of more than model.max_positions tokens ends the run, or is left out"
    )
    stop_at: float | None = Field(
        default=None, gt=0, le=1, description="end early once this share of training problems is answered (greedy)"
    )
    check_every: PositiveInt = Field(default=10, description="steps between looks at stop_at")


class CheckpointSection(Section):
    every: NonNegativeInt = Field(default=0, description="steps between checkpoints; 0: only at the end")
    keep: PositiveInt = Field(default=2, description="newest complete checkpoints that stay")
    keep_every: NonNegativeInt = Field(default=0, description="those of a step that this divides stay too; 0: none")
    asynchronous: bool = Field(
        default=False, description="a copy of the state is written while training goes on; takes its size in host memory"
    )
    load: Path | None = Field(default=None, description="a checkpoint, a run's checkpoints/ or a run: weights to start from")


class TrackingSection(Section):
    wandb: bool = False
    wandb_project: str = "moe-rl"
    tensorboard: bool = False
    rollouts_every: NonNegativeInt = Field(default=10, description="steps between files of sampled responses; 0: none")


class RunConfig(Section):
    """A run. `moe_rl.config.load` builds it from a file and overrides."""

    run: RunSection = RunSection()
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    task: TaskSection = TaskSection()
    rollout: RolloutSection = RolloutSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    critic: CriticSection = CriticSection()
    shaping: ShapingSection = ShapingSection()
    replay: ReplaySection = ReplaySection()
    drift: DriftSection = DriftSection()
    optimizer: OptimizerConfig = OptimizerConfig()
    sft: SftSection = SftSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: TrackingSection = TrackingSection()
    slurm: SlurmSection = SlurmSection()

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        if self.rollout.batch % self.algorithm.minibatches:
            raise ValueError(
                f"algorithm.minibatches={self.algorithm.minibatches}: must divide the batch of rollout.prompts="
                f"{self.rollout.prompts} x rollout.responses={self.rollout.responses} = {self.rollout.batch} sequences"
            )
        if self.rollout.responses == 1 and (key := self._comparing()):
            raise ValueError(
                f"rollout.responses=1: {key} compares the responses to a prompt; must be at least 2 "
                "(ppo, reinforce_plus_plus, and what takes algorithm.advantage=batch or gae do without)"
            )
        if self.overlong_buffer >= self.rollout.max_response_tokens:
            raise ValueError(
                f"shaping.overlong_buffer={self.overlong_buffer}{self._origin('shaping', 'overlong_buffer')}: must be below "
                f"rollout.max_response_tokens={self.rollout.max_response_tokens}"
            )
        if self.algorithm.router_shift and not self.model.moe_layers:
            cause = "model.dense_layers" if self.model.experts else "model.experts=0"
            raise ValueError(f"algorithm.router_shift=true: {cause} leaves no layer that routes; leave it out")
        if self.model.router_fusion and (reason := self._asks_of_routers()):
            raise ValueError(
                f"model.router_fusion=true: the fused router chooses by itself and shows nothing, so {reason} would do "
                "nothing, silently; set model.router_fusion=false"
            )
        if self.rollout.max_response_tokens >= self.model.max_positions:
            raise ValueError(
                f"rollout.max_response_tokens={self.rollout.max_response_tokens}: leaves no room for a prompt in "
                f"model.max_positions={self.model.max_positions}"
            )
        return self

    def _comparing(self) -> str | None:
        """The setting that needs more than one response a prompt."""
        if self.algorithm.estimator in SEQUENCE_ESTIMATORS:
            return f"algorithm.name={self.algorithm.name} with algorithm.advantage={self.algorithm.estimator}"
        return "algorithm.dynamic_sampling=true" if self.algorithm.samples_dynamically else None

    @property
    def overlong_buffer(self) -> int:
        """Tokens of the overlong penalty's zone; 0: no such penalty."""
        if self.shaping.overlong_buffer is not None:
            return self.shaping.overlong_buffer
        share = self.algorithm.spec.overlong_share
        return max(1, int(share * self.rollout.max_response_tokens)) if share and self.rollout.max_response_tokens > 1 else 0

    def _origin(self, section: str, key: str) -> str:
        """Where a value is the preset's and not the user's."""
        preset = presets.PRESETS.get(self.run.preset or "")
        same = preset is not None and preset.values.get(section, {}).get(key) == getattr(getattr(self, section), key)
        return f" (from run.preset={self.run.preset})" if same else ""

    def _asks_of_routers(self) -> str | None:
        """The setting that needs routers which can be observed or replayed."""
        if self.algorithm.router_shift:
            return "algorithm.router_shift=true"
        if self.replay.mode != "off":
            return f"replay.mode={self.replay.mode}"
        if self.drift.enabled:
            return "drift.enabled=true"
        rules = [name for name, rule in self.drift.watch if isinstance(rule, RuleSection) and rule.action == "replay"]
        return f"drift.watch.{rules[0]}.action=replay" if rules and self.drift.watch.enabled else None

    @property
    def directory(self) -> Path:
        return self.run.dir / self.run.name


def load(path: str | Path, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None) -> RunConfig:
    """The run that a YAML file describes.

    `overrides`: `key.path=value`, the value read as YAML; the last one of a key counts. `base`: values beneath the file's.
    Beneath the model's keys lie those of `model.preset` or `model.path`, and beneath everything those of `run.preset`.
    Raises UsageError, one line, for anything that is wrong.
    """
    values = config_values.merged(base or {}, config_values.read(Path(path), RunConfig))
    for override in overrides:
        config_values.override(values, override, RunConfig)
    values = presets.beneath(values)
    model = values.get("model")
    if isinstance(model, dict):
        values["model"] = {**_beneath_model(model.get("preset"), model.get("path")), **model}
    config_values.check_numbers(values, RunConfig)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise UsageError(config_errors.explain(error, RunConfig)) from error


def check(config: RunConfig, world_size: int) -> None:
    """Raises UsageError unless the layout fits the model and `world_size` processes."""
    config.model.check_layout(config.parallel)
    config.parallel.check_world(world_size)


def dump(config: RunConfig) -> str:
    """YAML of every value, that `load` reads back as an equal configuration."""
    return yaml_text.dump(config.model_dump(mode="json"))


def _beneath_model(preset: object, path: object) -> dict[str, Any]:
    """What lies beneath the keys of the model section: a preset's values, or those of a Hugging Face directory."""
    if preset is not None and path is not None:
        raise UsageError(f"model.path={path}: gives the same keys as model.preset={preset}; keep one (model.preset=null)")
    if preset is not None:
        return _preset(preset)
    if path is None:
        return {}
    if not isinstance(path, str | Path):
        raise UsageError(f"model.path={config_errors.show(path)}: must be a directory with a Hugging Face model")
    from models.convert.files import huggingface_directory
    from models.convert.huggingface import describe

    directory = huggingface_directory(Path(path))
    description = describe(directory)
    description.model()  # what it says by itself is right, so that an error below is the settings'
    return {**description.values, "tokenizer": str(directory)}


def _preset(name: object) -> dict[str, Any]:
    if not isinstance(name, str) or name not in PRESETS:
        hint = config_errors.near(str(name), PRESETS)
        raise UsageError(f"model.preset={config_errors.show(name)}: must be one of {', '.join(PRESETS)}{hint}")
    return PRESETS[name]
