# jaxtd3 with CUDA. NOT BUILT by its authors: no GPU and no container engine was at hand.
#
#   docker build -t jaxtd3 .
#   docker run --gpus all -v "$PWD/runs:/jaxtd3/runs" jaxtd3 --env G1JoystickFlatTerrain
#
# CUDA's libraries come with the wheels of requirements/cuda.lock; the host needs NVIDIA's driver and
# container toolkit alone. EGL draws videos without a display.
FROM python:3.12-slim

RUN apt-get update \
    && apt-get install --yes --no-install-recommends git libegl1 libgl1 \
    && rm -rf /var/lib/apt/lists/*

ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics \
    NVIDIA_VISIBLE_DEVICES=all \
    MUJOCO_GL=egl \
    JAXTD3_LOCK=cuda

WORKDIR /jaxtd3
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY scripts scripts
COPY src src
RUN UV_NO_CACHE=1 scripts/env

ENTRYPOINT ["scripts/train"]
CMD ["--help"]
