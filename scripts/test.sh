#!/usr/bin/env bash
# Everything that must hold before a change lands. With arguments: only pytest, with them.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh" dev
cd "$root"
python=$root/.venv/bin/python

if [ $# -gt 0 ]; then
    exec "$python" -m pytest "$@"
fi
"$python" -m ruff check
"$python" -m ruff format --check
"$python" -m pyright
"$root/.venv/bin/lint-imports"
"$python" -m pytest -n 2 -m "not distributed and not slurm"
# By files, since what a file's tests share takes most of the time; in order of names: the longest are not among the last.
"$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "distributed and not alone"
"$python" -m pytest -m alone
if command -v sbatch >/dev/null; then
    "$python" -m pytest -m slurm
else
    echo "tests/slurm skipped: no Slurm here; as root: scripts/slurm_sandbox.sh install"
fi
