"""Users and roles of a real etcd: everything works with the cluster's prefix alone, and an ended token is replaced."""

import asyncio
import uuid
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from election.store import ErrorClass, LeaseIs, Put, StoreError, Txn
from election.stores.etcd_access import Access
from supervisor.demo.etcd_cluster import EtcdCluster
from tests.bed.etcd import etcd_cluster
from tests.bed.etcd_stores import passed_through, put, server, soon, store_on
from tests.bed.etcd_users import AS_ROOT, SECRET, as_user, password_file, with_users
from tests.bed.keeper import PATIENCE
from tests.bed.nodes import LONG_TTL, Make

PREFIX = "/gpuward/test/"
ENDED = '{"instance":"x","node":"x","ttl_s":90,"began":"then","ended":"then","because":"a test"}'


@pytest.fixture(scope="module", params=["3.5", "3.4"])
def users(request: pytest.FixtureRequest) -> Iterator[EtcdCluster]:
    """One member with users, whose tokens end after 2 s without use; of each version."""
    with etcd_cluster(1, ["--auth-token-ttl=2"], older=request.param == "3.4") as cluster:
        with_users(cluster, PREFIX)
        yield cluster


@pytest.fixture
def root() -> str:
    """A prefix that no other test uses."""
    return f"{PREFIX}{uuid.uuid4().hex}/"


async def test_every_call_works_with_the_right_to_the_prefix_alone(
    users: EtcdCluster, root: str, tmp_path: Path
) -> None:
    async with store_on(*users.endpoints, access=as_user(tmp_path)) as store, aclosing(store.watch(root)) as watch:
        assert await anext(watch) is None
        lease = (await store.grant(60, deadline=soon())).lease
        txn = Txn((), (Put(root + "leader", b"x", lease),))
        revision = (await store.commit(txn, deadline=soon())).revision
        guarded = Txn((LeaseIs(root + "leader", lease),), (Put(root + "leader", b"y", lease),))
        assert (await store.commit(guarded, deadline=soon())).succeeded
        assert await store.keepalive(lease, deadline=soon()) == 60
        assert (await store.read([root], prefix=True, deadline=soon())).entries[0].value == b"y"
        await store.revoke(lease, deadline=soon())
        (status,) = await store.status(deadline=soon())
        assert status.error is None
        async with asyncio.timeout(PATIENCE):
            changes = [await anext(watch) for _ in range(3)]
    assert [change and change.mod_revision for change in changes] == [revision, revision + 1, revision + 2]


async def test_a_token_that_has_ended_is_replaced_within_each_call(
    users: EtcdCluster, root: str, tmp_path: Path
) -> None:
    async with store_on(*users.endpoints, access=as_user(tmp_path)) as store:
        calls: list[Callable[[], Any]] = [
            lambda: put(store, root + "a"),
            lambda: store.read([root], deadline=soon()),
            lambda: store.grant(60, deadline=soon()),
        ]
        for call in calls:
            store._transport._token = "nonsense.1"
            await call()
            assert store._transport._token != "nonsense.1"
        store._transport._token = "nonsense.1"
        async with aclosing(store.watch(root)) as watch:
            assert await anext(watch) is None


async def test_a_token_ends_by_its_time_and_the_store_goes_on(users: EtcdCluster, root: str, tmp_path: Path) -> None:
    async with store_on(*users.endpoints, access=as_user(tmp_path)) as store:
        await put(store, root + "a")
        first = store._transport._token
        await asyncio.sleep(4.5)  # 2 s, looked at each second
        await put(store, root + "a")
        assert store._transport._token != first


@pytest.mark.parametrize("token_ended", [True, False])
async def test_a_commit_whose_answer_was_lost_is_not_repeated(
    users: EtcdCluster, root: str, tmp_path: Path, token_ended: bool
) -> None:
    asked: list[str] = []

    async def lose_what_is_applied(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        refused = token_ended and len(asked) == 1
        answer = await passed_through(request, users.endpoints[0])
        if request.path == "/v3/kv/txn" and not refused:
            assert request.transport is not None
            request.transport.abort()
        return answer

    async with store_on(*users.endpoints, access=as_user(tmp_path)) as direct:
        await put(direct, root + "a")
        token = direct._transport._token
    async with server(lose_what_is_applied) as endpoint, store_on(endpoint, access=as_user(tmp_path)) as store:
        store._transport._token = "nonsense.1" if token_ended else token
        with pytest.raises(StoreError) as caught:
            await put(store, root + "a")
    assert (caught.value.kind, caught.value.sent) == (ErrorClass.TRANSIENT, True)
    assert asked == ["/v3/kv/txn", "/v3/auth/authenticate"] * token_ended + ["/v3/kv/txn"]


async def test_an_authentication_without_answer_ends_with_the_call_and_nothing_was_sent(
    root: str, tmp_path: Path
) -> None:
    async def silent(request: web.Request) -> web.Response:
        assert request.path == "/v3/auth/authenticate"
        await asyncio.sleep(PATIENCE)
        raise AssertionError("the call should be over")

    async with server(silent) as endpoint, store_on(endpoint, access=as_user(tmp_path)) as store:
        with pytest.raises(StoreError, match="authentication of etcd user 'gpuward': no answer") as caught:
            await put(store, root + "a", deadline=soon(0.3))
    assert (caught.value.kind, caught.value.sent) == (ErrorClass.TRANSIENT, False)


async def test_each_refusal_says_what_was_found_and_what_to_do(
    users: EtcdCluster, root: str, tmp_path: Path, etcd: EtcdCluster
) -> None:
    nobody = Access(user="nobody", password_file=password_file(tmp_path))
    for endpoints, given, key, part in (
        (users.endpoints, as_user(tmp_path, "wrong-secret"), root, "check `election.etcd.user` and `password_file`"),
        (users.endpoints, nobody, root, "`etcdctl user list` shows the users"),
        (users.endpoints, as_user(tmp_path), "/elsewhere", "--prefix=true readwrite /gpuward/CLUSTER/"),
        (users.endpoints, Access(), root, "this etcd has users: set `election.etcd.user`"),
        (etcd.endpoints, as_user(tmp_path), root, "`etcdctl auth enable`, or take `user`"),
    ):
        if given.user is not None and given is not nobody:
            password_file(tmp_path, "wrong-secret" if "check" in part else SECRET)
        async with store_on(*endpoints, access=given) as store:
            with pytest.raises(StoreError) as caught:
                await store.read([key], deadline=soon())
        assert caught.value.kind is ErrorClass.AUTH
        assert part in str(caught.value)
        assert any(endpoint in str(caught.value) for endpoint in endpoints)
        assert "secret" not in str(caught.value).replace("password_file", "")


async def test_a_password_is_read_again_for_each_authentication_and_never_told(
    users: EtcdCluster, root: str, tmp_path: Path
) -> None:
    given = as_user(tmp_path, "wrong-secret")
    with capture_logs() as logs:
        async with store_on(*users.endpoints, access=given) as store:
            with pytest.raises(StoreError) as caught:
                await put(store, root + "a")
            assert "wrong-secret" not in f"{caught.value!r} {caught.value.__cause__!r} {given!r}"
            password_file(tmp_path)
            await put(store, root + "a")
            token = store._transport._token
            assert token is not None
            (tmp_path / "etcd.password").chmod(0o644)
            store._transport._token = None
            with pytest.raises(StoreError, match="found mode 0644, expected 0600 or 0640") as refused:
                await put(store, root + "a")
            assert (refused.value.kind, refused.value.sent) == (ErrorClass.AUTH, False)
    assert SECRET not in f"{logs} {refused.value!r}"
    assert token not in f"{logs} {refused.value!r}"


def test_a_node_leads_as_a_user_of_its_prefix_and_tells_nobody_its_password(
    users: EtcdCluster, make_node: Make, tmp_path: Path
) -> None:
    users.etcdctl(AS_ROOT, "put", f"{PREFIX}term", ENDED)
    secret = str(password_file(tmp_path))
    etcd = {"endpoints": users.endpoints, "user": "gpuward", "password_file": secret}
    node = make_node(ttl=LONG_TTL, store="etcd", etcd=etcd)
    node.add_service("one", "sleep", "1000")
    status = node.start().until_leading()
    token = status["term"]["token"]
    node.until(lambda: str(token) in users.etcdctl(AS_ROOT, "get", "--prefix", "--keys-only", f"{PREFIX}history/"))
    assert status["alarms"] == []
    assert SECRET not in node.output() + str(node.status()) + users.etcdctl(AS_ROOT, "get", "--prefix", PREFIX)
