#!/usr/bin/env bash
# What one session on a bare H200 host runs, after every part of the GPU pack is unpacked into /opt/site.
#   bash benchmarks/h200.sh capture OUT              capture against Hugging Face, and what handing over costs
#   bash benchmarks/h200.sh preflight smollm2 OUT    live preflight in float32 (exact) and bfloat16
#   bash benchmarks/h200.sh preflight kimi OUT       the same in bfloat16 for a target of Kimi-K2.5's shape, random weights
#   bash benchmarks/h200.sh rollout SOURCES OUT      the 10,000-prompt rollout beside plain vLLM
#   bash benchmarks/h200.sh stream llama8b|smollm2 CASES OUT   the stream, "b" alone needs one engine start ("a b decode"); b: 350 s
#   bash benchmarks/h200.sh serve SOURCES EVAL OUT   the whole pipeline, served on MT-bench, GSM8K and HumanEval; again completes it
#   bash benchmarks/h200.sh evaluate SOURCES EVAL OUT   the evaluation alone, of a run whose drafter is exported: 500 s
#   bash benchmarks/h200.sh test OUT                 tests/gpu/test_step_gpu.py: 80 s
#   bash benchmarks/h200.sh step PEERS SHAPES OUT    the training step beside the peers' checkouts in PEERS ("llama8b kimi ragged kimi-32k
#                                                    kimi-mla"): kimi 335 s, kimi-32k 68 s, each round of ragged about 180 s
#   bash benchmarks/h200.sh tune SHAPES OUT          tiles of the attention kernels for "kimi-mla llama8b"
#   bash benchmarks/h200.sh real ROLLOUT OUT         500 steps on 2,000 of a rollout's answers: does fp8 cost loss: 13 to 20 s for each of ten variants, after up to 130 s
#   bash benchmarks/h200.sh fp8 OUT                  what each choice of fast sums is worth in time, and a profile of each: about 60 s
# Seconds of test and step were measured on a host that reads its disk slowly (2026-12-02), where an engine takes 100 to
# start; the others are limits to give: each was cut off at less.
# Everything printed goes to OUT too, line by line, so a command that is cut off still says how far it came. Target and
# runs lie outside the checkout: a machine that is sent the tree again removes from it what it did not send.
# EAGLE3_COMMIT names the commit of a tree sent without .git.
set -euo pipefail
source /opt/site/env.sh
export PYTHONPATH=$PWD:$PYTHONPATH PYTHONUNBUFFERED=1 TRITON_F32_DEFAULT=ieee  # else float32 attention is TF32
if ! compgen -G "/opt/site/vllm/_C*.so" >/dev/null; then # 195 s of device time were lost to this once
  echo "a part of the pack is missing in /opt/site: unpack every one" >&2
  exit 1
fi
out=$(realpath -m "${!#}")
work=${WORK:-/opt/eagle3}
target=$work/smollm2-135m-instruct
mkdir -p "$out" "$work"
if [[ ! -f /opt/site/.compiled ]]; then # else every process of the first engine compiles what it imports
  python3 -m compileall -q -j 0 /opt/site >/dev/null 2>&1 || true
  touch /opt/site/.compiled
fi
keep_logs() { # how long what took, and why it failed
  (cd /tmp/ray/session_latest/logs && tar czf "$out/ray-$1.tgz" worker-*) 2>/dev/null || true
}
trap 'keep_logs "$1"' EXIT

smollm2() {
  python3 data/demo_target.py --gguf /opt/models/SmolLM2-135M-Instruct.Q4_1.gguf --out "$target"
}

# live NAME CONFIG OVERRIDE...: exit status of the first run that failed, after all have run
live() {
  local name=$1
  shift
  VLLM_LOGGING_LEVEL=WARNING python3 ray_jobs/preflight.py -c "$@" --depth live --json "$out/$name.json" \
    preflight.skip=[package_size,placement,disk] engine.enforce_eager=true \
    engine.gpu_memory_utilization=0.2 engine.kv_cache_bytes=4000000000 2>&1 | tee "$out/$name.txt" || status=1
}

status=0
case $1 in
capture)
  python3 -m pytest tests/gpu/test_engine_gpu.py -s --tb=short 2>&1 | tee "$out/capture.txt"
  ;;
preflight)
  case $2 in
  smollm2)
    smollm2
    live smollm2-float32 configs/h200-smollm2.yaml target.path="$target" engine.dtype=float32 stream.dtype=float32
    live smollm2-bfloat16 configs/h200-smollm2.yaml target.path="$target"
    ;;
  kimi)
    python3 -m tests.tiny /tmp/kimi-shaped
    live kimi-shaped configs/kimi-k2.5.yaml target.path=/tmp/kimi-shaped engine.dtype=bfloat16 engine.tensor_parallel=1 \
      engine.max_model_len=1024 corpus.max_len=512 drafter.aux_layers=[2,3,4] \
      drafter.draft_vocab_size=256 train.workers=1 preflight.gpus_per_node=1
    ;;
  esac
  ;;
rollout)
  smollm2
  python3 benchmarks/rollout.py -c configs/h200-smollm2.yaml runs_dir="$work/runs" target.path="$target" "corpus.sources=[$2]"
  cp "$work"/runs/h200-smollm2/rollout/{state.json,accounting.json,synthesised.jsonl} benchmarks/results/rollout.jsonl "$out"
  ;;
serve | evaluate)
  smollm2
  job=(-c configs/h200-smollm2.yaml runs_dir="$work/runs" target.path="$target" "corpus.sources=[$2]" evaluate.num_prompts=20 evaluate.sampled_answers=16
    "evaluate.sources=[$3/mt_bench.jsonl, $3/gsm8k.jsonl, $3/humaneval.jsonl]")
  if [[ $1 == serve ]]; then
    python3 ray_jobs/pipeline.py "${job[@]}" 2>&1 | tee "$out/pipeline.txt"
  else
    job+=(evaluate.untrained=false)
  fi
  python3 benchmarks/serve.py "${job[@]}" 2>&1 | tee "$out/serve.txt"
  (cd "$work/runs/h200-smollm2" && tar czf "$out/run.tgz" $(ls -d metrics.jsonl timings.json evaluate report 2>/dev/null))
  tar czf "$out/rollout.tgz" -C "$work/runs/h200-smollm2" rollout
  cp benchmarks/results/serve.jsonl "$out"
  ;;
stream)
  [[ $2 == llama8b ]] || { smollm2 && set -- "$1" "$target" "${@:3}"; }
  python3 -m benchmarks.stream --target "$2" --cases $3 2>&1 | tee "$out/stream-$(basename "$2").txt" || status=1
  cp benchmarks/results/stream.jsonl "$out"
  ;;
test)
  python3 -m pytest -q tests/gpu/test_step_gpu.py 2>&1 | tee "$out/test.txt" || status=1
  ;;
step)
  export PYTHONPATH=$2/site:$PYTHONPATH
  python3 benchmarks/step.py --shapes $3 --peers "$2" --out "$out/step.jsonl" --warmup 3 --iters 20 2>&1 | tee "$out/step.txt"
  ;;
tune)
  python3 benchmarks/tune_attention.py --shapes $2 2>&1 | tee "$out/tune.txt"
  ;;
fp8)
  python3 benchmarks/step.py --shapes llama8b --impls ours ours-fp8 ours-fp8: ours-fp8:forward+weight ours-fp8:forward+input --supervised 0.6 \
    --profile "$out/profile" --out "$out/step.jsonl" --warmup 3 --iters 20 2>&1 | tee "$out/fp8.txt" || status=1
  ;;
real)
  smollm2
  python3 benchmarks/step_real.py --target "$target" --rollout "$2" --limit 2000 --draft-vocab 16384 --tokens 4096 --ttt 4 --lr 1e-3 \
    --device cuda --dtype bfloat16 --cache "$work/step-real.pt" plain fp8 plain@1 fp8@1 plain@2 fp8@2 plain@3 fp8@3 fp8:forward+weight fp8:forward+input 2>&1 | tee "$out/real.txt"
  ;;
esac
exit $status
