#!/usr/bin/env bash
# Writes requirements/cpu.txt: every package of a CPU machine, pinned, for `pip install --no-deps -r`.
# Needs uv (`pip install uv`). torch==2.13.0+cpu is found where pip is configured to look
# (PIP_FIND_LINKS), or on PyTorch's own CPU index. Run it again after editing pyproject.toml.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
find_links=()
if [[ -n ${PIP_FIND_LINKS:-} ]]; then find_links=(--find-links "$PIP_FIND_LINKS"); fi
{
  echo "# Written by requirements/lock.sh from pyproject.toml (extras cpu, dev). Install with --no-deps."
  uv pip compile pyproject.toml --extra cpu --extra dev --override requirements/overrides.txt \
    "${find_links[@]}" --python-version 3.11 --no-header --no-annotate --quiet
} >requirements/cpu.txt.tmp
mv requirements/cpu.txt.tmp requirements/cpu.txt
