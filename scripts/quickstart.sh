#!/usr/bin/env bash
# Installs what is missing, then trains a tiny MoE model. Arguments go to `moe-rl train`, for example: run.steps=20
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh"
cd "$root"
exec .venv/bin/moe-rl train configs/quickstart.yaml "$@"
