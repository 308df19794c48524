# Prometheus, from Debian's package: for monitoring.yml.
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends prometheus \
 && rm -rf /var/lib/apt/lists/* \
 && install -d -o 10001 -g 10001 /data
USER 10001:10001
VOLUME /data
STOPSIGNAL SIGTERM
ENTRYPOINT ["prometheus"]
CMD ["--config.file=/etc/paceline/prometheus.yml", "--storage.tsdb.path=/data", "--storage.tsdb.retention.time=15d"]
