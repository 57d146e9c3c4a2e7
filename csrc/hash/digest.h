// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

namespace twinpool {

/// XXH64 of ``data``: tells whether a block's bytes arrived as they were sent. It guards against faults, not attackers.
std::uint64_t xxh64(std::span<const std::uint8_t> data, std::uint64_t seed = 0) noexcept;

}  // namespace twinpool
