# etcd of one member, from Debian's package: for two-schedulers.yml.
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends etcd-server \
 && rm -rf /var/lib/apt/lists/* \
 && install -d -o 10001 -g 10001 /data
USER 10001:10001
VOLUME /data
STOPSIGNAL SIGTERM
ENTRYPOINT ["etcd"]
CMD ["--data-dir=/data", "--listen-client-urls=http://0.0.0.0:2379", "--advertise-client-urls=http://etcd:2379"]
