"""TLS to a real etcd with a CA of its own and client certificates: what works, what is said where it does not."""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from election.store import ErrorClass, StoreError
from election.stores.etcd_access import Access, AccessError, Certificates, private, shown_by
from supervisor.demo.etcd_cluster import ClientTls, EtcdCluster
from tests.bed.certificates import Authority, member_arguments
from tests.bed.etcd import etcd_cluster
from tests.bed.etcd_stores import put, raw_server, soon, store_on
from tests.bed.etcd_users import password_file, with_users
from tests.bed.nodes import LONG_TTL, Make

WEEK = 7 * 24 * 3600
ROOT = "/gpuward/test/"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def ours(authority: Authority) -> ClientTls:
    return authority.issue("client")


@pytest.fixture(scope="module")
def tls_etcd(authority: Authority, ours: ClientTls) -> Iterator[EtcdCluster]:
    """One member; each client must show a certificate."""
    with etcd_cluster(1, member_arguments(authority.issue("member")), tls=ours) as cluster:
        yield cluster


def access(files: ClientTls) -> Access:
    return Access(files.ca, files.cert, files.key)


async def refusal(access: Access, *endpoints: str) -> StoreError:
    """What etcd says of our certificate comes after the handshake (TLS 1.3), and is lost where the connection is reset
    before it is read: then another try tells."""
    async with store_on(*endpoints, access=access) as store:
        for _ in range(20):
            with pytest.raises(StoreError) as caught:
                await store.read([ROOT], deadline=soon())
            if "reset" not in str(caught.value) and "closing" not in str(caught.value):
                break
    return caught.value


async def test_reads_writes_watches_and_status_go_over_tls(tls_etcd: EtcdCluster, ours: ClientTls) -> None:
    async with store_on(*tls_etcd.endpoints, access=access(ours)) as store:
        watch = store.watch(ROOT)
        assert await anext(watch) is None
        revision = await put(store, ROOT + "a")
        change = await anext(watch)
        assert change is not None
        assert change.mod_revision == revision
        await watch.aclose()
        assert (await store.status(deadline=soon()))[0].error is None


async def test_a_member_of_another_authority_is_refused_before_anything_is_sent(
    tls_etcd: EtcdCluster, ours: ClientTls, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path / "stranger")
    error = await refusal(Access(stranger.ca, ours.cert, ours.key), *tls_etcd.endpoints)
    assert (error.kind, error.sent) == (ErrorClass.AUTH, False)
    assert tls_etcd.endpoints[0] in str(error)
    assert "`election.etcd.ca_file` must hold the CA" in str(error)


async def test_what_etcd_says_of_our_certificate_is_told_with_what_to_do(
    tls_etcd: EtcdCluster, authority: Authority, ours: ClientTls, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path / "stranger").issue("stranger")
    for shown, part in (
        (Access(ours.ca), "this etcd wants a client certificate"),
        (Access(ours.ca, stranger.cert, stranger.key), "etcd does not take our certificate"),
        (access(authority.issue("old", days=-1)), "renew the certificate in `election.etcd.cert_file`"),
    ):
        error = await refusal(shown, *tls_etcd.endpoints)
        assert error.kind is ErrorClass.AUTH
        assert part in str(error)


async def test_a_member_whose_certificate_is_old_or_of_another_host_is_left_for_the_next_one(
    authority: Authority, ours: ClientTls, tls_etcd: EtcdCluster
) -> None:
    for files, part in (
        (authority.issue("old-member", days=-1), "renew the certificate of this member"),
        (authority.issue("elsewhere", host="192.0.2.1"), "must have the endpoint's host as subjectAltName"),
    ):
        async with tls_server(files) as endpoint:
            assert part in str(await refusal(access(ours), endpoint))
            async with store_on(endpoint, *tls_etcd.endpoints, access=access(ours)) as store:
                await put(store, ROOT + "a")


@asynccontextmanager
async def tls_server(files: ClientTls) -> AsyncIterator[str]:
    """Shakes hands, and says no more."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key)

    async def hang_up(_: asyncio.StreamWriter) -> None:
        pass

    async with raw_server(hang_up, context) as at:
        yield f"https://{at}"


async def test_the_wrong_scheme_is_told_as_such(tls_etcd: EtcdCluster, ours: ClientTls, etcd: EtcdCluster) -> None:
    plain = tls_etcd.endpoints[0].replace("https:", "http:")
    assert "write https:// in `election.etcd.endpoints`" in str(await refusal(Access(), plain))
    secure = etcd.endpoints[0].replace("http:", "https:")
    assert "write http:// in `election.etcd.endpoints`" in str(await refusal(access(ours), secure))


async def test_renewed_certificates_are_used_without_a_restart_and_broken_ones_told_once(
    tls_etcd: EtcdCluster, authority: Authority
) -> None:
    files = authority.issue("renewed", days=-1)
    certificates = Certificates(access(files))
    async with store_on(*tls_etcd.endpoints, access=access(files)) as store:
        with pytest.raises(StoreError, match="renew the certificate"):
            await store.read([ROOT], deadline=soon())
        authority.issue("renewed")
        await store.read([ROOT], deadline=soon())
        first = certificates.context()
        assert certificates.context() is first
        authority.issue("renewed")
        second = certificates.context()
        assert second is not first
        files.cert.write_text("no certificate")
        with capture_logs() as logs:
            assert certificates.context() is second
            assert certificates.context() is second
            for _ in range(3):
                await store.read([ROOT], deadline=soon())
    assert [line["event"] for line in logs] == 2 * [
        "changed certificates for etcd cannot be used, the earlier ones are kept"
    ]  # by this test's own, and by the store's
    assert str(files.cert) in logs[0]["cause"]


def test_files_that_cannot_work_are_told_by_name_and_nothing_of_them_is_shown(
    authority: Authority, ours: ClientTls, tmp_path: Path
) -> None:
    other = authority.issue("other")
    open_key = tmp_path / "open.key"
    shutil.copy(ours.key, open_key)
    open_key.chmod(0o644)
    locked = authority.with_passphrase("client")
    for given, part in (
        (Access(tmp_path / "none"), f"{tmp_path}/none: as CA it cannot be read: No such file or directory"),
        (Access(ours.key), f"{ours.key}: as CA it cannot be used"),
        (Access(ours.ca, ours.cert, other.key), "KEY_VALUES_MISMATCH"),
        (Access(ours.ca, ours.cert, open_key), f"{open_key}: found mode 0644, expected 0600 or 0640"),
        (Access(ours.ca, ours.cert, locked), "the key has a passphrase, and nobody is there to type it"),
        (Access(ours.ca, ours.cert, tmp_path / "none"), f"{tmp_path}/none: No such file or directory"),
    ):
        with pytest.raises(AccessError) as caught:
            given.context()
        assert part in str(caught.value)
        assert given.troubles(0) == [str(caught.value)]


def test_a_certificate_is_told_of_a_week_before_its_end_and_after_it(authority: Authority, ours: ClientTls) -> None:
    end = shown_by(ours.cert.read_text()).until
    assert access(ours).troubles(end - WEEK - 100) == []
    for now, part in ((end - WEEK + 100, "will expire at"), (end + 1, "has expired at")):
        (told,) = (text for text in access(ours).troubles(now) if str(ours.cert) in text)
        assert part in told


async def test_a_certificate_with_a_common_name_is_of_no_use_where_etcd_has_users(
    authority: Authority, tmp_path: Path
) -> None:
    named = authority.issue("named", subject="/CN=gpuward")
    given = replace(access(named), user="gpuward", password_file=password_file(tmp_path))
    assert any("its subject has a CN" in text for text in given.troubles(0))
    assert access(named).troubles(0) == []
    with etcd_cluster(1, member_arguments(named), tls=named) as cluster:
        with_users(cluster, ROOT)
        error = await refusal(given, *cluster.endpoints)
    assert error.kind is ErrorClass.AUTH
    assert "with a subject without CN" in str(error)


def test_a_file_with_a_secret_may_be_read_by_its_group_and_by_nobody_else(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("x")
    for mode, fine in ((0o600, True), (0o640, True), (0o400, True), (0o644, False), (0o660, False), (0o601, False)):
        path.chmod(mode)
        if fine:
            private(path)
        else:
            with pytest.raises(AccessError, match=f"found mode {mode:04o}"):
                private(path)
    with pytest.raises(AccessError, match="expected a file"):
        private(tmp_path)


def test_a_node_leads_over_tls(tls_etcd: EtcdCluster, ours: ClientTls, make_node: Make) -> None:
    files = {"ca_file": str(ours.ca), "cert_file": str(ours.cert), "key_file": str(ours.key)}
    tls_etcd.etcdctl("put", ROOT + "term", ENDED)
    node = make_node(ttl=LONG_TTL, store="etcd", etcd={"endpoints": tls_etcd.endpoints, **files})
    node.start().until_leading()


ENDED = '{"instance":"x","node":"x","ttl_s":90,"began":"then","ended":"then","because":"a test"}'
