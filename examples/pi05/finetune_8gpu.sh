#!/usr/bin/env bash
# Fine-tune Pi0.5 on your own robot data with the eight GPUs of one machine.
#   DATA_PATH=... TOKENIZER_MODEL=... PRETRAINED_CHECKPOINT=... SAVE=... bash examples/pi05/finetune_8gpu.sh [any flag]
# Flags given at the end override those below. The same command resumes after an interruption.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"

DISTRIBUTED_ARGS=(--standalone --nnodes 1 --nproc-per-node "${NPROC_PER_NODE:-8}")

# MOCK_DATA=1 rehearses the launcher without data, weights or a GPU: a tiny model on synthetic samples.
if [ -n "${MOCK_DATA:-}" ]; then
    MODEL_ARGS=(--model-name pi05 --model-variant tiny)
    DATA_ARGS=(--mock-data --num-workers 0)
else
    MODEL_ARGS=(
        --model-name pi05
        --model-variant base
        --pretrained-checkpoint "${PRETRAINED_CHECKPOINT:?file or folder with Pi0.5 weights (openpi-PyTorch or LeRobot safetensors)}"
        --bf16
    )
    DATA_ARGS=(
        --data-path "${DATA_PATH:?root folder of a LeRobot v2.0, v2.1 or v3.0 dataset}"
        --tokenizer-model "${TOKENIZER_MODEL:?path of paligemma_tokenizer.model}"
        --num-workers 8
    )
fi

TRAINING_ARGS=(
    --micro-batch-size 32
    --global-batch-size 256
    --train-iters 30000
    --lr 5e-5
    --min-lr 5e-6
    --lr-warmup-iters 1000
    --ema-decay 0.999
    --clip-grad 1.0
)

LOGGING_ARGS=(
    --save "${SAVE:?folder for checkpoints, metrics and the first-batch report}"
    --load "$SAVE"
    --save-interval 1000
    --keep-last 3
    --log-interval 10
    --tensorboard
)

exec torchrun "${DISTRIBUTED_ARGS[@]}" "$ROOT/pretrain_vla.py" \
    "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${TRAINING_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
