# SPDX-License-Identifier: Apache-2.0
"""Keeps pools at what is recorded of them: ``spec`` what they shall be, ``plan`` what to change, ``loop`` who does it."""
