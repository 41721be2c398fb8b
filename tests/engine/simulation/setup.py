"""The simulated machine and model: sizes in bytes, and durations in seconds."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.engine.device import Device, Kind, memory_plan, prefill_chunk
from backend.engine.planning.plan import CacheCost, Limits
from backend.engine.settings import Settings

_FILE = Path(__file__).with_name("setups.toml")
_KV_BYTES = 2  # of one value


@dataclass(frozen=True, slots=True)
class Machine:
    """A device. Units and sources are in `setups.toml`."""

    name: str
    kind: Kind
    bandwidth: float
    flops: float
    memory: float
    usable: float
    bandwidth_share: float
    flops_share: float
    launch: float
    block: float = 0.0
    uneven: float = 0.0
    row: float = 0.0
    shape: float = 0.0

    @property
    def device(self) -> Device:
        memory = int(self.memory)
        return Device(self.kind, self.name, memory, int(memory * self.usable))


@dataclass(frozen=True, slots=True)
class Model:
    """A language model. Units and sources are in `setups.toml`."""

    name: str
    parameters: float
    active: float
    bits: float
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    blocks: int
    state: float = 0.0
    experts: int = 0
    experts_used: int = 0
    expert_share: float = 0.0

    @property
    def weights(self) -> float:
        """Bytes of the weights."""
        return self.parameters * self.bits / 8

    @property
    def cost(self) -> CacheCost:
        per_token = 2 * self.layers * self.kv_heads * self.head_size * _KV_BYTES
        return CacheCost(per_token, int(self.state))

    def touched(self, tokens: float) -> float:
        """Bytes of weights that a pass over `tokens` tokens reads.

        Tokens choose their experts independently, so a pass over few tokens does not use all.
        """
        if not self.experts:
            return self.weights
        missed: float = (1 - self.experts_used / self.experts) ** tokens
        return self.weights * (1 - self.expert_share * missed)


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on a machine under a load.

    load: requests per second. requests: their number. first_token, gap: maximum seconds to the
    first token and between tokens of a good answer.
    """

    machine: Machine
    model: Model
    slots: int
    load: float
    requests: int
    first_token: float
    gap: float

    @property
    def name(self) -> str:
        return f"{self.machine.name}, {self.model.name}"

    @property
    def limits(self) -> Limits:
        """The limits that the backend would choose on this machine, except for the slots."""
        device, settings, weights = self.machine.device, Settings(), int(self.model.weights)
        plan = memory_plan(device, settings, weights)
        return Limits(
            cost=self.model.cost,
            slots=self.slots,
            budget=plan.limit - weights,
            prompt_cache=plan.prompt_cache,
            max_entries=settings.max_cache_entries,
            prefill_chunk=prefill_chunk(device, settings),
            stall_ms=settings.stall_ms,
            trims=not self.model.state,
        )

    def decode_seconds(self, rows: int, longest: int) -> float:
        """Seconds of a decode step of one batch, padded to its longest sequence."""
        cost = self.model.cost
        read = self.model.touched(rows) + rows * (longest * cost.per_token + 2 * cost.fixed)
        overhead = rows * self.machine.row
        return overhead + self._seconds(rows, read, rows * self._flops(longest))

    def prefill_seconds(self, rows: int, width: int, start: int) -> float:
        """Seconds of a prefill pass of `width` tokens per row after `start` earlier ones."""
        cost = self.model.cost
        tokens = rows * width
        read = self.model.touched(tokens) + rows * (start * cost.per_token + 2 * cost.fixed)
        return self._seconds(rows, read, tokens * self._flops(start + width // 2))

    def copy_seconds(self, nbytes: int) -> float:
        """Seconds to copy bytes."""
        return 2 * nbytes / self._bandwidth

    def alone_seconds(self, start: int, prompt: int, answer: int) -> float:
        """Seconds of a request on an idle machine, whose first `start` tokens are cached."""
        chunk = prefill_chunk(self.machine.device, Settings())
        prefill = sum(
            self.prefill_seconds(1, min(chunk, prompt - at), at)
            for at in range(start, prompt, chunk)
        )
        return prefill + answer * self.decode_seconds(1, prompt + answer // 2)

    @property
    def _bandwidth(self) -> float:
        return self.machine.bandwidth * self.machine.bandwidth_share

    def _seconds(self, rows: int, read: float, flops: float) -> float:
        machine = self.machine
        block = machine.block + (machine.uneven if rows > 1 else 0.0)
        fixed = machine.launch + self.model.blocks * block
        return max(read / self._bandwidth, flops / (machine.flops * machine.flops_share)) + fixed

    def _flops(self, context: int) -> float:
        """Operations per token: a multiplication and an addition per weight and per KV value."""
        model = self.model
        attention = 4 * model.layers * model.heads * model.head_size * context
        return 2 * model.active + attention


@dataclass(frozen=True, slots=True)
class Measured:
    """What a model reached on a machine. rows: answers at once; decode: tokens/s, for each.

    prefill: tokens and tokens/s of a lone pass whose shape was new.
    """

    machine: Machine
    model: Model
    rows: tuple[int, ...]
    decode: tuple[float, ...]
    prefill: tuple[int, float] | None = None

    def setup(self, rows: int) -> Setup:
        """The model on the machine, with as many slots as there are answers."""
        return Setup(self.machine, self.model, rows, 0, 0, 0, 0)


def setups() -> list[Setup]:
    """All setups in the file, in order."""
    return [Setup(**values) for values in _on_machines("setups")]


def measured() -> list[Measured]:
    """All measurements in the file, in order."""
    return [Measured(**values) for values in _on_machines("measured")]


def _on_machines(table: str) -> list[dict[str, Any]]:
    """The entries of a table. Names of machines and models are replaced by their objects."""
    read: dict[str, Any] = tomllib.loads(_FILE.read_text())
    machines = {key: Machine(**values) for key, values in read["machines"].items()}
    models = {key: Model(**values) for key, values in read["models"].items()}
    return [
        {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        | {"machine": machines[values["machine"]], "model": models[values["model"]]}
        for values in read[table]
    ]
