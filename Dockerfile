# Image for GPU training. Build: docker build -t megatron-vla .    Add --build-arg WITH_FLASH_ATTN=1 (or the other two) for more.
# The optional parts compile for many minutes and are used only by flags that ask for them.
FROM nvidia/cuda:13.0.0-cudnn-devel-ubuntu24.04

ARG TORCH=torch==2.13.0
ARG WITH_TRANSFORMER_ENGINE=0
ARG WITH_FLASH_ATTN=0
ARG WITH_APEX=0
# Hopper; other GPUs: "80;90a;100a".
ARG CUDA_ARCH_LIST=90a

ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH MUJOCO_GL=egl
# ffmpeg: shared libraries for torchcodec. libegl1: rendering of the simulators.
RUN apt-get update && apt-get install -y --no-install-recommends \
        python3 python3-dev python3-venv git make ffmpeg libegl1 libgl1 \
    && rm -rf /var/lib/apt/lists/* && python3 -m venv /opt/venv
RUN pip install setuptools wheel packaging ninja && pip install "$TORCH"

WORKDIR /workspace/megatron-vla
COPY . .
RUN pip install --no-build-isolation --editable '.[data,eval,log,dev]'

RUN if [ "$WITH_TRANSFORMER_ENGINE" = 1 ]; then pip install --no-build-isolation 'transformer-engine[core_cu13,pytorch]'; fi
RUN if [ "$WITH_FLASH_ATTN" = 1 ]; then MAX_JOBS=8 pip install --no-build-isolation flash-attn; fi
# NVIDIA's apex is installed from its source repository; the package of that name on PyPI is something else.
RUN if [ "$WITH_APEX" = 1 ]; then \
        git clone --depth 1 https://github.com/NVIDIA/apex /opt/apex && \
        pip install --no-build-isolation --config-settings "--build-option=--cpp_ext" \
            --config-settings "--build-option=--cuda_ext" /opt/apex; fi

CMD ["python", "pretrain_vla.py", "--help"]
