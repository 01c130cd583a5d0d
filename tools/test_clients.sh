#!/usr/bin/env bash
# Runs real clients, each in its current release, against a scripted server; see docs/clients.md.
# Without an argument those of continuous integration, with "all" every one.
set -euo pipefail
cd "$(dirname "$0")/.."
clients=tests/clients
what=${1:-ci}
if ! command -v npm >/dev/null; then
  echo "the JavaScript clients need Node.js 20 or newer, with npm" >&2
  exit 1
fi
install() { # folder of a requirements.txt, folder of a package.json
  .venv-clients/bin/python -m pip --disable-pip-version-check install -qq -r "$1/requirements.txt"
  npm install --prefix "$2" --no-fund --no-audit --no-package-lock --silent
}
[ -x .venv-clients/bin/python ] || .venv/bin/python -m venv .venv-clients
install $clients $clients/node
skip=(--ignore=$clients/more)
if [ "$what" = all ]; then
  install $clients/more $clients/more
  skip=()
fi
export SERVER_PYTHON=$PWD/.venv/bin/python
.venv-clients/bin/python -m pytest -c $clients/pytest.ini "${skip[@]}" $clients
.venv-clients/bin/python -m pip list --format=freeze | grep -E '^(anthropic|instructor|langchain-openai|litellm|llm|openai|openai-agents|pydantic-ai-slim)=='
