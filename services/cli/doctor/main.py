"""`paceline doctor`: what `paceline up` would refuse on this machine, and what will be slow and why."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.cli.arguments import Parser, console, plain
from services.cli.doctor import checkpoint, gpu, host, ports
from services.cli.doctor.check import Check, CheckStatus
from services.cli.up.plan import worker_flags
from services.cli.up.settings import UpSettings
from services.cli.waiting import waiting
from services.runtime.memory import claims as memory_claims
from services.runtime.processes import core_quota, default_threads, usable_cores
from services.runtime.settings import load_settings, settings_parser

PROG = "paceline doctor"
COLOURS = {CheckStatus.OK: "green", CheckStatus.NOTE: "cyan", CheckStatus.SLOW: "yellow", CheckStatus.FAILS: "bold red"}


class DoctorSettings(UpSettings, section="up"):
    """Say what `paceline up` with the same flags would refuse on this machine, and what will be slow."""


def parser() -> argparse.ArgumentParser:
    parser = settings_parser(DoctorSettings, prog=PROG)
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    return parser


def main(argv: list[str]) -> int:
    """Returns the exit status: 1 if something fails."""
    own = Parser(prog=PROG, add_help=False, allow_abbrev=False)
    own.add_argument("--json", action="store_true")
    arguments, rest = own.parse_known_args(argv)
    note = "--json: one JSON object instead of a table."
    settings = load_settings(DoctorSettings, rest, prog=PROG, note=note)
    checks = list(run_checks(settings, Console(stderr=True)))
    if arguments.json:
        rows = [{"name": c.name, "status": c.status, "found": c.found, "advice": c.advice} for c in checks]
        print(json.dumps({"status": worst(checks), "checks": rows}))
    else:
        show(checks, console())
    return 1 if worst(checks) is CheckStatus.FAILS else 0


def run_checks(settings: UpSettings, progress: Console) -> Iterator[Check]:
    """All checks. Waits are shown on `progress`."""
    yield host.check_python()
    with waiting(progress, "looking for an NVIDIA GPU"):
        driver = gpu.read_driver()
    torch, why = None, ""
    with waiting(progress, "importing torch"):
        try:
            # Here, because the import takes seconds, and torch may be missing.
            from gpu_worker import inspection

            torch = inspection.read_torch()
        except (ImportError, OSError) as error:  # OSError: a library of torch that cannot be loaded
            why = " ".join(str(error).split())
    on_gpu = torch is not None and torch.sees_gpu
    threads = settings.threads or default_threads(local_workers=settings.workers)
    yield host.check_cores(usable_cores(), core_quota(), settings.workers, threads, on_gpu)
    with memory_claims.lock() as claims:
        yield host.check_memory(claims.available())
    dtype = "float32" if settings.dtype == "auto" else settings.dtype
    yield host.check_instructions(platform.machine(), host.cpu_flags(), dtype, on_gpu)
    yield gpu.check_torch(torch, why, driver)
    yield gpu.check_gpu(torch, driver)
    model_checks, no_flashinfer = _check_model(settings, progress) if torch is not None else ([], "")
    if on_gpu and not no_flashinfer:
        with waiting(progress, "importing FlashInfer"):
            no_flashinfer = inspection.import_flashinfer()
    yield gpu.check_flashinfer(gpu.flashinfer_versions(), gpu.needed_flashinfer(), on_gpu, no_flashinfer)
    yield from model_checks
    yield from ports.check_ports(settings)
    yield ports.check_access(settings)
    yield host.check_open_files(host.hard_file_limit())
    with waiting(progress, "asking Docker"):
        docker = host.docker_version()
    yield host.check_docker(*docker)


def _check_model(settings: UpSettings, progress: Console) -> tuple[list[Check], str]:
    """The checks of the model, and why FlashInfer cannot serve it."""
    from gpu_worker import inspection
    from gpu_worker.errors import ModelError, ModelTooLarge
    from gpu_worker.settings import WorkerSettings

    worker = load_settings(WorkerSettings, worker_flags(settings), prog=PROG)
    try:
        with waiting(progress, f"reading {worker.model}"):
            inspected = inspection.inspect_model(worker)
            tokenizer = checkpoint.check_tokenizer(inspected.folder, inspected.makes_embeddings)
    except ModelTooLarge as error:
        return [Check("memory for the model", CheckStatus.FAILS, "too little", str(error))], ""
    except ModelError as error:
        return [Check("checkpoint", CheckStatus.FAILS, worker.model, str(error))], ""
    return [
        checkpoint.check_checkpoint(worker.model, inspected),
        tokenizer,
        checkpoint.check_fit(inspected, settings.workers),
        checkpoint.check_disk(inspected.folder, inspected, checkpoint.free_bytes(inspected.folder)),
    ], inspected.no_flashinfer


def worst(checks: list[Check]) -> CheckStatus:
    order = list(CheckStatus)
    return max((check.status for check in checks), key=order.index)


def show(checks: list[Check], out: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("check", "", "found", "what to do"):
        table.add_column(title, overflow="fold")
    for check in checks:
        status = Text(check.status, style=COLOURS[check.status])
        table.add_row(check.name, status, plain(check.found), plain(check.advice))
    out.print(table)
    summary = {
        CheckStatus.OK: "`paceline up` can serve.",
        CheckStatus.NOTE: "`paceline up` can serve.",
        CheckStatus.SLOW: "`paceline up` can serve; the lines marked slow say what limits its speed.",
        CheckStatus.FAILS: "`paceline up` cannot serve like this; the lines marked fails say why.",
    }
    out.print(f"\n{summary[worst(checks)]}")
