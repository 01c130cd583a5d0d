#!/usr/bin/env bash
# Lines per folder, so that growth is seen.
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files 'lmdeploy/*.py' 'lmdeploy/*.cpp' 'lmdeploy/*.h' 'lmdeploy/*.inl' 'tests/*.py' 'benchmarks/*.py' |
  xargs wc -l | awk '$2 != "total" { n = split($2, p, "/"); d = p[1] (n > 2 ? "/" p[2] : ""); s[d] += $1; t += $1 }
    END { for (d in s) printf "%7d %s\n", s[d], d | "sort -k2"; close("sort -k2"); printf "%7d total\n", t }'
