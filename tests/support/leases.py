# SPDX-License-Identifier: Apache-2.0
"""What a governor has leased, whether or not torch's tensors are leased too."""


def leased_by_stores(governor) -> int:
    """Bytes leased but for tensors: whether those are depends on what the process loaded before."""
    ledger = governor.ledger()
    tensors = ledger.pools.get("tensors")
    return ledger.leased_bytes - (tensors.leased_bytes if tensors else 0)
