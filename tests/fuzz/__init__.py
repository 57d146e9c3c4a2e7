# SPDX-License-Identifier: Apache-2.0
"""Fuzzing of everything that arrives from outside: messages, events, records, files. See ``__main__``."""
