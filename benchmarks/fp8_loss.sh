#!/usr/bin/env bash
# FP8 against bf16 over 300 steps of training: Pearson correlation of the losses >= 0.9997, mean relative error <= 0.6 %.
#
#   bash benchmarks/fp8_loss.sh                                     small variant, all speed switches, --fp8 native
#   bash benchmarks/fp8_loss.sh --model-variant base --fp8-min-dim 2048
#
# Further flags go to the FP8 run; those that both runs must share (--model-variant, --micro-batch-size, ...) go through SHARED.
# OUT: folder for the logs (default outputs/fp8_loss).
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-outputs/fp8_loss}
VARIANT=${VARIANT:-small}
FP8=${FP8:-native}
MIN_DIM=${MIN_DIM:-512}
read -r -a SHARED <<<"${SHARED:-}"

COMMON=(
  --model-name pi05 --model-variant "$VARIANT"
  --mock-data --mock-num-samples 100000 --mock-num-cameras 2 --mock-prompt-length 60
  --micro-batch-size 32 --bf16 --train-iters 300 --lr 5e-5 --lr-warmup-iters 100 --num-workers 8 --seed 1234
  --log-interval 50 --no-first-batch-report
  --compile --merge-projections --allow-tf32
  "${SHARED[@]}"
)
rm -rf "$OUT"
python pretrain_vla.py "${COMMON[@]}" --log-dir "$OUT/bf16"
python pretrain_vla.py "${COMMON[@]}" --log-dir "$OUT/fp8" --fp8 "$FP8" --fp8-min-dim "$MIN_DIM" "$@"
python tools/compare_loss.py --reference "$OUT/bf16" --candidate "$OUT/fp8" --output "$OUT/comparison.json" \
  --min-correlation 0.9997 --max-mean-error 0.006
