"""The JSON files beside released N1.7 weights: processor_config.json, statistics.json, embodiment_id.json; read and written.

What this project does not know of a file is kept: reading and writing gives the same content. Source: spec of GR00T N1.7,
sections 3 to 5; layouts of N1.5 and N1.6 are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_vla.data.groot.modality import RELEASED_EMBODIMENTS, ModalityConfig
from megatron_vla.data.groot.preprocess import GrootPreprocessor
from megatron_vla.data.groot.state_action import KeyStatistics
from megatron_vla.data.groot.statistics import key_statistics
from megatron_vla.data.preprocess import MIXTURE_FILE

PROCESSOR_FILE, STATISTICS_FILE, EMBODIMENT_FILE = "processor_config.json", "statistics.json", "embodiment_id.json"
PREPROCESSOR_FOLDER = "preprocessor"  # of a training checkpoint
PROCESSOR_CLASS = "Gr00tN1d7Processor"
OLDER_CLASSES = {"Gr00tN1d6Processor": "N1.6", "GR00TTransform": "N1.5"}


@dataclass(frozen=True)
class ProcessorFiles:
    """All three. options: processor_kwargs without the modality configurations, as they are in the file.

    raw_modalities: the configurations as written, so that names and spellings survive; statistics by tag.
    """

    modalities: dict[str, ModalityConfig]
    options: dict[str, Any]
    statistics: dict[str, KeyStatistics]
    embodiments: dict[str, int]
    processor_class: str = PROCESSOR_CLASS
    raw_modalities: dict[str, Any] = field(default_factory=dict)
    raw_statistics: dict[str, Any] = field(default_factory=dict)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise ValueError(f"{path}: no readable JSON ({problem})") from problem
    if not isinstance(content, dict):
        raise ValueError(f"{path}: a JSON object is needed")
    return content


def _processor(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(whole content, its processor_kwargs). Raises ValueError for another generation of the model."""
    content = _read(path)
    name = str(content.get("processor_class", ""))
    if name in OLDER_CLASSES:
        raise ValueError(f"{path}: {name} belongs to GR00T {OLDER_CLASSES[name]}; this project reads N1.7 checkpoints")
    if "processor_kwargs" not in content or "modality_configs" not in content["processor_kwargs"]:
        raise ValueError(f"{path}: processor_kwargs.modality_configs is missing; this is no processor_config.json of N1.7")
    return content, content["processor_kwargs"]


def read_modalities(path: Path) -> dict[str, ModalityConfig]:
    """Modality configurations by tag of a processor_config.json. Raises ValueError."""
    _, options = _processor(path)
    return {tag: ModalityConfig.from_dict(c, f"{path}: {tag}") for tag, c in options["modality_configs"].items()}


def read_embodiments(folder: Path) -> dict[str, int]:
    """embodiment_id.json: tag -> slot. Raises ValueError."""
    path = folder / EMBODIMENT_FILE
    content = _read(path)
    bad = [tag for tag, slot in content.items() if not isinstance(slot, int) or isinstance(slot, bool) or slot < 0]
    if bad:
        raise ValueError(f"{path}: {', '.join(bad)} have no slot number")
    return dict(content)


def read_processor_files(folder: Path) -> ProcessorFiles:
    """The three files of a released checkpoint. Raises ValueError naming what is missing or wrong."""
    absent = [name for name in (PROCESSOR_FILE, STATISTICS_FILE, EMBODIMENT_FILE) if not (folder / name).is_file()]
    if absent:
        raise ValueError(f"{folder}: {', '.join(absent)} missing; a released N1.7 checkpoint has all three files")
    content, options = _processor(folder / PROCESSOR_FILE)
    statistics = _read(folder / STATISTICS_FILE)
    return ProcessorFiles(
        modalities=read_modalities(folder / PROCESSOR_FILE),
        options={name: value for name, value in options.items() if name != "modality_configs"},
        statistics={t: KeyStatistics.from_dict(c, f"{folder / STATISTICS_FILE}: {t}") for t, c in statistics.items()},
        embodiments=read_embodiments(folder),
        processor_class=str(content.get("processor_class", PROCESSOR_CLASS)),
        raw_modalities=options["modality_configs"],
        raw_statistics=statistics,
    )


def write_processor_files(folder: Path, files: ProcessorFiles) -> None:
    """Into an existing folder, in the released form."""
    modalities = {tag: files.raw_modalities.get(tag, config.to_dict()) for tag, config in files.modalities.items()}
    processor = {
        "processor_class": files.processor_class,
        "processor_kwargs": {"modality_configs": modalities, **files.options},
    }
    statistics = {tag: files.raw_statistics.get(tag, values.to_dict()) for tag, values in files.statistics.items()}
    for name, content in (
        (PROCESSOR_FILE, processor),
        (STATISTICS_FILE, statistics),
        (EMBODIMENT_FILE, files.embodiments),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def released_options(preprocessor: GrootPreprocessor) -> dict[str, Any]:
    """processor_kwargs of a preprocessor of this project, without the modality configurations."""
    settings = preprocessor.settings
    pictures = settings.pictures
    names = ("brightness", "contrast", "saturation", "hue")
    return {
        # One of the two released ways to say it: edge and fraction, in place of sizes in pixels.
        "image_crop_size": None,
        "image_target_size": None,
        "shortest_image_edge": pictures.edge,
        "crop_fraction": pictures.crop_fraction,
        "letter_box_transform": pictures.letter_box,
        "use_albumentations": pictures.image_filter == "area",
        "random_rotation_angle": None,
        "color_jitter_params": dict(zip(names, settings.color_jitter, strict=True)) if settings.color_jitter else None,
        "formalize_language": settings.formalize_language,
        "max_state_dim": settings.max_state_dim,
        "max_action_dim": settings.max_action_dim,
        "max_action_horizon": settings.action_horizon,
        "use_percentiles": settings.state_action.use_percentiles,
        "clip_outliers": True,
        "apply_sincos_state_encoding": settings.state_action.sin_cos,
        "use_relative_action": settings.state_action.use_relative_action,
        "exclude_state": settings.exclude_state,
        "state_dropout_prob": settings.state_dropout_prob,
    }


def to_processor_files(preprocessors: Mapping[str, GrootPreprocessor], base: ProcessorFiles | None = None) -> ProcessorFiles:
    """Released files of a model trained here: one entry per embodiment tag, over those of `base` (where it started from)."""
    base = base or ProcessorFiles({}, {}, {}, dict(RELEASED_EMBODIMENTS))
    modalities, statistics, embodiments = dict(base.modalities), dict(base.statistics), dict(base.embodiments)
    raw_modalities, raw_statistics = dict(base.raw_modalities), dict(base.raw_statistics)
    options = dict(base.options)
    for preprocessor in preprocessors.values():
        settings = preprocessor.settings
        tag = settings.embodiment_tag
        modalities[tag], embodiments[tag] = settings.modality, settings.embodiment_id
        statistics[tag] = key_statistics(preprocessor.statistics, settings.stream)
        raw_modalities.pop(tag, None)
        raw_statistics.pop(tag, None)
        options.update(released_options(preprocessor))
    return ProcessorFiles(modalities, options, statistics, embodiments, base.processor_class, raw_modalities, raw_statistics)


def option_differences(path: Path, family: Any) -> list[tuple[str, str, str]]:
    """(flag, the checkpoint's value, the run's) where a run's pictures, language or normalization differ from released ones."""
    _, options = _processor(path)
    target, crop = options.get("image_target_size"), options.get("image_crop_size")
    stated = {
        "image_size": options.get("shortest_image_edge") or (target[0] if target else None),
        "image_crop_fraction": options.get("crop_fraction") or (crop[0] / target[0] if crop and target else None),
        "letter_box": options.get("letter_box_transform"),
        "formalize_language": options.get("formalize_language"),
        "use_percentiles": options.get("use_percentiles"),
        "use_relative_action": options.get("use_relative_action"),
        "sin_cos_state": options.get("apply_sincos_state_encoding"),
        "max_state_dim": options.get("max_state_dim"),
        "max_action_dim": options.get("max_action_dim"),
    }
    here = {name: getattr(family, name) for name in stated}
    angle = options.get("random_rotation_angle")
    rotation = [("--augmentation", f"pictures rotated by up to {angle} degrees", "no rotation")] if angle else []
    return rotation + [
        ("--" + name.replace("_", "-"), str(value), str(here[name]))
        for name, value in stated.items()
        if value is not None and value != here[name]
    ]


def carry_processor_files(source: Path, output: Path) -> list[str]:
    """What a conversion puts beside converted weights; lines for people.

    From a folder that has the three files: the same bytes. From a training checkpoint: made of its preprocessing, over the
    files of the checkpoint that it started from, where those still exist. Raises ValueError for files that cannot be read.
    """
    folder = source if source.is_dir() else source.parent
    names = (PROCESSOR_FILE, STATISTICS_FILE, EMBODIMENT_FILE)
    present = [name for name in names if (folder / name).is_file()]
    stored = folder / PREPROCESSOR_FOLDER
    if not stored.is_dir():
        for name in present:
            (output / name).write_bytes((folder / name).read_bytes())
        return [f"{', '.join(present)} copied"] if present else []
    mixture = stored / MIXTURE_FILE
    parts = [stored / name for name in json.loads(mixture.read_text())["datasets"]] if mixture.is_file() else [stored]
    start = _read(folder / "config.json").get("model", {}).get("pretrained_checkpoint")
    has_base = start is not None and all((Path(start) / name).is_file() for name in names)
    base = read_processor_files(Path(start)) if start is not None and has_base else None
    write_processor_files(output, to_processor_files({part.name: GrootPreprocessor.load(part) for part in parts}, base))
    origin = f"over those of {start}" if has_base else "of this training run alone"
    return [f"{', '.join(names)} written, {origin}"]
