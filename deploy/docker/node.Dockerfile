# A peer, an anchor or a relay; not root, and nothing written but its home. Build from the repository's root. With a GPU:
#   docker build -f deploy/docker/node.Dockerfile -t swarmentum-node .
# Without one, torch's wheels for CPUs are 2 GB smaller:
#   docker build -f deploy/docker/node.Dockerfile --build-arg TORCH=https://download.pytorch.org/whl/cpu -t swarmentum-node:cpu .
FROM python:3.11-slim AS build
ARG TORCH=https://pypi.org/simple
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY coordinator coordinator
COPY node node
RUN python -m venv /opt/swarmentum \
    && /opt/swarmentum/bin/pip install --no-cache-dir --index-url "$TORCH" --extra-index-url https://pypi.org/simple 'torch>=2.9' \
    && /opt/swarmentum/bin/pip install --no-cache-dir '.[node]'

FROM python:3.11-slim
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/swarmentum swarmentum
COPY --from=build /opt/swarmentum /opt/swarmentum
ENV PATH=/opt/swarmentum/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    NUMBA_CACHE_DIR=/var/lib/swarmentum/cache HF_HOME=/var/lib/swarmentum/huggingface
USER 10001
WORKDIR /var/lib/swarmentum
VOLUME /var/lib/swarmentum
EXPOSE 4001/tcp 4001/udp
ENTRYPOINT ["swarmentum"]
CMD ["--help"]
