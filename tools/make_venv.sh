#!/usr/bin/env bash
# make_venv.sh FOLDER EXTRAS [CONSTRAINTS]: a virtual environment with this project, editable, and
# its EXTRAS. Does nothing while pyproject.toml and the constraints are those it was made from.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1 extras=$2 constraints=${3:-}

# The folder itself counts too: a checkout that was moved or copied needs its environment anew.
wanted=$(cat pyproject.toml tools/make_venv.sh ${constraints:+"$constraints"} | sha256sum)
wanted="${wanted%% *} $extras $PWD"
if [ "$(cat "$folder/made-from" 2>/dev/null)" = "$wanted" ] && "$folder/bin/python" -c '' 2>/dev/null; then
    exit 0
fi

python=$(tools/find_python.sh)
echo "Installing into $folder with $python (a few minutes, once)"
rm -rf "$folder"
"$python" -m venv "$folder"
"$folder/bin/python" -m pip install -qq --disable-pip-version-check \
    ${constraints:+--constraint "$constraints"} --editable ".[$extras]"
echo "$wanted" >"$folder/made-from"
