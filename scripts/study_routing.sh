#!/usr/bin/env bash
# Trains a grid of small runs from calm to collapsing, and shows what routing did in them: see docs/routing_study.md.
# Goes on where it was interrupted. Arguments go to the study, for example: --seeds 0 --minibatches 1,8 --processes 1
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh"
cd "$root"
exec .venv/bin/python scripts/study_routing.py "$@"
