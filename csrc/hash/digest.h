// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

namespace twinpool {

/// Digest of ``data``: tells whether a block's bytes arrived as they were sent. It guards against faults, not
/// attackers.
///
/// A sum, so that a GPU can take the words in any order: word ``i`` (8 bytes, little-endian, the last one filled up
/// with zeros) adds ``mix(word + (i + 1) * golden)``, the length adds ``mix(length)``. ``mix`` is the finaliser of
/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
/// ``engine/kernels/triton_digest.py`` is the same for device memory; both equal the vectors in
/// tests/unit/core/golden_hash.json.
std::uint64_t digest64(std::span<const std::uint8_t> data) noexcept;

}  // namespace twinpool
