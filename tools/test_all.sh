#!/usr/bin/env bash
# Runs every test, the slow ones too, and appends the outcome to tests/RESULTS.md. Arguments go to
# pytest.
set -uo pipefail
cd "$(dirname "$0")/.."
results=tests/RESULTS.md log=$(mktemp)
trap 'rm -f "$log"' EXIT

.venv/bin/python -m pytest "$@" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}

if [ ! -f "$results" ]; then
    printf '%s\n' '# Results of `make test-all`' '' \
        '| date | commit | versions, device | pytest |' '| --- | --- | --- | --- |' >"$results"
fi
commit=$(git describe --always --dirty --exclude '*' 2>/dev/null || echo unknown)
versions=$(.venv/bin/python -m tools.versions)
# pytest's closing line is the last one that speaks of seconds.
closing=$(grep -E ' in [0-9.]+s' "$log" | tail -1 | sed 's/^=* *//; s/ *=*$//')
echo "| $(date -u +%F) | $commit | $versions | ${closing:-no closing line, status $status} |" >>"$results"
exit "$status"
