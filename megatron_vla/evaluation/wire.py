"""openpi's wire format (msgpack, arrays as {b"__ndarray__": true, b"data", b"dtype", b"shape"}) and what a request may hold.

Written after openpi-client 0.1.2. Its decoder trusts the sender; this one checks every array, since anybody may connect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_vla.evaluation.environments.interface import Observation

# No object or void arrays (they can hide anything), no complex numbers: as openpi.
ARRAY_KINDS = "buif"
MAX_DIMENSIONS = 8
# Longer than any instruction, short enough that nobody can keep the tokenizer busy.
MAX_PROMPT_CHARACTERS = 4096
PROMPT_KEYS = ("prompt", "task", "instruction")


class WireError(ValueError):
    """A message that cannot be understood; the text may be sent back."""


def _encoded(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind not in ARRAY_KINDS:
            raise WireError(f"arrays of {value.dtype} cannot be sent")
        if isinstance(value, np.generic):
            return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _dtype(value: Any) -> np.dtype[Any]:
    try:
        dtype = np.dtype(value)
    except (TypeError, ValueError, SyntaxError) as problem:
        raise WireError(f"array dtype {value!r} is unknown") from problem
    if dtype.kind not in ARRAY_KINDS or dtype.subdtype is not None:
        raise WireError(f"arrays of {dtype} are not accepted")
    return dtype


def _decoded(content: dict[Any, Any]) -> Any:
    if b"__ndarray__" in content:
        data, shape = content.get(b"data"), content.get(b"shape")
        dtype = _dtype(content.get(b"dtype"))
        if not isinstance(data, bytes) or not isinstance(shape, (list, tuple)) or len(shape) > MAX_DIMENSIONS:
            raise WireError("an array needs bytes as data and a short list as shape")
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape):
            raise WireError(f"array shape {list(shape)[:MAX_DIMENSIONS]} is no shape")
        if math.prod(shape) * dtype.itemsize != len(data):
            raise WireError(f"array of shape {list(shape)} and dtype {dtype} does not have {len(data)} bytes")
        return np.frombuffer(data, dtype).reshape(shape)
    if b"__npgeneric__" in content:
        try:
            return _dtype(content.get(b"dtype")).type(content.get(b"data"))
        except (TypeError, ValueError, OverflowError) as problem:
            raise WireError("a scalar does not fit its dtype") from problem
    return content


def pack(value: Any) -> bytes:
    """Message -> bytes."""
    import msgpack

    packed: bytes = msgpack.packb(value, default=_encoded)
    return packed


def unpack(message: bytes) -> Any:
    """Bytes -> message. Raises WireError for anything that is not one well-formed message."""
    import msgpack

    try:
        return msgpack.unpackb(message, object_hook=_decoded, strict_map_key=False)
    except WireError:
        raise
    # The decoder answers broken bytes with errors of many kinds, deep nesting and unhashable keys among them.
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.exceptions.UnpackException) as problem:
        raise WireError(f"not a msgpack message ({type(problem).__name__}: {str(problem)[:100]})") from problem


def _find(message: Mapping[Any, Any], key: str, names: Mapping[str, str]) -> Any:
    """Value of a dataset feature: under its own name, with slashes for dots, or under the name of the map."""
    for name in (names.get(key), key, key.replace(".", "/"), key.rsplit(".", 1)[-1]):
        if name is not None and name in message:
            return message[name]
    sent = ", ".join(str(k)[:40] for k in list(message)[:16]) or "nothing"
    raise WireError(f"{names.get(key, key)} is missing; the request has {sent}")


def is_picture_shape(shape: tuple[int, ...]) -> bool:
    """[H, W, 3], or [frames, H, W, 3]."""
    return len(shape) in (3, 4) and shape[-1] == 3


def observation_of(message: Any, camera_keys: tuple[str, ...], state_key: str, names: Mapping[str, str]) -> Observation:
    """Request -> Observation. `names`: dataset feature -> key that clients send. Raises WireError saying what is wrong.

    Pictures: uint8 [H, W, 3], or [3, H, W] as openpi's clients may send them; [frames, H, W, 3] of a policy that sees several
    (the preprocessing says which number it takes).
    """
    if not isinstance(message, Mapping):
        raise WireError(f"a request is a dictionary, not {type(message).__name__}")
    images = {}
    for key in camera_keys:
        picture = _find(message, key, names)
        if isinstance(picture, np.ndarray) and picture.ndim == 3 and picture.shape[0] == 3 and picture.shape[2] != 3:
            picture = np.ascontiguousarray(picture.transpose(1, 2, 0))
        if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or not is_picture_shape(picture.shape):
            found = f"{picture.dtype} {list(picture.shape)}" if isinstance(picture, np.ndarray) else type(picture).__name__
            raise WireError(f"{key}: a picture is uint8 [height, width, 3], not {found}")
        if 0 in picture.shape:
            raise WireError(f"{key}: the picture is empty")
        images[key] = picture
    state = _find(message, state_key, names)
    if not isinstance(state, (np.ndarray, list, tuple)):
        raise WireError(f"{state_key}: an array is needed, not {type(state).__name__}")
    try:
        state_D = np.asarray(state, dtype=np.float32)
    except (TypeError, ValueError) as problem:
        raise WireError(f"{state_key}: numbers are needed") from problem
    prompt = next((message[key] for key in PROMPT_KEYS if key in message), None)
    if isinstance(prompt, np.ndarray) or not isinstance(prompt, (str, bytes)):
        raise WireError("prompt is missing: send the instruction as a string")
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        raise WireError(f"prompt of {len(prompt)} characters; {MAX_PROMPT_CHARACTERS} are accepted")
    return Observation(images, state_D, prompt.decode("utf-8", "replace") if isinstance(prompt, bytes) else prompt)
