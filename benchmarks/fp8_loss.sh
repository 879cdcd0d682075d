#!/usr/bin/env bash
# FP8 against bf16 over 300 steps of fine-tuning: Pearson correlation of the losses >= 0.9997, mean relative error <= 0.6 %.
#
#   bash benchmarks/fp8_loss.sh --fp8-recipe delayed                a small model, made here, on generated samples
#   INIT=outputs/loop/run/iter_0002000 DATA="--data-path outputs/loop/demonstrations ..." bash benchmarks/fp8_loss.sh --fp8-recipe delayed
#
# Fine-tuning starts from a trained model, as FP8 is used: from first values, single roundings decide when the loss leaves its
# plateau, and two bf16 runs that differ only in their kernels part by far more than 0.6 %. That control (bf16 with other
# kernels) is run and printed beside FP8, so that what the figures can resolve is known.
#
# Arguments go to the FP8 run. INIT: checkpoint to start from (default: PRETRAIN_ITERS of bf16 training, made here).
# DATA, MODEL: flags that all runs share. OUT: folder for checkpoints, logs and comparisons.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-outputs/fp8_loss}
FP8=${FP8:-native}
MIN_DIM=${MIN_DIM:-512}
PRETRAIN_ITERS=${PRETRAIN_ITERS:-1500}
read -r -a DATA <<<"${DATA:---mock-data --mock-num-samples 100000 --mock-num-cameras 2 --mock-prompt-length 60 --num-workers 8}"
read -r -a MODEL <<<"${MODEL:---model-name pi05 --model-variant small --micro-batch-size 32 --allow-tf32 --compile --merge-projections --runner full_iteration_graph}"

COMMON=("${MODEL[@]}" "${DATA[@]}" --bf16 --seed 1234 --log-interval 50 --no-first-batch-report)
FINE_TUNE=("${COMMON[@]}" --train-iters 300 --lr 2.5e-5 --lr-warmup-iters 100)
rm -rf "$OUT"
if [[ -z ${INIT:-} ]]; then
  python pretrain_vla.py "${COMMON[@]}" --train-iters "$PRETRAIN_ITERS" --lr 2e-4 --lr-warmup-iters 100 --save "$OUT/pretrained"
  INIT=$(echo "$OUT"/pretrained/iter_*)
fi
FINE_TUNE+=(--pretrained-checkpoint "$INIT" --seed 4321)
python pretrain_vla.py "${FINE_TUNE[@]}" --log-dir "$OUT/bf16"
python pretrain_vla.py "${FINE_TUNE[@]}" --log-dir "$OUT/fp8" --fp8 "$FP8" --fp8-min-dim "$MIN_DIM" "$@"
python pretrain_vla.py "${FINE_TUNE[@]}" --log-dir "$OUT/control" --no-fused-kernels --attention-backend eager
python tools/compare_loss.py --reference "$OUT/bf16" --candidate "$OUT/control" --output "$OUT/control.json"
python tools/compare_loss.py --reference "$OUT/bf16" --candidate "$OUT/fp8" --output "$OUT/comparison.json" \
  --min-correlation 0.9997 --max-mean-error 0.006
