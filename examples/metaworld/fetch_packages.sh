#!/usr/bin/env bash
# Collects what MetaWorld needs on a GPU machine without a network: about 50 MB of wheels and 0.3 MB of GL loader libraries.
#     examples/metaworld/fetch_packages.sh outputs/packages 3.12
set -euo pipefail

FOLDER="${1:?name the folder to fill}"
PYTHON_VERSION="${2:-3.12}"
WHEELS=(
    mujoco==3.3.0 metaworld==3.1.1 gymnasium==1.4.0 pyopengl glfw farama-notifications cloudpickle imageio packaging
    absl-py etils sentencepiece tokenizers websockets msgpack
)
TARGET_ARGS=(--only-binary=:all: --python-version "$PYTHON_VERSION" --implementation cp --abi "cp${PYTHON_VERSION/./}" --abi abi3 --abi none)
for platform in manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 any; do
    TARGET_ARGS+=(--platform "$platform")
done

mkdir -p "$FOLDER/gl"
# One by one: their declared dependencies (numpy, scipy, typing-extensions) are on the machine already.
for wheel in "${WHEELS[@]}"; do
    python3 -m pip download -q --no-deps "${TARGET_ARGS[@]}" -d "$FOLDER" "$wheel"
done

# The loader only; the driver's own EGL library comes with the GPU machine.
SCRATCH="$(mktemp -d)"
trap 'rm -rf "$SCRATCH"' EXIT
(cd "$SCRATCH" && apt-get download libegl1 libglvnd0 libopengl0 libgl1 libglx0 && for deb in *.deb; do dpkg-deb -x "$deb" unpacked; done)
cp -L "$SCRATCH"/unpacked/usr/lib/x86_64-linux-gnu/lib{EGL,GLdispatch,OpenGL,GL,GLX}.so.? "$FOLDER/gl/"
du -sh "$FOLDER"
