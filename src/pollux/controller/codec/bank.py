"""The model bank as JSON values and back: the saved models that later jobs of the same kind use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pollux.controller.codec.events import decode_value, encode_value
from pollux.goodput import BatchLimits, Efficiency, Observation, PublishedThroughput
from pollux.goodput.bank import KindMemory, ModelBank

__all__ = ["WrittenKinds", "decode_bank", "encode_bank"]

WrittenKinds = dict[str, tuple[KindMemory, dict[str, Any]]]
"""The last written form of each kind, and the memory that it encodes."""


def encode_bank(bank: ModelBank, written: WrittenKinds) -> dict[str, Any]:
    """Every kind by its name; reuses the forms of unchanged kinds in `written`, and updates it."""
    for kind, memory in bank.kinds.items():
        if kind not in written or written[kind][0] is not memory:
            written[kind] = memory, _encode_kind(memory)
    for kind in written.keys() - bank.kinds.keys():
        del written[kind]
    return {kind: written[kind][1] for kind in bank.kinds}


def _encode_kind(memory: KindMemory) -> dict[str, Any]:
    return {
        "limits": encode_value(memory.limits),
        "efficiency": encode_value(memory.efficiency),
        "efficiency_at": encode_value(memory.efficiency_at),
        "rows": [[*place, encode_value(row)] for place, row in memory.rows.items()],
        "totals": list(memory.totals),
        "works": {work: list(totals) for work, totals in memory.works.items()},
        "learned_at": memory.learned_at,
        "throughputs": {
            name: [float(number) for number in model.parameters] for name, model in memory.throughputs.items()
        },
    }


def decode_bank(saved: Mapping[str, Any]) -> ModelBank:
    """The bank that `encode_bank` wrote."""
    return ModelBank.of({kind: _decode_kind(body, f"bank.{kind}") for kind, body in saved.items()})


def _decode_kind(body: Mapping[str, Any], where: str) -> KindMemory:
    return KindMemory(
        limits=decode_value(BatchLimits, body["limits"], f"{where}.limits"),
        efficiency=decode_value(Efficiency, body["efficiency"], f"{where}.efficiency"),
        efficiency_at=decode_value(float, body["efficiency_at"], f"{where}.efficiency_at"),
        rows={
            (gpu_type, nodes, gpus, octave): decode_value(Observation, row, f"{where}.rows")
            for gpu_type, nodes, gpus, octave, row in body["rows"]
        },
        totals=tuple(body["totals"]),
        # Stores of earlier versions have totals by kind only.
        works={work: tuple(totals) for work, totals in body.get("works", {}).items()},
        learned_at=body["learned_at"],
        throughputs={
            name: PublishedThroughput(*decode_value(tuple[float, ...], numbers, f"{where}.throughputs"))
            for name, numbers in body["throughputs"].items()
        },
    )
