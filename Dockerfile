# offload-proxy: no root, and nothing is written but below /tmp and in the store.
#
#   docker build -t offload-proxy . && docker run --rm -p 8787:8787 --read-only --tmpfs /tmp offload-proxy
#
# A tag can be given to another image at any time, a digest cannot. To build on images that you have looked at, name them:
#
#   digest() { docker buildx imagetools inspect --format "$1@{{.Manifest.Digest}}" "$1"; }
#   docker build -t offload-proxy --build-arg BUILD_IMAGE="$(digest python:3.12)" \
#     --build-arg RUN_IMAGE="$(digest python:3.12-slim)" .
#
# Size on paper: python:3.12-slim takes about 125 MB, site-packages 40 MB (`du -sm` after the very commands below, in a
# venv on x86-64), so about 165 MB.

ARG BUILD_IMAGE=python:3.12
ARG RUN_IMAGE=python:3.12-slim

FROM ${BUILD_IMAGE} AS build
WORKDIR /src
COPY docs/deploy/requirements.txt .
RUN python -m venv --without-pip /opt/proxy && \
    pip --python /opt/proxy/bin/python install --no-cache-dir --no-compile --require-hashes --no-deps -r requirements.txt
COPY docs/deploy/build.txt .
RUN pip install --no-cache-dir --require-hashes --no-deps -r build.txt
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY proxy proxy
# `--build-arg COMMIT="$(git rev-parse HEAD)"`: what `offload-proxy --version` shows.
ARG COMMIT=""
RUN printf %s "$COMMIT" >proxy/commit && python -m hatchling build -t wheel && \
    pip --python /opt/proxy/bin/python install --no-cache-dir --no-compile --no-deps dist/*.whl && \
    find /opt/proxy -name '*.so*' -exec strip --strip-unneeded {} +

FROM ${RUN_IMAGE}
COPY --from=build /opt/proxy /opt/proxy
ENV PATH=/opt/proxy/bin:$PATH PYTHONDONTWRITEBYTECODE=1 OFFLOAD_HOST=0.0.0.0 OFFLOAD_STORE=/tmp/store
USER 65534:65534
EXPOSE 8787
# Of this process alone: what it depends on may be down, and it serves all the same.
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s CMD ["python", "-c", \
    "import os; from urllib.request import urlopen; \
    urlopen(f'http://127.0.0.1:{os.environ.get(\"OFFLOAD_PORT\", 8787)}/health', timeout=2)"]
# Longer than --drain-timeout is the time to give it: docker stop --time 40.
STOPSIGNAL SIGTERM
ENTRYPOINT ["offload-proxy"]
CMD ["serve"]
