"""`paceline`: the only command. It imports each service only when needed.

Other slow imports wait, too: main() handles Ctrl-C, so it must start as early as possible.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial

from services.runtime.exit_status import CONFIGURATION_ERROR

# The exit status after Ctrl-C.
INTERRUPTED = 130
PIPE_CLOSED = 141

# name: (module with the settings class, class, module with `serve`)
SERVICES = {
    "cache": ("cache_svc.settings", "CacheSettings", "cache_svc.server"),
    "scheduler": ("scheduler_svc.settings", "SchedulerSettings", "scheduler_svc.server"),
    "worker": ("gpu_worker.settings", "WorkerSettings", "gpu_worker.server"),
    "gateway": ("services.gateway.settings", "GatewaySettings", "services.gateway.server"),
}

# name: the module with `main`, and with `parser` for shell completion
MODULES = {
    "up": "services.cli.up.main",
    "chat": "services.cli.chat.main",
    "doctor": "services.cli.doctor.main",
    "policy": "services.cli.policy",
    "cache": "services.cli.cache",
    "explain": "services.cli.explain",
    "keys": "services.cli.keys",
    "scenario": "services.cli.scenario",
    "certs": "services.cli.certs.main",
    "bench": "services.cli.bench.main",
    "top": "services.cli.top.main",
    "trace": "services.cli.trace.main",
    "completion": "services.cli.completion.main",
}

USAGE = """\
usage: paceline COMMAND [flags]

  up                 start all services on this machine and serve a model
  chat [QUESTION]    talk to a running server
  top                what a running server does now: queue, workers, latencies, tenants, steps
  trace FILE         record what all services do for some seconds, for Perfetto or chrome://tracing
  doctor             what `up` would refuse on this machine, and what will be slow
  worker             start one more worker for a running server
  serve SERVICE      start one service: cache, scheduler, worker or gateway
  policy             show or change the scheduling policies of a running scheduler
  cache              what the cache of a running server holds; pin prefixes, reset it, watch its events
  explain ID         why a request waited
  keys               make an API key; check a key file
  scenario FILE      what every step of a small workload decides, under any preset
  certs DIR          make certificates for development: a CA, and one for each service
  bench              put load on an OpenAI-compatible server and measure it; compare two runs
  completion SHELL   print the completion script for bash, zsh or fish
  version            print the version

`paceline COMMAND --help` shows the flags. Every flag of up, worker and serve is also an environment variable
(PACELINE_UP_PORT, PACELINE_WORKER_MODEL, ...) and a key of the YAML file that --config or PACELINE_CONFIG names.

chat, top, trace, worker, policy, cache, explain and bench find the `paceline up` of this machine. If several run,
--server PORT or PACELINE_SERVER chooses one; --scheduler or --cache HOST:PORT (or PACELINE_SCHEDULER, PACELINE_CACHE)
names a service. chat, top, trace and bench take --url for a server of any machine. If the server has API keys, chat and
bench need one; top, trace, policy, cache and explain need an admin key: PACELINE_API_KEY, or --api-key.
"""


def serve(service: str, argv: list[str], prog: str) -> int:
    """Run one service until a signal stops it."""
    from services.cli.parent import end_with_parent
    from services.runtime.logs import configure_logging
    from services.runtime.metrics import publish_build_info
    from services.runtime.service import CannotStart, run_service
    from services.runtime.settings import load_settings

    end_with_parent()
    settings_module, settings_class, server_module = SERVICES[service]
    settings = load_settings(getattr(importlib.import_module(settings_module), settings_class), argv, prog=prog)
    configure_logging(service, settings.log_level, settings.log_format)
    publish_build_info(service)
    module = importlib.import_module(server_module)
    try:
        return run_service(lambda stop: module.serve(settings, stop))
    except CannotStart as error:
        return fail(f"{prog}: {error}", CONFIGURATION_ERROR)
    except OSError as error:
        return fail(f"{prog}: {error}")
    except RuntimeError as error:  # grpc's error for a port that is in use
        if "bind" not in str(error).lower():
            raise
        return fail(f"{prog}: cannot listen: {error}")


def fail(message: str, code: int = 1) -> int:
    print(message, file=sys.stderr)
    return code


def worker(argv: list[str]) -> int:
    """Start one more worker. Default: for the scheduler of the running `paceline up`."""
    from gpu_worker.settings import WorkerSettings
    from services.cli.servers import SERVER_ENV, NoAddress, take_server_flag, target_of
    from services.runtime.settings import load_settings

    prog = "paceline worker"
    note = f"--server NAME (or {SERVER_ENV}): the HTTP port or model of a `paceline up` of this machine to work for."
    arguments, rest = take_server_flag(prog, argv)
    settings = load_settings(WorkerSettings, [word for word in rest if word != "--print-config"], prog=prog, note=note)
    if arguments.server is not None or "scheduler" not in settings.model_fields_set:
        try:
            target = target_of(arguments, "scheduler")
        except NoAddress as error:
            return fail(f"{prog}: {error}", 2)
        rest += ["--scheduler", target.address]
        if target.tls_dir and settings.tls_dir is None:
            rest += ["--tls-dir", target.tls_dir]
    return serve("worker", rest, prog)


def lazily(module: str, argv: list[str]) -> int:
    result: int = importlib.import_module(module).main(argv)
    return result


def serve_command(argv: list[str]) -> int:
    if argv and argv[0] in SERVICES:
        return serve(argv[0], argv[1:], f"paceline serve {argv[0]}")
    wanted = f"there is no service {argv[0]!r}" if argv and not argv[0].startswith("-") else "name a service"
    return fail(f"paceline serve: {wanted}: {', '.join(SERVICES)}", 2)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    commands: dict[str, Callable[[list[str]], int]] = {
        **{name: partial(lazily, module) for name, module in MODULES.items()},
        "serve": serve_command,
        "worker": worker,
    }
    command, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if command in ("version", "--version"):
        from importlib.metadata import version

        print(f"paceline {version('paceline')}")
        return 0
    if command not in commands:
        return fail(f"paceline: there is no command {command!r} (see paceline --help)", 2)
    try:
        code = commands[command](rest)
        sys.stdout.flush()  # a closed pipe raises here
        return code
    except BrokenPipeError:  # as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:  # before the command handles Ctrl-C itself
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
