"""What a robot's state, action, video and language consist of: the modality configuration of an embodiment tag.

The JSON form is that of released checkpoints' processor_config.json (spec of GR00T N1.7, section 4); it says which keys are
used, in which order, at which steps, and how each action is represented. Where the numbers lie in a dataset's columns is
another matter: column_layout.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_vla.data.groot.rotations import ROTATION_FORMATS

Representation = Literal["RELATIVE", "DELTA", "ABSOLUTE"]
REPRESENTATIONS = ("RELATIVE", "DELTA", "ABSOLUTE")
ACTION_TYPES = ("EEF", "NON_EEF")
DEFAULT_FORMAT = "DEFAULT"
MODALITIES = ("video", "state", "action", "language")
TASK_LANGUAGE = "task"  # language key that stands for the episode's own task text

# Projector slots of the released checkpoint; a checkpoint's embodiment_id.json overrides them (spec, section 4).
RELEASED_EMBODIMENTS: Mapping[str, int] = {
    "simpler_env_google": 0,
    "simpler_env_widowx": 1,
    "libero_sim": 2,
    "new_embodiment": 10,
    "robocasa_panda_omron": 10,
    "robocasa_gr1_tabletop": 10,
    "unitree_g1_sonic": 11,
    "oxe_droid_relative_eef_relative_joint": 24,
    "real_g1_relative_eef_relative_joints": 25,
    "unitree_g1_full_body_with_waist_height_nav_cmd": 25,
    "real_r1_pro_sharpa_relative_eef": 26,
    "real_r1_pro_sharpa_relative_eef_human": 26,
    "real_r1_pro_sharpa_relative_eef_maxinsights": 26,
    "real_r1_pro_sharpa_relative_eef_mecka": 26,
    "xdof_relative_eef_relative_joint": 27,
    "xdof_relative_eef_relative_joint_subtask": 27,
}


@dataclass(frozen=True, kw_only=True)
class ActionSpec:
    """One action key. rep RELATIVE is made relative to the state `state_key` (the key itself if None); the others pass.

    type EEF: a pose in `format` (rotations.py); NON_EEF: plain numbers.
    """

    rep: Representation = "ABSOLUTE"
    type: str = "NON_EEF"
    format: str = DEFAULT_FORMAT
    state_key: str | None = None

    @property
    def pose_format(self) -> str | None:
        """The rotation format of a relative pose, else None."""
        return self.format if self.type == "EEF" and self.rep == "RELATIVE" else None

    @staticmethod
    def from_dict(content: Mapping[str, Any], where: str) -> ActionSpec:
        """Names as released, in any case ("relative", "RELATIVE", "xyz+rot6d"). Raises ValueError."""
        spec = ActionSpec(
            rep=_named(content, "rep", REPRESENTATIONS, where),  # type: ignore[arg-type]
            type=_named(content, "type", ACTION_TYPES, where),
            format=_named(content, "format", (DEFAULT_FORMAT, *ROTATION_FORMATS), where),
            state_key=content.get("state_key"),
        )
        if spec.pose_format == DEFAULT_FORMAT:
            raise ValueError(f"{where}: a relative EEF action needs a format, one of {', '.join(ROTATION_FORMATS)}")
        return spec

    def to_dict(self) -> dict[str, Any]:
        """As released."""
        return {"rep": self.rep, "type": self.type, "format": self.format, "state_key": self.state_key}


def _named(content: Mapping[str, Any], field: str, known: tuple[str, ...], where: str) -> str:
    if field not in content:
        raise ValueError(f"{where}: {field} is missing; known are {', '.join(known)}")
    value = str(content[field]).upper().replace("+", "_")
    if value not in known:
        raise ValueError(f"{where}: {field} {content[field]!r} is not one of {', '.join(known)}")
    return value


@dataclass(frozen=True, kw_only=True)
class ModalityKeys:
    """One modality: steps relative to the sampled one, keys in the order of concatenation, and how they are encoded.

    sin_cos_keys, mean_std_keys: of these keys; None where the file has none (kept apart from an empty list, for writing back).
    action_specs: one per key, actions only.
    """

    delta_indices: tuple[int, ...]
    keys: tuple[str, ...]
    sin_cos_keys: tuple[str, ...] | None = None
    mean_std_keys: tuple[str, ...] | None = None
    action_specs: tuple[ActionSpec, ...] | None = None

    @staticmethod
    def from_dict(content: Mapping[str, Any], where: str) -> ModalityKeys:
        """Raises ValueError naming `where`."""
        missing = [name for name in ("delta_indices", "modality_keys") if name not in content]
        if missing:
            raise ValueError(f"{where}: {', '.join(missing)} missing")
        keys = tuple(content["modality_keys"])
        if len(set(keys)) != len(keys) or not keys:
            raise ValueError(f"{where}: modality_keys {list(keys)} must name at least one key, each once")
        specs = content.get("action_configs")
        if specs is not None and len(specs) != len(keys):
            raise ValueError(f"{where}: {len(specs)} action_configs for {len(keys)} modality_keys; give one for each")
        result = ModalityKeys(
            delta_indices=tuple(int(step) for step in content["delta_indices"]),
            keys=keys,
            sin_cos_keys=_optional(content.get("sin_cos_embedding_keys")),
            mean_std_keys=_optional(content.get("mean_std_embedding_keys")),
            action_specs=None
            if specs is None
            else tuple(ActionSpec.from_dict(spec, f"{where}.{key}") for key, spec in zip(keys, specs, strict=True)),
        )
        for name in ("sin_cos_keys", "mean_std_keys"):
            unknown = sorted(set(getattr(result, name) or ()) - set(keys))
            if unknown:
                raise ValueError(f"{where}: {name.replace('_keys', '_embedding_keys')} {unknown} are not in modality_keys")
        return result

    def to_dict(self) -> dict[str, Any]:
        """As released."""
        return {
            "delta_indices": list(self.delta_indices),
            "modality_keys": list(self.keys),
            "sin_cos_embedding_keys": None if self.sin_cos_keys is None else list(self.sin_cos_keys),
            "mean_std_embedding_keys": None if self.mean_std_keys is None else list(self.mean_std_keys),
            "action_configs": None if self.action_specs is None else [spec.to_dict() for spec in self.action_specs],
        }


def _optional(names: Any) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


@dataclass(frozen=True, kw_only=True)
class ModalityConfig:
    """The four modalities of one embodiment tag."""

    video: ModalityKeys
    state: ModalityKeys
    action: ModalityKeys
    language: ModalityKeys

    @property
    def action_specs(self) -> tuple[ActionSpec, ...]:
        """One per action key; absolute where the file says nothing."""
        return self.action.action_specs or tuple(ActionSpec() for _ in self.action.keys)

    @property
    def num_action_steps(self) -> int:
        """Steps of an action chunk."""
        return len(self.action.delta_indices)

    @property
    def frames_per_step(self) -> int:
        """Dataset frames from one action step to the next."""
        return self.action.delta_indices[1] - self.action.delta_indices[0] if self.num_action_steps > 1 else 1

    def state_key_of(self, number: int) -> str:
        """Name of the state that action key `number` is relative to."""
        return self.action_specs[number].state_key or self.action.keys[number]

    @staticmethod
    def from_dict(content: Mapping[str, Any], where: str) -> ModalityConfig:
        """Raises ValueError naming `where` and what is missing or cannot be trained on."""
        missing = [name for name in MODALITIES if name not in content]
        if missing:
            raise ValueError(f"{where}: modality {', '.join(missing)} missing; needed are {', '.join(MODALITIES)}")
        config = ModalityConfig(**{name: ModalityKeys.from_dict(content[name], f"{where}.{name}") for name in MODALITIES})
        config._check(where)
        return config

    def _check(self, where: str) -> None:
        steps = self.action.delta_indices
        stride = self.frames_per_step
        if not steps or steps[0] != 0 or stride < 1 or steps != tuple(range(0, stride * len(steps), stride)):
            raise ValueError(f"{where}.action: delta_indices {list(steps)} must be evenly spaced from 0 on")
        if self.state.delta_indices[-1] != 0 or any(step > 0 for step in self.state.delta_indices):
            raise ValueError(f"{where}.state: delta_indices {list(self.state.delta_indices)} must end with 0, the present")
        if any(step > 0 for step in self.video.delta_indices):
            raise ValueError(f"{where}.video: delta_indices {list(self.video.delta_indices)} look into the future")
        if len(self.language.keys) != 1 or self.language.delta_indices != (0,):
            raise ValueError(f"{where}.language: exactly one key at delta_indices [0] is supported")
        for number, spec in enumerate(self.action_specs):
            if spec.rep == "RELATIVE" and self.state_key_of(number) not in self.state.keys:
                raise ValueError(
                    f"{where}.action: {self.action.keys[number]} is relative to the state {self.state_key_of(number)!r}, which "
                    f"is not among the state's modality_keys {list(self.state.keys)}"
                )

    def to_dict(self) -> dict[str, Any]:
        """As released; inverse of `from_dict`."""
        return {name: getattr(self, name).to_dict() for name in MODALITIES}
