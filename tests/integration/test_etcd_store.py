"""What only a store on the network must stand: members that are gone, stopped, cut off, or are not etcd at all."""

import asyncio
import uuid
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from election.store import ErrorClass, ModIs, Put, StoreError, Txn
from election.stores.etcd_http import EtcdStore
from supervisor.demo.etcd_cluster import EtcdCluster
from tests.bed.etcd import etcd_cluster, replace_member
from tests.bed.etcd_stores import CLOCK, Answer, in_order, put, raw_server, server, soon, store_on, works_again
from tests.bed.etcd_users import as_user
from tests.bed.keeper import PATIENCE
from tests.bed.nodes import free_port


@pytest.fixture
def root() -> str:
    """A prefix that no other test uses."""
    return f"/etcd/{uuid.uuid4().hex}/"


async def test_a_stopped_member_costs_one_deadline_and_then_the_next_one_answers(
    own_etcd: EtcdCluster, root: str
) -> None:
    member = (own_etcd.leader() + 1) % 3
    async with store_on(*in_order(own_etcd, member)) as store:
        await put(store, root + "a")
        own_etcd.stop(member)
        start = CLOCK.now()
        with pytest.raises(StoreError, match="no answer by the deadline") as caught:
            await put(store, root + "a", deadline=soon(0.5))
        assert 0.45 < CLOCK.now() - start < 10
        assert (caught.value.kind, caught.value.sent) == (ErrorClass.TRANSIENT, True)
        assert own_etcd.endpoints[member] in str(caught.value)
        await put(store, root + "a")


async def test_writes_work_again_after_the_leader_was_killed(own_etcd: EtcdCluster, root: str) -> None:
    leader = own_etcd.leader()
    async with store_on(*in_order(own_etcd, leader)) as store:
        lease = (await store.grant(60, deadline=soon())).lease
        own_etcd.kill(leader)
        await works_again(store, root + "a")
        assert await store.keepalive(lease, deadline=soon()) == 60


async def test_without_any_member_a_call_says_at_once_where_it_tried_and_that_nothing_was_sent(
    own_etcd: EtcdCluster, root: str
) -> None:
    async with store_on(*own_etcd.endpoints) as store:
        await put(store, root + "a")
        for member in range(3):
            own_etcd.kill(member)
        with pytest.raises(StoreError) as caught:
            await store.read([root], deadline=soon())
        with pytest.raises(StoreError) as again:
            await put(store, root + "a")
        assert (again.value.kind, again.value.sent) == (ErrorClass.TRANSIENT, False)
    assert caught.value.kind is ErrorClass.TRANSIENT
    for endpoint in own_etcd.endpoints:
        assert endpoint in str(caught.value)
    assert "Connect call failed" in str(caught.value)


async def test_with_every_member_stopped_a_call_ends_at_its_deadline(own_etcd: EtcdCluster, root: str) -> None:
    async with store_on(*own_etcd.endpoints) as store:
        for member in range(3):
            own_etcd.stop(member)
        start = CLOCK.now()
        with pytest.raises(StoreError) as caught:
            await store.read([root], deadline=soon(0.4))
        assert 0.35 < CLOCK.now() - start < 10
    assert caught.value.kind is ErrorClass.TRANSIENT


async def test_a_read_in_a_member_without_leader_ends_at_its_deadline_as_transient(
    own_etcd: EtcdCluster, root: str
) -> None:
    leader = own_etcd.leader()
    alone = (leader + 1) % 3
    async with store_on(own_etcd.endpoints[alone]) as store:
        own_etcd.kill(leader)
        own_etcd.kill((leader + 2) % 3)
        for call in (store.read([root], deadline=soon(0.4)), store.keepalive(0x77, deadline=soon(0.4))):
            with pytest.raises(StoreError) as caught:
                await call
            assert caught.value.kind is ErrorClass.TRANSIENT


async def test_a_gateway_that_is_off_is_unsupported_and_the_flag_is_named(root: str) -> None:
    with etcd_cluster(1, ["--enable-grpc-gateway=false"]) as cluster:
        async with store_on(*cluster.endpoints) as store:
            with pytest.raises(StoreError, match="--enable-grpc-gateway") as caught:
                await store.read([root], deadline=soon())
            assert caught.value.kind is ErrorClass.UNSUPPORTED
            assert cluster.endpoints[0] in str(caught.value)


async def fill(store: EtcdStore, root: str) -> None:
    for count in range(100):
        await put(store, f"{root}{count}", bytes(20_000))


async def test_a_full_etcd_is_out_of_space_and_says_so_in_its_status(root: str) -> None:
    with etcd_cluster(1, ["--quota-backend-bytes=200000"]) as cluster:
        async with store_on(*cluster.endpoints) as store:
            with pytest.raises(StoreError) as caught:
                await fill(store, root)
            assert caught.value.kind is ErrorClass.NO_SPACE
            assert "quota" in str(caught.value)
            (status,) = await store.status(deadline=soon())
            assert any("NOSPACE" in alarm for alarm in status.alarms)


NONSENSE: dict[str, Callable[[], web.Response]] = {
    "500": lambda: web.Response(status=500, text="oops"),
    "html": lambda: web.Response(text="<html>Welcome</html>", content_type="text/html"),
    "html 502": lambda: web.Response(status=502, text="<html>Bad gateway</html>", content_type="text/html"),
    "empty": lambda: web.Response(body=b""),
    "json cut off": lambda: web.Response(text='{"header":{"revision":"7"'),
    "empty object": lambda: web.json_response({}),
    "list": lambda: web.json_response([1]),
    "null": lambda: web.json_response(None),
    "redirect": lambda: web.Response(status=307, headers={"Location": "/elsewhere"}),
    "wrong types": lambda: web.json_response({"header": {"revision": {}}, "succeeded": "yes", "result": 5, "ID": []}),
    "wrong header": lambda: web.json_response({"header": 7, "responses": "none", "ID": "1", "TTL": "1e9"}),
    "unknown error": lambda: web.json_response({"code": 99, "message": "who knows"}, status=500),
    "odd error": lambda: web.json_response({"error": {"code": "x"}}, status=400),
    "not utf-8": lambda: web.Response(body=b'{"a":"\xff\xfe"}'),
    "wrong length": lambda: web.Response(body=b"{}", headers={"Content-Encoding": "gzip"}),
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_nonsense_in_place_of_an_answer_is_transient(name: str, root: str) -> None:
    async def nonsense(request: web.Request) -> web.Response:
        await request.read()
        return NONSENSE[name]()

    async with server(nonsense) as endpoint, store_on(endpoint) as store:
        calls = (
            store.read([root], deadline=soon()),
            store.grant(9, deadline=soon()),
            store.keepalive(7, deadline=soon()),
            store.commit(Txn((ModIs(root, 0),), (Put(root, b"x"),)), deadline=soon()),
            store.revoke(7, deadline=soon()),
        )
        for call in calls:
            with pytest.raises(StoreError) as caught:
                await call
            assert caught.value.kind is ErrorClass.TRANSIENT, caught.value
            assert endpoint in str(caught.value)
        assert (await store.status(deadline=soon()))[0].endpoint == endpoint


async def test_a_read_leaves_nonsense_for_the_next_endpoint_within_its_deadline(etcd: EtcdCluster, root: str) -> None:
    async def nonsense(request: web.Request) -> web.Response:
        return web.Response(text="<html>Welcome</html>")

    async with server(nonsense) as endpoint, store_on(endpoint, *etcd.endpoints) as store:
        assert (await store.read([root], deadline=soon())).entries == ()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"\r\n")
    while True:
        writer.write(bytes(1 << 20))
        await writer.drain()


async def drip(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"\r\n{")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.02)


async def cut_off(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b'Content-Length: 999\r\n\r\n{"header":')
    await writer.drain()


async def no_http(writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
    await writer.drain()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (endless, "an answer of more than"),
        (drip, "no answer by the deadline"),
        (cut_off, "the connection broke before the answer"),
        (no_http, "the connection broke before the answer"),
    ],
)
async def test_an_answer_that_never_ends_or_breaks_off_is_transient_and_may_have_been_applied(
    root: str, tmp_path: Path, answer: Answer, said: str
) -> None:
    async with raw_server(answer) as at:
        endpoint = f"http://{at}"
        async with store_on(endpoint) as store:
            with pytest.raises(StoreError, match=said) as caught:
                await put(store, root + "a", deadline=soon(0.5 if answer is drip else PATIENCE))
        assert (caught.value.kind, caught.value.sent) == (ErrorClass.TRANSIENT, True)
        async with store_on(endpoint, access=as_user(tmp_path)) as store:
            with pytest.raises(StoreError, match=said) as caught:
                await put(store, root + "a", deadline=soon(0.5 if answer is drip else PATIENCE))
        assert (caught.value.kind, caught.value.sent) == (ErrorClass.TRANSIENT, False)  # only asked for a token


@pytest.mark.parametrize("token", [None, 7, "", "two\r\nlines", "é"])
async def test_an_authentication_that_brings_no_token_is_transient(root: str, tmp_path: Path, token: object) -> None:
    async def nonsense(request: web.Request) -> web.Response:
        return web.json_response({"header": {}, "token": token})

    async with server(nonsense) as endpoint, store_on(endpoint, access=as_user(tmp_path)) as store:
        with pytest.raises(StoreError, match="an answer without token") as caught:
            await put(store, root + "a")
    assert (caught.value.kind, caught.value.sent) == (ErrorClass.TRANSIENT, False)


async def test_a_member_may_be_replaced_while_a_store_is_in_use(own_etcd: EtcdCluster, root: str) -> None:
    """The store goes on with the endpoints that it has."""
    async with (
        store_on(*in_order(own_etcd, 2)) as store,
        aclosing(store.watch(root)) as watch,
    ):
        assert await anext(watch) is None
        lease = (await store.grant(60, deadline=soon())).lease
        await asyncio.to_thread(replace_member, own_etcd, 2)
        await works_again(store, root + "a")
        own_etcd.kill(1)  # from now on two of three, and one of them is the new one
        await works_again(store, root + "b")
        assert await store.keepalive(lease, deadline=soon()) == 60
        async with asyncio.timeout(PATIENCE):
            while (change := await anext(watch)) is None or change.key != root + "b":
                pass


async def test_a_redirect_is_not_followed_even_to_a_real_etcd(etcd: EtcdCluster, root: str) -> None:
    async def redirect(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": etcd.endpoints[0] + request.path})

    async with server(redirect) as endpoint, store_on(endpoint) as store:
        with pytest.raises(StoreError, match="redirect") as caught:
            await store.read([root], deadline=soon())
    assert caught.value.kind is ErrorClass.TRANSIENT


async def test_a_refused_connection_is_left_for_the_next_endpoint_by_a_commit_too(etcd: EtcdCluster, root: str) -> None:
    async with store_on(f"http://127.0.0.1:{free_port()}", *etcd.endpoints) as store:
        await put(store, root + "a")


@pytest.mark.parametrize("how", ["connection cut", "502"])
async def test_a_commit_whose_reply_was_lost_is_applied_once_and_not_repeated(
    etcd: EtcdCluster, root: str, how: str
) -> None:
    passed_on = []

    async def lose_reply(request: web.Request) -> web.Response:
        body = await request.read()
        async with aiohttp.request("POST", etcd.endpoints[0] + request.path, data=body) as reply:
            passed_on.append(await reply.json())
        if how == "502":
            return web.Response(status=502)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with server(lose_reply) as endpoint, store_on(endpoint, etcd.endpoints[1]) as store:
        with pytest.raises(StoreError) as caught:
            await put(store, root + "a", b"once")
        assert (caught.value.kind, caught.value.sent) == (ErrorClass.TRANSIENT, True)
        assert len(passed_on) == 1
        entry = (await store.read([root + "a"], deadline=soon())).get(root + "a")
    assert entry is not None
    assert entry.mod_revision == int(passed_on[0]["header"]["revision"])


async def test_a_keepalive_whose_reply_was_lost_is_repeated_elsewhere(etcd: EtcdCluster) -> None:
    async def lose_reply(request: web.Request) -> web.Response:
        await request.read()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with (
        server(lose_reply) as endpoint,
        store_on(etcd.endpoints[1]) as direct,
        store_on(endpoint, etcd.endpoints[1]) as store,
    ):
        lease = (await direct.grant(60, deadline=soon())).lease
        assert await store.keepalive(lease, deadline=soon()) == 60


async def test_status_names_the_leader_and_what_is_wrong_with_each_member(own_etcd: EtcdCluster) -> None:
    leader = own_etcd.leader()
    gone = (leader + 1) % 3
    own_etcd.kill(gone)
    async with store_on(*own_etcd.endpoints) as store:
        found = await store.status(deadline=soon())
    assert [status.endpoint for status in found] == own_etcd.endpoints
    assert found[leader].leader == found[leader].member != 0
    assert found[leader].version.startswith("3.")
    assert found[leader].db_size > 0
    assert found[leader].error is None
    assert "Connect call failed" in str(found[gone].error)


async def test_status_tells_the_quota_where_etcd_does() -> None:
    """As of etcd 3.6 (api/etcdserverpb/rpc.proto, `dbSizeQuota`)."""

    async def member(request: web.Request) -> web.Response:
        assert request.path == "/v3/maintenance/status"
        return web.json_response({"header": {"member_id": "7"}, "dbSize": "20480", "dbSizeQuota": "2147483648"})

    async with server(member) as endpoint, store_on(endpoint) as store:
        (found,) = await store.status(deadline=soon())
    assert (found.db_size, found.quota) == (20480, 2 << 30)


@pytest.mark.parametrize("endpoints", [[], ["127.0.0.1:2379"], "http://127.0.0.1:2379"])
def test_endpoints_that_cannot_work_are_refused_at_once(endpoints: list[str]) -> None:
    with pytest.raises(ValueError, match="expected"):
        EtcdStore(endpoints, clock=CLOCK)
