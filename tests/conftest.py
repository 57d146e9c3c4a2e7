# SPDX-License-Identifier: Apache-2.0
"""What all tests share."""

from hypothesis import settings

# How long an example takes is a matter of the machine, and says nothing about what is tested.
settings.register_profile("twinpool", deadline=None)
settings.load_profile("twinpool")
