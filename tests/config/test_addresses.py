"""Addresses as text."""

from __future__ import annotations

import pytest

from kvd.config import Address, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://127.0.0.1:9191", Address("tcp", host="127.0.0.1", port=9191)),
        ("tcp://*:0", Address("tcp", host="*", port=0)),
        ("tcp://[fe80::1%eth0]:80", Address("tcp", host="fe80::1%eth0", port=80)),
        ("ipc:///run/kvd/scheduler", Address("ipc", path="/run/kvd/scheduler")),
        ("ipc://@kvd", Address("ipc", path="@kvd")),
    ],
)
def test_addresses_are_read_and_written(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text
