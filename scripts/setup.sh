#!/usr/bin/env bash
# Makes .venv and installs this project into it. Usage: scripts/setup.sh [EXTRAS], for example scripts/setup.sh dev
# A second run changes nothing. An install that was cut short is taken up again: the stamp is written last.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
extras=${1:-}
venv=$root/.venv
stamp=$venv/.moe-rl-${extras:-base}

recent_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

# A name on the PATH may be a shim that fails, so each candidate is run. The version that most use first.
find_python() {
    local candidate
    for candidate in python3.12 python3.13 python3.14 python3 \
        "${HOME:-}"/.pyenv/versions/3.*/bin/python3 "${HOME:-}"/.local/share/uv/python/*/bin/python3 \
        /usr/local/bin/python3* /opt/*/bin/python3; do
        recent_enough "$candidate" && "$candidate" -c 'import venv, ensurepip' 2>/dev/null &&
            echo "$candidate" && return
    done
    echo "setup: no Python >= 3.12 with venv found; install one, for example: apt-get install python3.12-venv, or uv python install 3.12" >&2
    return 1
}

# What the stamp must hold: anything that changes what should be installed, or where.
fingerprint() {
    "$venv/bin/python" - "$root" "$extras" <<'PYTHON'
import hashlib, pathlib, sys
text = pathlib.Path(sys.argv[1], "pyproject.toml").read_bytes()
print(hashlib.sha256(text + "\0".join([*sys.argv[1:], sys.version]).encode()).hexdigest())
PYTHON
}

# Of pip's many lines, those that say what is downloaded ("Downloading torch-2.13.0-cp312-... (555 MB)") and the long last step.
show_progress() {
    local line rest
    while read -r line; do
        case $line in
        "Downloading "*-*" ("*)
            line=${line#Downloading } rest=${line#*-}
            echo "  downloading ${line%%-*} ${rest%%-*} (${line##*(}"
            ;;
        "Installing collected packages"*) echo "  unpacking: the longest step" ;;
        esac
    done
}

if ! { recent_enough "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
    python=$(find_python)
    echo "setup: making .venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi
wanted=$(fingerprint)
[ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && exit 0

echo "setup: installing${extras:+ with extras $extras}; torch and its CUDA libraries are several GB: minutes the first time"
rm -f "$stamp"
"$venv/bin/python" -m pip install --disable-pip-version-check --no-input -e "$root${extras:+[$extras]}" 2>&1 |
    tee "$venv/install.log" | show_progress ||
    { tail -n 15 "$venv/install.log" >&2; echo "setup: pip failed; its whole output is in .venv/install.log" >&2; exit 1; }
echo "$wanted" >"$stamp"
