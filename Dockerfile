# The service on a CPU, or with --build-arg EXTRAS=all,cuda13 on machines with an NVIDIA driver:
#   docker build -t flexq-bench:2.0.0 .
FROM python:3.12-slim-bookworm
ARG EXTRAS=all
# git: commits of projects. A compiler: extensions of projects. Their versions are Debian's newest.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git g++ \
    && rm -rf /var/lib/apt/lists/*
COPY . /opt/flexq-bench
RUN pip install --no-cache-dir "/opt/flexq-bench[$EXTRAS]"
RUN useradd --create-home --uid 1000 bench && mkdir /data && chown bench /data
USER 1000
WORKDIR /data
VOLUME /data
ENV FLEXQ_BENCH_CACHE=/data/cache FLEXQ_BENCH_DB=/data/flexq-bench.sqlite
ENTRYPOINT ["flexq-bench"]
CMD ["--help"]
