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
/// Alignment 1, so that arrays of it can lie in any byte buffer (numpy uint8[n, 16]).
struct Hash128 {
  static constexpr std::size_t size = 16;

  std::array<std::uint8_t, size> bytes{};

  [[nodiscard]] std::uint64_t low() const noexcept { return word(0); }
  [[nodiscard]] std::uint64_t high() const noexcept { return word(8); }

  friend bool operator==(const Hash128& a, const Hash128& b) noexcept {
    return a.low() == b.low() && a.high() == b.high();
  }

  static Hash128 from_bytes(const void* data) noexcept {
    Hash128 hash;
    std::memcpy(hash.bytes.data(), data, size);
    return hash;
  }
  [[nodiscard]] std::string hex() const;

 private:
  [[nodiscard]] std::uint64_t word(std::size_t offset) const noexcept {
    std::uint64_t value = 0;
    std::memcpy(&value, bytes.data() + offset, sizeof value);
    return value;
  }
};

static_assert(sizeof(Hash128) == Hash128::size && alignof(Hash128) == 1);

}  // namespace twinpool

template <>
struct std::hash<twinpool::Hash128> {
  std::size_t operator()(const twinpool::Hash128& value) const noexcept { return value.low(); }
};
