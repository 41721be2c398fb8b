"""Requests in which one list has many entries, for every list of every request schema.

They come from the gateway's own OpenAPI document, so a new field is covered as soon as it exists.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from gateway.app import create_app
from gateway.exchange import Traffic
from gateway.models.reading import read_folder
from gateway.settings import GatewaySettings
from gateway.supervisor.supervisor import Supervisor
from tests.gateway.numbers_backend import NumbersBackend

Json = dict[str, Any]
Schema = Mapping[str, Any]
Step = str | int  # a field, or an alternative of `anyOf`; ENTRY is one entry of a list
MODEL = "numbers"
_ENTRY = -1
_DEEPEST = 3  # lists inside each other
_FILLED = frozenset({"content", "input", "prompt", "role", "text"})  # although they are optional


@dataclass(frozen=True)
class Case:
    """A list of the body of a path, with entries of one kind, in messages of one role if any."""

    path: str
    steps: tuple[Step, ...]
    kind: tuple[int, ...]
    role: str = ""

    def __str__(self) -> str:
        names = [step if isinstance(step, str) else f"[{step}]" for step in self.steps]
        place = ".".join(names).replace("[-1]", "[]")
        return f"{self.path} {place} {self.kind or ''} {self.role}"


class Schemas:
    """The request schemas of an OpenAPI document."""

    def __init__(self, document: Json) -> None:
        self._schemas = document["components"]["schemas"]
        self._bodies = {
            path: content["application/json"]["schema"]
            for path, methods in document["paths"].items()
            if (content := methods.get("post", {}).get("requestBody", {}).get("content"))
            and "application/json" in content  # forms have no lists
        }
        self._texts = 0
        self._role = ""

    def cases(self) -> Iterator[Case]:
        """Every list of every body that a POST accepts."""
        for path, schema in self._bodies.items():
            for steps, roles in self._lists(schema, (), ("",)):
                entries = self._at(schema, steps)["items"]
                for kind in self._kinds(entries):
                    for role in self._roles(self._at(entries, kind)) or roles:
                        yield Case(path, steps, kind, role)

    def body(self, case: Case, count: int) -> Json:
        """A request of the case whose list has `count` entries, with a different text in each."""
        self._texts, self._role = 0, case.role
        schema = self._bodies[case.path]
        entries = self._at(schema, case.steps)["items"]
        many = [self._smallest(self._at(entries, case.kind)) for _ in range(count)]
        body: Json = self._around(schema, case.steps, many)
        return body | {"model": MODEL}

    def most(self, case: Case) -> int | None:
        """The limit that the list's schema sets."""
        most: int | None = self._at(self._bodies[case.path], case.steps).get("maxItems")
        return most

    def _plain(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema

    def _at(self, schema: Schema, steps: tuple[Step, ...]) -> Schema:
        for step in steps:
            schema = self._plain(schema)
            if isinstance(step, str):
                schema = schema["properties"][step]
            else:
                schema = schema["items"] if step == _ENTRY else schema["anyOf"][step]
        return self._plain(schema)

    def _lists(
        self, schema: Schema, steps: tuple[Step, ...], roles: Sequence[str]
    ) -> Iterator[tuple[tuple[Step, ...], Sequence[str]]]:
        """The steps to each list below a schema, and the roles that its message may have."""
        schema = self._plain(schema)
        roles = self._roles(schema) or roles
        for at, choice in enumerate(schema.get("anyOf", ())):
            yield from self._lists(choice, (*steps, at), roles)
        for name, inner in schema.get("properties", {}).items():
            yield from self._lists(inner, (*steps, name), roles)
        if schema.get("items"):
            yield steps, roles
            if steps.count(_ENTRY) < _DEEPEST - 1:
                yield from self._lists(schema["items"], (*steps, _ENTRY), roles)

    def _roles(self, schema: Schema) -> Sequence[str]:
        role: Sequence[str] = self._plain(schema.get("properties", {}).get("role", {})).get(
            "enum", ()
        )
        return role

    def _kinds(self, schema: Schema) -> list[tuple[int, ...]]:
        """The steps to each alternative of an entry."""
        choices = self._plain(schema).get("anyOf")
        if choices is None:
            return [()]
        return [(at, *rest) for at, each in enumerate(choices) for rest in self._kinds(each)]

    def _around(self, schema: Schema, steps: tuple[Step, ...], value: Any) -> Any:
        """The smallest value of a schema that has this value where the steps lead."""
        if not steps:
            return value
        schema, step, rest = self._plain(schema), steps[0], steps[1:]
        if isinstance(step, str):
            inner = self._around(schema["properties"][step], rest, value)
            return self._smallest(schema) | {step: inner}
        if step == _ENTRY:
            return [self._around(schema["items"], rest, value)]
        return self._around(schema["anyOf"][step], rest, value)

    def _smallest(self, schema: Schema) -> Any:
        schema = self._plain(schema)
        for name in ("const", "enum"):
            if name in schema:
                words = schema[name] if name == "enum" else [schema[name]]
                return self._role if self._role in words else words[0]
        if "anyOf" in schema:
            return self._smallest(schema["anyOf"][0])
        match schema.get("type"):
            case "object":
                needed = _FILLED.union(schema.get("required", ()))
                fields = schema.get("properties", {}).items()
                return {name: self._smallest(each) for name, each in fields if name in needed}
            case "array":
                return [self._smallest(schema["items"])]
            case "integer" | "number":
                return int(schema.get("minimum", 1))
            case "boolean" | "null" as kind:
                return True if kind == "boolean" else None
        self._texts += 1
        return str(self._texts) if "pattern" in schema else f"v{self._texts}"


@dataclass
class Served:
    """A gateway in this process: `post` returns the status of a request."""

    app: FastAPI

    async def post(self, path: str, body: bytes) -> int:
        statuses: list[int] = []
        sent = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Json:
            if sent:
                return sent.pop()
            await asyncio.Event().wait()
            raise AssertionError("a client that stays does not disconnect")

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        head = {"content-type": "application/json", "host": "localhost"}
        head["content-length"] = str(len(body))
        scope: Json = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in head.items()],
            "server": ("localhost", 80),
            "client": ("127.0.0.1", 1),
        }
        await self.app(scope, receive, send)
        return statuses[0]

    async def cost(self, path: str, body: bytes) -> float:
        """CPU seconds of a request."""
        before = time.process_time()
        await self.post(path, body)
        return time.process_time() - before


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Served]:
    """A gateway with a model of another backend, which answers at once."""
    backend = NumbersBackend()
    backend.release.set()
    settings = {"name": MODEL, "address": backend.address, "parameters": {"model": MODEL}}
    (folder / f"{MODEL}.yaml").write_text(json.dumps(settings))
    own = GatewaySettings(folder, max_memory_bytes=0, forget_prompts=True)
    app = create_app(own, Supervisor(own, read_folder(folder)), Traffic())
    async with app.router.lifespan_context(app):
        yield Served(app)
    backend.close()
