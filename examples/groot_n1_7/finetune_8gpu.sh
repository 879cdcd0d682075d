#!/usr/bin/env bash
# Fine-tune GR00T N1.7 on your own robot data with the eight GPUs of one machine.
#   DATA_PATH=... TOKENIZER_MODEL=... PRETRAINED_CHECKPOINT=... SAVE=... bash examples/groot_n1_7/finetune_8gpu.sh [any flag]
# Flags given at the end override those below. The same command resumes after an interruption.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"

DISTRIBUTED_ARGS=(--standalone --nnodes 1 --nproc-per-node "${NPROC_PER_NODE:-8}")

# MOCK_DATA=1 rehearses the launcher without data, weights or a GPU: a tiny model on synthetic samples.
if [ -n "${MOCK_DATA:-}" ]; then
    MODEL_ARGS=(--model-name groot_n1_7 --model-variant tiny)
    DATA_ARGS=(--mock-data --num-workers 0)
else
    MODEL_ARGS=(
        --model-name groot_n1_7
        --model-variant base
        --pretrained-checkpoint "${PRETRAINED_CHECKPOINT:?folder with released GR00T N1.7 weights}"
        --autocast-bf16
        --allow-tf32
    )
    DATA_ARGS=(
        --data-path "${DATA_PATH:?root folder of a LeRobot v2.0, v2.1 or v3.0 dataset}"
        --tokenizer-model "${TOKENIZER_MODEL:?tokenizer.json of the backbone, or the folder that holds it}"
        --augmentation groot
        --action-horizon-policy complete
        --num-workers 8
    )
fi

TRAINING_ARGS=(
    --micro-batch-size 80
    --global-batch-size 640
    --train-iters 20000
    --lr 1e-4
    --min-lr 0
    --lr-warmup-iters 1000
    --adam-beta2 0.999
    --weight-decay 1e-5
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
