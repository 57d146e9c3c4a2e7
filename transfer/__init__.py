# SPDX-License-Identifier: Apache-2.0
"""Moves KV blocks between workers: a reader pulls blocks from their owner and proves that they are the right ones.

Layers, each over the ones before it:

1. ``base``: types and the :class:`~twinpool.transfer.base.TransferAgent` protocol. ``nixl`` and ``loopback``
   implement it; nothing else knows how bytes move.
2. ``pump`` drives one agent with time passed in; ``thread`` gives it the one thread that may call NIXL.
3. ``descriptor`` and ``ticket`` check what a peer says; ``fence`` and ``digest`` prove what was read.
4. ``reader`` (pull sessions) and ``owner`` (offers, pins, leases) speak the hand-off protocol. They do no I/O:
   messages go out through a callable, time comes in as an argument.
"""
