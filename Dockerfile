# docker build -t replica . && docker run --rm replica
#
# With GPUs (CUDA and NCCL to build with, their libraries to run with):
#   docker build -t replica --build-arg GPU=1 \
#     --build-arg BUILD_IMAGE=nvidia/cuda:12.5.1-devel-ubuntu22.04 \
#     --build-arg BASE_IMAGE=nvidia/cuda:12.5.1-runtime-ubuntu22.04 .
#   docker run --rm --gpus all replica
ARG BASE_IMAGE=python:3.11-slim-bookworm
ARG BUILD_IMAGE=${BASE_IMAGE}

FROM ${BUILD_IMAGE} AS build
# CUDA's images bring no Python; the image that runs must have the same one.
# hadolint ignore=DL3008,SC2046
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make \
        $(python3 -m venv --help >/dev/null 2>&1 || echo python3 python3-venv python3-dev) \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY install.sh requirements.txt ./
COPY replica/optimizer.cpp replica/
ARG GPU=0
# Ends the build where Horovod lacks TensorFlow or MPI, or two ranks do not start.
RUN GPU=${GPU} VENV=/opt/venv ./install.sh \
    && /opt/venv/bin/pip uninstall -y cmake \
    && rm -rf /opt/venv/lib/python3*/site-packages/tensorflow/include

FROM ${BASE_IMAGE}
# hadolint ignore=DL3008
RUN python3 -m venv --help >/dev/null 2>&1 \
    || { apt-get update && apt-get install -y --no-install-recommends python3 \
        && rm -rf /var/lib/apt/lists/*; }
RUN useradd --create-home --uid 1000 --non-unique replica
COPY --from=build /opt/venv /opt/venv
# One user's ranks, as many as wanted, on one host without ssh; copies through shared
# memory need no right to trace other processes, which containers do not give.
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp \
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    OMPI_MCA_plm_rsh_agent= TF_CPP_MIN_LOG_LEVEL=2 \
    OMPI_MCA_rmaps_base_oversubscribe=1 \
    OMPI_MCA_btl_vader_single_copy_mechanism=none
WORKDIR /app
COPY --chown=1000 . .
USER 1000
RUN horovodrun -np 2 python train.py --num_gpus 0 --train_steps 20 \
    && mpirun -np 2 python ps_mode.py --train_steps 20
ENTRYPOINT ["deploy/entrypoint.sh"]
