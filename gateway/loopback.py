"""Addresses that only this machine reaches."""

from __future__ import annotations

from ipaddress import ip_address


def is_loopback(name: str) -> bool:
    """Return whether this is a loopback address itself, not a name that resolves to one."""
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
