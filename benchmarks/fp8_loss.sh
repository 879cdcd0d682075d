#!/usr/bin/env bash
# FP8 against bf16 over 300 steps of training: Pearson correlation of the losses >= 0.9997, mean relative error <= 0.6 %.
#
#   bash benchmarks/fp8_loss.sh --fp8-recipe delayed --fp8-fast-accumulation all        base, openpi's learning rates, all switches
#
# Arguments go to the FP8 run. MODEL, DATA, SCHEDULE: flags that both runs share. OUT: folder for logs and the comparison.
# Steps that take a model from its first values past the first plateau of the loss do not suit: single roundings then decide
# when it leaves the plateau (small model, --lr 5e-5, --lr-warmup-iters 100: the same until step 120, 12 % apart after it).
# WARMUP: so many steps in bf16 with the flags of WARMUP_SCHEDULE come first, once (their checkpoint, 12 bytes a parameter, stays
# in OUT), and both runs fine-tune what they made.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-outputs/fp8_loss}
FP8=${FP8:-native}
MODEL=${MODEL:---model-name pi05 --model-variant base --micro-batch-size 16 --attention-backend matmul --compile --merge-projections
  --allow-tf32 --runner full_iteration_graph}
DATA=${DATA:---mock-data --mock-num-samples 100000 --mock-num-cameras 2 --mock-prompt-length 60 --num-workers 8}
SCHEDULE=${SCHEDULE:---lr 2.5e-5 --lr-warmup-iters 1000 --lr-decay-iters 30000}
WARMUP=${WARMUP:-0}
WARMUP_SCHEDULE=${WARMUP_SCHEDULE:---lr 5e-5 --lr-warmup-iters 100 --lr-decay-style constant}
read -r -d '' -a COMMON <<<"$MODEL $DATA" || true
read -r -d '' -a BEFORE <<<"$WARMUP_SCHEDULE" || true
read -r -d '' -a COMPARED <<<"$SCHEDULE" || true

COMMON+=(--bf16 --log-interval 50 --no-first-batch-report)
COMPARED+=(--seed 1234)
BEFORE+=(--seed 4321)  # other draws than the compared steps have
rm -rf "$OUT/bf16" "$OUT/fp8" "$OUT"/comparison.*
if [ "$WARMUP" -gt 0 ]; then
  BEFORE=("${COMMON[@]}" "${BEFORE[@]}" --train-iters "$WARMUP")
  if [ "$(cat "$OUT/start/made_with" 2>/dev/null)" != "${BEFORE[*]}" ]; then
    rm -rf "$OUT/start"
    python pretrain_vla.py "${BEFORE[@]}" --save "$OUT/start"
    echo "${BEFORE[*]}" >"$OUT/start/made_with"
  fi
  COMPARED+=(--pretrained-checkpoint "$OUT/start/iter_$(printf %07d "$WARMUP")")
fi
COMPARED=("${COMMON[@]}" "${COMPARED[@]}" --train-iters 300)
python pretrain_vla.py "${COMPARED[@]}" --log-dir "$OUT/bf16"
python pretrain_vla.py "${COMPARED[@]}" --log-dir "$OUT/fp8" --fp8 "$FP8" "$@"
python tools/compare_loss.py --reference "$OUT/bf16" --candidate "$OUT/fp8" --output "$OUT/comparison.json" \
  --min-correlation 0.9997 --max-mean-error 0.006
