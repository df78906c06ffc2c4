# SPDX-License-Identifier: Apache-2.0
"""The middleware before every route of vLLM, over an application that accepts every request."""

import asyncio

import pytest

from jaxmoe.vllm.plugin.auth_middleware import API_KEY_VARIABLE, AuthMiddleware

KEY = "k3y-of_this.server"


async def inside(scope, receive, send):
    await send({"type": "inside", "scope": scope["type"]})


def knock(monkeypatch, headers=(), kind="http", key=KEY, **scope):
    monkeypatch.setenv(API_KEY_VARIABLE, key)
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "headers": list(headers), "path": "/collective_rpc"} | scope
    asyncio.run(AuthMiddleware(inside)(scope, None, send))
    return [m.get("status", m["type"]) for m in sent]


@pytest.mark.parametrize("value", [f"Bearer {KEY}", f"bearer {KEY}"])
def test_with_the_key_one_comes_in(monkeypatch, value):
    assert knock(monkeypatch, [(b"authorization", value.encode())]) == ["inside"]


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", KEY.encode())],
        [(b"authorization", b"Basic " + KEY.encode())],
        [(b"authorization", b"Bearer " + KEY[:-1].encode())],
        [(b"x-api-key", KEY.encode())],
        [(b"authorization", "Bearer ключ".encode())],
        [(b"authorization", b"Bearer no"), (b"authorization", b"Bearer " + KEY.encode())],
    ],
)
@pytest.mark.parametrize("scope", [{}, {"method": "OPTIONS"}, {"path": "/health"}, {"path": ""}])
def test_without_it_nobody_does_whatever_the_route(monkeypatch, headers, scope):
    assert knock(monkeypatch, headers, **scope) == [401, "http.response.body"]


def test_websockets_close_before_opening_and_startup_passes(monkeypatch):
    assert knock(monkeypatch, kind="websocket") == ["websocket.close"]
    assert knock(monkeypatch, kind="lifespan") == ["inside"]


def test_a_door_without_a_key_is_no_door(monkeypatch):
    with pytest.raises(RuntimeError, match="VLLM_API_KEY must be the key"):
        knock(monkeypatch, key="")
