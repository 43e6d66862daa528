#!/usr/bin/env bash
# The project's commands, on a machine with only Python 3.11 and pip: task.sh demo|test|test-all|bench|lint [ARGUMENT ...]
# `make` targets call this; so does .ci/run where there is no make.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

task=${1:?usage: task.sh demo|test|test-all|bench|lint [ARGUMENT ...]}
shift
environment=main
if [ "$task" = bench ]; then environment=bench; fi
python=$("${PYTHON:-python3.11}" tools/environment.py "$environment")

case $task in
demo) exec "$python" examples/demo.py "$@" ;;
test) exec "$python" -m pytest -m "not gpu and not full" "$@" ;;
test-all) exec "$python" -m pytest -m "not gpu" "$@" ;;
bench) exec "$python" -m benchmarks "$@" ;;
lint)
  "$python" -m ruff check .
  "$python" -m ruff format --check .
  "$python" -m mypy
  "$python" -m mkdocs build --strict --quiet --site-dir .cache/site
  ;;
*)
  echo "task.sh: no task '$task'; there are demo, test, test-all, bench, lint" >&2
  exit 2
  ;;
esac
