#!/usr/bin/env bash
# Prints the path of a Python that can make this project's virtual environment: 3.12, else 3.13.
#
# Every candidate is run, because a name on PATH may be a version manager's shim that fails.
# PYTHON=/path/to/python names the only candidate.
set -u

probe='
import ctypes, ensurepip, ssl, sys, venv, zlib
assert sys.implementation.name == "cpython"
print("%d.%d %s" % (*sys.version_info[:2], sys.executable))
'

candidates() {
    local wanted=$1 name root
    if [ -n "${PYTHON:-}" ]; then
        type -aP "$PYTHON"
        return
    fi
    for name in "python$wanted" python3 python; do
        type -aP "$name"
    done
    for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
        [ -n "$root" ] && ls -d "$root/versions/$wanted"*/bin/python 2>/dev/null | sort -rV
    done
}

for wanted in 3.12 3.13; do
    while read -r candidate; do
        found=$("$candidate" -c "$probe" 2>/dev/null </dev/null) || continue
        if [ "${found%% *}" = "$wanted" ]; then
            echo "${found#* }"
            exit 0
        fi
    done < <(candidates "$wanted")
done

cat >&2 <<'END'
No fitting Python found. jla-nnx needs CPython 3.12 or 3.13 with venv, pip and ssl (on Debian and
Ubuntu also the package python3.12-venv), on PATH or under pyenv. Install one, or name one:
    make PYTHON=/path/to/python3.12 ...
END
exit 1
