# SPDX-License-Identifier: Apache-2.0
"""Generated from proto/twinpool/v1/kserve. See scripts/proto.sh."""
