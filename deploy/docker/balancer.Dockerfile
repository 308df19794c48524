# nginx from Debian's package, in front of the gateways: for balancer.yml.
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends nginx-light \
 && rm -rf /var/lib/apt/lists/*
COPY deploy/docker/nginx.conf /etc/nginx/nginx.conf
USER 10001:10001
# Open streams go on until they end.
STOPSIGNAL SIGQUIT
ENTRYPOINT ["nginx", "-g", "daemon off;"]
