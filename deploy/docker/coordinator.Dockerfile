# A coordinator: no torch, not root, and nothing written but its home. Build from the repository's root:
#   docker build -f deploy/docker/coordinator.Dockerfile -t swarmentum-coordinator .
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY coordinator coordinator
COPY node node
# Nothing installs into the image later, and pip and setuptools are 24 MB of it.
RUN python -m venv /opt/swarmentum && /opt/swarmentum/bin/pip install --no-cache-dir '.[postgres]' \
    && /opt/swarmentum/bin/pip uninstall --yes pip setuptools

FROM python:3.11-slim
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/swarmentum swarmentum
COPY --from=build /opt/swarmentum /opt/swarmentum
ENV PATH=/opt/swarmentum/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    SWARMENTUM_COORDINATOR_HOME=/var/lib/swarmentum/coordinator
USER 10001
WORKDIR /var/lib/swarmentum
VOLUME /var/lib/swarmentum
EXPOSE 7700 9100
HEALTHCHECK --interval=30s --timeout=10s --start-period=20s CMD ["swarmentum-coordinator", "health", "--live"]
ENTRYPOINT ["swarmentum-coordinator"]
CMD ["serve", "--json", "--metrics-listen", "0.0.0.0:9100", "--web-listen", "none"]
