#!/usr/bin/env bash
# Compares losses, gradients and advantages with TRL's, then shows the figures. Usage: scripts/compare_trl.sh [--write]
# --write: puts the figures into docs/comparison_with_trl.md. TRL lies in .venv-trl, on top of what .venv holds.
set -euo pipefail

version=1.16.0
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv-trl
cd "$root"
case "$*" in "" | --write) ;; *) echo "compare_trl: '$*': must be nothing or --write" >&2; exit 2 ;; esac

[ -x "$root/.venv/bin/python" ] || "$root/scripts/setup.sh" dev
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
of_project=$(packages "$root/.venv/bin/python")

[ -x "$venv/bin/python" ] || "$root/.venv/bin/python" -m venv "$venv"
# what the project has installed counts as installed here, so that torch is not fetched again
echo "$of_project" >"$(packages "$venv/bin/python")/of_project.pth"
"$venv/bin/python" -c "from importlib.metadata import version as v; assert v('trl') == '$version'" 2>/dev/null || {
    echo "compare_trl: installing trl $version into .venv-trl: about 100 MB"
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --quiet "trl==$version" \
        "torch==$("$root/.venv/bin/python" -c 'from importlib.metadata import version as v; print(v("torch"))')" \
        "transformers==$("$root/.venv/bin/python" -c 'from importlib.metadata import version as v; print(v("transformers"))')"
}

# without the conftest of the other tests: nothing of it is used here
"$venv/bin/python" -m pytest -q --noconftest tests/comparison
"$venv/bin/python" -m tests.comparison.figures "$@"
