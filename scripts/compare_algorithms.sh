#!/usr/bin/env bash
# Trains every algorithm on one small task with three seeds, and prints what each learned: see docs/algorithms.md.
# Goes on where it was interrupted. Arguments go to the comparison, for example: --methods grpo,ppo --seeds 0
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh"
cd "$root"
exec .venv/bin/python scripts/compare_algorithms.py "$@"
