# SPDX-License-Identifier: Apache-2.0
"""Chaos: a whole cluster under load while everything in it dies, stalls and is cut off, by a plan drawn from one seed.

``python -m tests.chaos --seed S --seconds N`` or ``make chaos``.
"""
