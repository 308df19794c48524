"""An election at an etcd that serves HTTPS and demands a client certificate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler_svc.etcd import Etcd, EtcdError
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.standby import open_election
from services.runtime.service import CannotStart
from services.runtime.tls.files import TlsFiles, TlsPaths
from tests.support.certificates import authority_of, issue, make_certificates, stranger
from tests.support.etcd import EtcdProcess, needs_etcd

pytestmark = needs_etcd


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[EtcdProcess]:
    process = EtcdProcess(tmp_path_factory.mktemp("etcd"), tls_dir=certificates).start()
    yield process
    process.stop()


def etcd(process: EtcdProcess, folder: Path | None) -> Etcd:
    tls = TlsFiles(TlsPaths.of(folder, "scheduler")) if folder is not None else None
    return Etcd([process.url], "tls", timeout_s=10.0, tls=tls)


async def test_a_scheduler_with_a_certificate_is_elected(process: EtcdProcess, certificates: Path) -> None:
    client = etcd(process, certificates)
    lease, _ = await client.grant(60)
    assert await client.claim(await client.read_leader(), lease, "a:1", 17)
    assert (await client.read_leader()).address == "a:1"
    await client.close()


async def test_clients_without_a_certificate_of_the_ca_get_no_answer(
    process: EtcdProcess, certificates: Path, tmp_path: Path
) -> None:
    for folder in (None, stranger(tmp_path / "stranger", certificates)):
        client = etcd(process, folder)
        with pytest.raises(EtcdError):
            await client.read_leader()
        await client.close()


async def test_a_renewal_is_used_from_the_next_request_on(
    process: EtcdProcess, certificates: Path, tmp_path: Path
) -> None:
    own = issue(authority_of(certificates), tmp_path / "own")
    client = etcd(process, own)
    await client.read_leader()
    stranger(own, certificates)  # of another CA: if etcd refuses it, the client has used it
    with pytest.raises(EtcdError):
        await client.read_leader()
    issue(authority_of(certificates), own)
    await client.read_leader()
    await client.close()


async def test_the_settings_name_the_certificates(process: EtcdProcess, certificates: Path, tmp_path: Path) -> None:
    for settings in (
        SchedulerSettings(etcd=process.url, etcd_key="one", tls_dir=certificates),
        SchedulerSettings(etcd=process.url, etcd_key="other", tls_dir=tmp_path, etcd_tls_dir=certificates),
    ):
        election = open_election(settings)
        assert await election.campaign() > 0
        await election.close()
    with pytest.raises(CannotStart, match=r"TLS: .*cert\.pem: No such file"):
        open_election(SchedulerSettings(etcd=process.url, etcd_tls_dir=tmp_path))
