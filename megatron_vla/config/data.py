"""Where the robot data is and how a sample is made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AugmentationKind = Literal["none", "openpi_torch", "openpi_jax", "groot"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data: datasets, cameras, prompt, normalization, loading"""

    data_path: tuple[str, ...] = ()
    """Root folder of a LeRobot v2.0, v2.1, v3.0 or RLDS dataset, read in place. Several, each [NAME=]FOLDER, are mixed; the
    name is the folder's if not given."""

    data_weights: tuple[float, ...] = ()
    """Share of each --data-path in the samples, in any unit. Not set: by size, so that each sample is seen once per epoch."""

    data_override: tuple[str, ...] = ()
    """NAME:FLAG=VALUE[,VALUE] sets a flag of this group for one dataset of a mixture, for example libero:action-key=actions."""

    mixture_statistics: Literal["per_dataset", "per_embodiment", "merged"] = "per_dataset"
    """Normalize each dataset of a mixture by its own statistics, those of one robot type by theirs together, or all by those of
    all samples together. Datasets that share statistics need equal dimensions."""

    rlds_mapping: str | None = None
    """JSON file (or the JSON itself) with the rate and, where defaults do not fit, the keys of an RLDS dataset."""

    action_fps: float | None = None
    """Steps per second of the action chunk. Not set: the dataset's own rate, one step per frame."""

    action_horizon_seconds: float | None = None
    """Length of the action chunk in seconds, whatever the dataset's rate; sets --action-fps to --action-horizon over it."""

    action_resampling: Literal["exact", "nearest", "linear"] = "exact"
    """How a chunk gets --action-fps: every k-th frame (anything else is an error), the nearest frame, or between frames."""

    mock_data: bool = False
    """Deterministic synthetic samples instead of a dataset (benchmarks, launcher tests)."""

    mock_num_samples: int = 4096
    """Samples per epoch of the mock dataset."""

    mock_num_cameras: int = 2
    """Cameras of the mock dataset."""

    mock_camera_counts: tuple[int, ...] = ()
    """Cameras of a mock sample, drawn from these with equal probability (a mixture of robots). Not set: --mock-num-cameras."""

    mock_prompt_length: int = 60
    """Valid prompt tokens of a mock sample."""

    mock_num_embodiments: int = 1
    """Embodiments of the mock dataset, in turn (families with per-embodiment weights)."""

    mock_min_prompt_length: int | None = None
    """Draw the prompt tokens of a mock sample between this and --mock-prompt-length. Not set: always --mock-prompt-length."""

    camera_map: tuple[str, ...] = ()
    """VIEW=DATASET_KEY pairs, for example base=observation.images.top; the order is the order of the model's views. In a
    mixture NAME:VIEW=DATASET_KEY holds for one dataset; views that it does not map are empty, masked slots there."""

    num_images: int | None = None
    """Image slots of the model. Not set: as many as cameras are mapped. More: the rest are empty, masked slots."""

    state_key: str = "observation.state"
    """Dataset feature that holds the proprioceptive state."""

    action_key: str = "action"
    """Dataset feature that holds the action."""

    embodiment_tag: str = "new_embodiment"
    """GR00T: which robot this is; chooses per-embodiment weights, and keys and statistics in a checkpoint's files."""

    embodiment_id: int | None = None
    """GR00T: slot of the per-embodiment weights. Not set: --embodiment-tag's in the checkpoint or the released table."""

    modality_config: str | None = None
    """GR00T: JSON file with the robot's keys, steps and action representations (as in processor_config.json). Not set: the
    pretrained checkpoint's for --embodiment-tag, else every key of meta/modality.json with actions as the dataset has them."""

    language_key: str = "task"
    """GR00T: where instructions come from when no modality configuration says: the episode's task, or annotation.NAME."""

    dataset_action_representation: Literal["absolute", "delta"] = "absolute"
    """How the dataset's actions are written: absolute targets, or already relative to the state."""

    model_action_representation: Literal["as_dataset", "delta"] = "as_dataset"
    """What the model predicts: the dataset's own actions, or actions minus the current state (--delta-action-dims)."""

    delta_action_dims: tuple[int, ...] = ()
    """Action dimensions made relative to the state of the same index; grippers are usually left out."""

    normalization: Literal["quantile", "mean_std", "identity"] = "quantile"
    """Normalization of state and actions."""

    normalization_variant: Literal["openpi", "lerobot"] = "openpi"
    """Handling of a zero range: openpi adds 1e-6 to every range, LeRobot replaces exact zeros by 1e-8."""

    statistics_path: str | None = None
    """statistics.json made by tools/compute_norm_stats.py, one file for all datasets of a mixture. Not set: computed at start
    by every rank and stored in the checkpoint."""

    statistics_quantiles: Literal["auto", "exact", "histogram"] = "auto"
    """Quantiles by sorting every value, or by openpi's running histogram of 5000 bins. auto: exact up to 100 million values."""

    allow_foreign_statistics: bool = False
    """Accept a --statistics-path made on other data or transforms (a released checkpoint's own); the range check still runs."""

    max_out_of_range_fraction: float = 0.2
    """Refuse statistics when more than this share of real samples normalizes outside [-1.5, 1.5] in any dimension."""

    image_resize: Literal["pil_bilinear", "torch_bilinear"] = "pil_bilinear"
    """Resize with padding: antialiased uint8 (openpi's data pipeline) or float without antialias (LeRobot)."""

    tokenizer_model: str | None = None
    """Prompt tokenizer (a local path; nothing is downloaded). Pi0.5: SentencePiece model file. GR00T: tokenizer.json, or a
    folder with it or with vocab.json, merges.txt and tokenizer_config.json."""

    prompt_state: bool = True
    """Put the discretized state into the prompt (Task: ..., State: ...;). Off: task text and a newline."""

    prompt_overflow: Literal["error", "truncate"] = "error"
    """What to do with a prompt longer than --max-prompt-length; truncation is counted and printed."""

    prompt_padding: Literal["max", "longest", "bucket"] = "bucket"
    """Pad prompts to --max-prompt-length, to the longest of the micro-batch, or up to a multiple of --prompt-bucket-size."""

    prompt_bucket_size: int = 32
    """Granularity of prompt lengths with --prompt-padding bucket."""

    packing: bool = False
    """Put the prefixes of several samples end to end into packs of --pack-token-budget tokens, without padding: a micro-batch
    is then a pack of up to --micro-batch-size samples, and a global batch a fixed number of packs."""

    pack_token_budget: int = 8192
    """Prefix tokens of a pack (images that are there, and valid prompt tokens)."""

    pack_max_images: int | None = None
    """Images of a pack: the vision tower's fixed batch. Not set: as many as the token budget has room for."""

    pack_pool_size: int = 32
    """Samples next in the order that a pack is filled from, the best fitting first (a part of the sample order)."""

    pack_max_wait: int = 16
    """Packs of its stream that a sample waits at most before it is in one (a part of the sample order)."""

    empty_instruction: Literal["error", "drop", "keep"] = "error"
    """Episodes without a task instruction: refuse, leave out, or train on them."""

    drop_nonfinite: bool = False
    """Leave out samples whose window holds NaN or Inf (printed with a count). Off: refuse them, located."""

    drop_idle_frames: bool = False
    """Leave out samples whose state does not move to the next frame (printed with a count)."""

    exclude_episodes_file: str | None = None
    """Text file with one episode index per line to leave out (tools/check_dataset.py writes one)."""

    augmentation: AugmentationKind = "none"
    """Random changes of training images. Pi0.5: crop, rotation and colours as openpi's PyTorch or JAX code has it (they
    differ). GR00T: groot, one crop for all pictures of a sample and colour jitter."""

    augmentation_device: Literal["cpu", "gpu"] = "cpu"
    """Augment in the data workers, or on the training device in one batched pass (a quarter of the bytes to copy)."""

    action_horizon_policy: Literal["clamp", "complete"] = "clamp"
    """Frames to train on: all (chunks beyond the episode's end repeat its last action), or only those with a full chunk."""

    shuffle: bool = True
    """Shuffle samples each epoch. Off: storage order."""

    data_access: Literal["random", "decode_once"] = "random"
    """random: any frame at any time. decode_once: shards of episodes are decoded in one pass and shuffled inside."""

    shard_bytes: int = 128 << 20
    """Decoded bytes of a shard with --data-access decode_once (a part of the sample order; larger mixes more episodes)."""

    decode_lanes: int = 8
    """Shards that are mixed at a time, over all ranks (a part of the sample order; a multiple of the data-parallel size)."""

    shard_cache_bytes: int = 4 << 30
    """Host memory per rank for decoded shards; a start that would need more is refused."""

    prefetch_shards: int | None = None
    """Shards decoded ahead, each by one data worker; 0 decodes in the training process when a shard is needed. Not set: as many
    as there are workers (2 at least), or as --shard-cache-bytes has room for."""

    data_stall_timeout_seconds: float = 300.0
    """End all ranks, naming file and worker, when one waits longer for a batch; must be below the process-group timeout."""

    video_backend: Literal["auto", "pyav", "decord", "torchcodec"] = "auto"
    """Video decoder. auto: first one that decodes every codec of the dataset; an explicit choice has no fallback."""

    video_decoder_cache_size: int = 8
    """Open video decoders kept per worker (least recently used are closed)."""

    num_workers: int = 2
    """Data loading processes per rank; 0 loads in the training process."""

    prefetch_factor: int = 2
    """Micro-batches that each worker prepares ahead."""

    data_cache_path: str | None = None
    """Folder for small derived tables. Not set: nothing is written."""
