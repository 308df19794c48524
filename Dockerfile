# Paceline's two images; docs/docker.md tells how to use them.
#
#   docker build --target control-plane -t paceline/control-plane .         scheduler, cache, gateway: no torch
#   docker build --target worker        -t paceline/worker        .         worker on a CPU
#   docker build --target worker --build-arg DEVICE=cuda -t paceline/worker-gpu .   worker on an NVIDIA GPU
#
# Dependencies and code are installed by different stages and copied as different layers: a change of code rebuilds and
# ships a layer of a few MB. Builds with BuildKit and with the classic builder, which runs every stage that stands
# before the target: hence the order, small image first.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
# The environment has no pip of its own: the base's pip fills it from outside.
RUN python -m venv --without-pip /opt/venv \
 && /opt/venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" >site-packages \
 && echo /opt/app >"$(cat site-packages)/paceline.pth"

# Lists that change only when a dependency changes; pyproject.toml and the code change more often.
FROM build AS lists
COPY pyproject.toml constraints.txt deploy/docker/requirements.py ./
# torch==2.13.0+cpu exists on the CPU index only; torch==2.13.0 is met by the builds for CPU and for CUDA.
RUN mkdir lists \
 && sed 's/^\(torch==[^+]*\)+.*/\1/' constraints.txt >lists/constraints.txt \
 && for extra in gateway otel worker gpu; do python requirements.py "$extra" <pyproject.toml >"lists/$extra.txt" || exit 1; done

FROM build AS control-plane-deps
COPY --from=lists /build/lists/constraints.txt /build/lists/gateway.txt /build/lists/otel.txt ./
RUN pip --python /opt/venv/bin/python install -c constraints.txt -r gateway.txt -r otel.txt

FROM build AS app
COPY . .
RUN pip --python /opt/venv/bin/python install --no-deps --target /opt/app .

FROM ${BASE_IMAGE} AS runtime
RUN groupadd --gid 10001 paceline \
 && useradd --uid 10001 --gid paceline --no-create-home --home-dir /cache --shell /usr/sbin/nologin paceline \
 && install -d -o paceline -g paceline /cache /state /certs /ca /kernels
# Besides /tmp, processes write only to /cache (files from a model hub), /state (the scheduler's cache secret, stored
# responses) and /kernels (a worker's compiled kernels). `paceline certs` (deploy/docker/public.yml) fills /certs, /ca.
ENV PATH=/opt/app/bin:/opt/venv/bin:$PATH HOME=/cache HF_HOME=/cache/huggingface XDG_STATE_HOME=/state \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /cache
STOPSIGNAL SIGTERM
ENTRYPOINT ["paceline"]
CMD ["--help"]

FROM runtime AS control-plane
COPY --from=control-plane-deps /opt/venv /opt/venv
COPY --from=app /opt/app /opt/app
USER 10001:10001

FROM build AS worker-deps
# cpu or cuda.
ARG DEVICE=cpu
# Both are optional: a package index with CPU builds of torch, and FlashInfer's index of compiled kernels. Without the
# latter the base image needs nvcc and a C++ compiler, which compile the kernels at the first start.
ARG TORCH_CPU_INDEX=
ARG FLASHINFER_INDEX=
COPY --from=lists /build/lists/ ./
# The CPU build of torch comes from a wheel in the base image (pip.conf's find-links; for a site without internet), else
# from TORCH_CPU_INDEX if that is set, else from the index that uv knows, as in scripts/install.py. If uv fails, torch
# comes from the default index, and its Linux build includes CUDA. Only compilers need torch's headers.
RUN set -e; install="pip --python /opt/venv/bin/python install -c constraints.txt"; \
    case "$DEVICE" in \
    cpu) \
      $install --no-deps --no-index torch 2>/dev/null \
        || { [ -n "$TORCH_CPU_INDEX" ] && $install --no-deps --index-url "$TORCH_CPU_INDEX" torch; } \
        || { [ -z "$TORCH_CPU_INDEX" ] && pip install --target /tmp/uv uv==0.13.9 && /tmp/uv/bin/uv pip install \
               --python /opt/venv/bin/python --torch-backend cpu --no-deps -c constraints.txt torch; } \
        || [ -z "$TORCH_CPU_INDEX" ]; \
      $install -r worker.txt; \
      rm -rf "$(cat site-packages)/torch/include";; \
    cuda) \
      $install -r gpu.txt; \
      /opt/venv/bin/python -c "import torch; assert torch.version.cuda, torch.__version__"; \
      version=$(/opt/venv/bin/python -c "from importlib.metadata import version; print(version('flashinfer-python'))"); \
      if [ -n "$FLASHINFER_INDEX" ]; then \
        $install --no-deps --index-url "$FLASHINFER_INDEX" "flashinfer-jit-cache==$version"; \
      elif ! command -v nvcc || ! command -v c++; then \
        echo "DEVICE=cuda needs FLASHINFER_INDEX (FlashInfer's index of compiled kernels), or a BASE_IMAGE with nvcc and c++" >&2; \
        exit 1; \
      fi;; \
    *) echo "DEVICE is cpu or cuda, not '$DEVICE'" >&2; exit 1;; \
    esac

FROM runtime AS worker
ARG DEVICE=cpu
# Triton compiles a launcher for its kernels.
RUN if [ "$DEVICE" = cuda ] && ! command -v gcc; then \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
# Machine code that workers load: no other service may write it.
ENV NUMBA_CACHE_DIR=/kernels TRITON_CACHE_DIR=/kernels/triton
COPY --from=worker-deps /opt/venv /opt/venv
COPY --from=app /opt/app /opt/app
USER 10001:10001
