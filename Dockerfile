# Two images: `server`, the default target, which is `kvcm serve`, `kvcm gateway` and `kvcm-subscriber`, and `engine`, the
# demo's (torch for CPUs). One image for all three commands: what the latter two need beside the server is 18 MB.
#   docker build --build-arg KVCM_VERSION=0.2.0 --tag kvcm .
# To pin the base by digest: --build-arg PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:…
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /build
RUN python3 -m venv --without-pip /opt/kvcm
# Packages before the code: what changes rarely is built rarely.
COPY pyproject.toml .ci/constraints.txt deploy/images/requirements.py ./
RUN python3 requirements.py server tracing gateway subscriber > server.txt \
  && pip --python /opt/kvcm/bin/python install --no-cache-dir --constraint constraints.txt --requirement server.txt
COPY . .
ARG KVCM_VERSION=0.2.0.dev0
# The constraints also hold for what builds the package, in an environment of its own.
RUN SETUPTOOLS_SCM_PRETEND_VERSION_FOR_KVCM=${KVCM_VERSION} PIP_CONSTRAINT=/build/constraints.txt \
  pip --python /opt/kvcm/bin/python install --no-cache-dir --no-deps .

# torch comes from its own index, where it is built for CPUs; PyPI has the build for GPUs, of several gigabytes.
FROM build AS engine-build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python3 requirements.py engine > engine.txt \
  && pip --python /opt/kvcm/bin/python install --no-cache-dir --constraint constraints.txt \
    --extra-index-url ${TORCH_INDEX} --requirement engine.txt

# What both images have in common: the user, and the directories that volumes take their owner from.
FROM ${PYTHON_IMAGE} AS runtime
RUN groupadd --gid 10001 kvcm \
  && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /data --shell /usr/sbin/nologin kvcm \
  && install --directory --owner=10001 --group=10001 --mode=0700 /data /keys /kv \
  && install --directory --owner=10001 --group=10001 --mode=0711 /secrets
ENV PATH=/opt/kvcm/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ARG KVCM_VERSION=0.2.0.dev0
ARG KVCM_REVISION=unknown
LABEL org.opencontainers.image.title="kvcm" \
  org.opencontainers.image.description="KV-cache manager for LLM inference" \
  org.opencontainers.image.licenses="Apache-2.0" \
  org.opencontainers.image.version="${KVCM_VERSION}" \
  org.opencontainers.image.revision="${KVCM_REVISION}"
USER 10001:10001
WORKDIR /data

FROM runtime AS engine
COPY --from=engine-build /opt/kvcm /opt/kvcm
COPY docs/examples /opt/examples
ENV HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE
ENTRYPOINT ["python"]
CMD ["/opt/examples/demo/talker.py", "--help"]

FROM runtime AS server
COPY --from=build /opt/kvcm /opt/kvcm
VOLUME ["/data"]
# gRPC and HTTP for engines, gRPC and HTTP for administrators, probes and metrics
EXPOSE 6381 6382 6491 6492
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 CMD ["python", "-m", "kvcm.probe"]
# `docker run … gateway` is the gateway; of the subscriber, `--entrypoint kvcm-subscriber`.
ENTRYPOINT ["kvcm"]
# Clients of a container's ports are on another host: keys are required. The first one is in /data/admin.key.
CMD ["serve", "--data-dir", "/data", "-e", "kvcm.auth.mode=required"]
