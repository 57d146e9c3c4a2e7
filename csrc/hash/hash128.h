// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

namespace twinpool {

/// A 128-bit content hash: the first 16 bytes of a SHA-256. Already uniform, so maps need no further mixing.
struct Hash128 {
  static constexpr std::size_t bytes = 16;

  std::uint64_t low = 0;
  std::uint64_t high = 0;

  friend bool operator==(const Hash128&, const Hash128&) = default;

  static Hash128 from_bytes(const void* data) noexcept {
    Hash128 hash;
    std::memcpy(&hash, data, bytes);
    return hash;
  }
  void to_bytes(void* data) const noexcept { std::memcpy(data, this, bytes); }
  [[nodiscard]] std::string hex() const;
};

// Arrays of hashes cross the binding as uint8[n, 16] and are used in place.
static_assert(sizeof(Hash128) == Hash128::bytes);

}  // namespace twinpool

template <>
struct std::hash<twinpool::Hash128> {
  std::size_t operator()(const twinpool::Hash128& hash) const noexcept { return hash.low; }
};
