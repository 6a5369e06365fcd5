"""What `moe-rl COMMAND --help` shows below the options."""

TRAIN = """\
examples:
  moe-rl train configs/quickstart.yaml
  moe-rl train configs/quickstart.yaml run.name=grpo algorithm.name=grpo optimizer.lr=5e-5
  moe-rl train configs/quickstart.yaml run.name=ppo algorithm.name=ppo critic.optimizer.lr=3e-4
  moe-rl train configs/quickstart.yaml parallel.tensor=2             (another layout: starts 2 processes)
  moe-rl train configs/quickstart.yaml parallel.pipeline=2 run.processes=4
  moe-rl train configs/quickstart.yaml task.name=file task.options={} task.train_path=problems.jsonl
  moe-rl train run.yaml model.tokenizer=DIR task.name=file task.train_path=gsm8k.parquet task.scorer=numeric   (docs/data.md)
  torchrun --nproc-per-node 8 -m moe_rl.cli train run.yaml           (inside torchrun or srun nothing more is started)"""

SFT = """\
examples:
  moe-rl sft configs/quickstart.yaml run.name=warm sft.steps=300
  moe-rl sft run.yaml task.name=file task.train_path=talk.jsonl sft.train_on=all
  moe-rl train configs/quickstart.yaml checkpoint.load=runs/warm     (RL from there)

Killed or interrupted, the same command goes on from its newest checkpoint (checkpoint.every=N: N steps apart). On SIGTERM or
SIGUSR1 it saves after its step and ends with exit code 75."""

EVAL = """\
examples:
  moe-rl eval configs/quickstart.yaml                                (the newest checkpoint of runs/quickstart)
  moe-rl eval configs/quickstart.yaml checkpoint.load=runs/warm/checkpoints/step_000300
  moe-rl eval configs/quickstart.yaml eval.samples=16 eval.temperature=1 eval.k=[1,4,16] eval.problems=null
  moe-rl eval configs/quickstart.yaml task.name=file task.options={} task.eval_path=test.jsonl
  moe-rl eval configs/quickstart.yaml run.processes=4                (4 processes share the problems)

Figures with standard errors go to RUN/eval/NAME.json, every response to RUN/eval/NAME.jsonl; nothing else of RUN is touched."""

IMPORT = """\
examples:
  moe-rl import Qwen3-30B-A3B checkpoints/qwen3_30b            every tensor is read back and compared
  moe-rl train run.yaml model.path=checkpoints/qwen3_30b
  moe-rl train run.yaml model.path=Qwen3-30B-A3B               (the same without an import of its own)"""

EXPORT = """\
examples:
  moe-rl export runs/rl Qwen3-30B-A3B-rl                       the newest checkpoint of a run
  moe-rl export runs/rl/checkpoints/step_000100 out --dtype bfloat16
  moe-rl export checkpoints/mine out --like Qwen3-30B-A3B      configuration and tokenizer from there"""

DRIFT = """\
examples:
  moe-rl drift runs/quickstart                   tables here, data in runs/quickstart/drift/*.csv
  moe-rl drift runs/grpo runs/gspo --last 20     two runs side by side
  moe-rl drift traces/                           a directory of Megatron-Core's router_trace_rank*.jsonl: load alone"""

REPORT = """\
examples:
  moe-rl report runs/quickstart                            writes runs/quickstart/report.html
  moe-rl report runs/grpo runs/gspo --output compare.html  one page, one colour a run"""

DOCTOR = """\
examples:
  moe-rl doctor
  moe-rl doctor --cluster --processes 4                               (4 processes on this machine)
  moe-rl doctor --cluster run.yaml                                    (the layout of run.yaml)
  srun --ntasks-per-node=8 moe-rl doctor --cluster run.yaml           (on the nodes of a job: MASTER_ADDR, MASTER_PORT set)"""
