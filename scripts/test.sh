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
# A distributed test starts several processes of its own: those run one test at a time.
"$python" -m pytest -n 2 -m "not distributed and not slurm"
"$python" -m pytest -m distributed
if command -v sbatch >/dev/null; then
    "$python" -m pytest -m slurm
else
    echo "tests/slurm skipped: no Slurm here; as root: scripts/slurm_sandbox.sh install"
fi
