#!/usr/bin/env bash
# What one session on a bare H200 host runs, after every part of the GPU pack is unpacked (tests/gpu/README.md).
#   bash benchmarks/h200.sh rollout SOURCES OUT     the 10,000-prompt rollout beside plain vLLM
set -euo pipefail
source /opt/site/env.sh
export PYTHONPATH=$PWD:$PYTHONPATH PYTHONUNBUFFERED=1
python3 data/demo_target.py --gguf /opt/models/SmolLM2-135M-Instruct.Q4_1.gguf
case $1 in
rollout)
  python3 benchmarks/rollout.py -c configs/h200-smollm2.yaml "corpus.sources=[$2]"
  cp runs/h200-smollm2/rollout/{state.json,accounting.json,synthesised.jsonl} benchmarks/results/rollout.jsonl "$3"
  ;;
esac
