# SPDX-License-Identifier: Apache-2.0
"""Generated from proto/twinpool/v1; do not edit (make proto)."""
