#!/usr/bin/env bash
# Runs real clients, each in its current release, against a scripted server; see docs/clients.md.
# Without an argument those of continuous integration, with "all" every one.
set -euo pipefail
cd "$(dirname "$0")/.."
clients=tests/clients
if ! command -v npm >/dev/null; then
  echo "the JavaScript clients need Node.js 20 or newer, with npm" >&2
  exit 1
fi
export SERVER_PYTHON=$PWD/.venv/bin/python
run() { # environment, folder of requirements.txt and tests, folder of package.json, more for pytest
  [ -x "$1/bin/python" ] || .venv/bin/python -m venv "$1"
  "$1/bin/python" -m pip --disable-pip-version-check install -qq -r "$2/requirements.txt"
  npm install --prefix "$3" --no-fund --no-audit --no-package-lock --silent
  "$1/bin/python" -m pytest -c $clients/pytest.ini "$2" "${@:4}"
}
run .venv-clients $clients $clients/node --ignore=$clients/more
if [ "${1:-ci}" = all ]; then
  # Some of these want older releases of what the others are tested with.
  run .venv-clients-more $clients/more $clients/more
fi
