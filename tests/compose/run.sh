#!/usr/bin/env bash
# The compose file on a real engine: build, serve, scale to two workers, lose each service once, come down clean.
# `make compose-test` runs it. Needs Docker with Compose, and Python 3.11. If no engine runs, ../shared may start one.
#
#   COMPOSE='docker compose' tests/compose/run.sh     with the plugin (the default is whichever is installed)
#   tests/compose/run.sh --skip-build                 with the images of the last run
set -euo pipefail
cd "$(dirname "$0")/../.."
makers=../shared/docker

fail() { echo "compose-test: $*" >&2; exit 1; }

if ! docker info >/dev/null 2>&1; then
  [ -x "$makers/engine.sh" ] || fail "no Docker engine answers (docker info fails), and there is no $makers/engine.sh to make one"
  "$makers/engine.sh" || fail "no Docker engine answers, and $makers/engine.sh could not start one"
fi

if [ -z "${COMPOSE:-}" ]; then
  if docker compose version >/dev/null 2>&1; then COMPOSE='docker compose'
  elif docker-compose version >/dev/null 2>&1; then COMPOSE=docker-compose
  else fail "neither 'docker compose' nor 'docker-compose' is installed"
  fi
fi
export COMPOSE

base=python:3.11-slim
if ! docker image inspect "$base" >/dev/null 2>&1 && ! timeout 120 docker pull -q "$base" >/dev/null 2>&1; then
  [ -x "$makers/base-image.sh" ] || fail "the image $base cannot be pulled, and there is no $makers/base-image.sh to make it"
  "$makers/base-image.sh" "$base" || fail "the image $base can neither be pulled nor made"
fi

exec python3 -m tests.compose.check "$@"
