// SPDX-License-Identifier: Apache-2.0
// The fuzzer's bytes as a source of choices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace twinpool::fuzz {

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size)
      : data_(data),
        size_(size) {}
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  /// A number below ``limit``; 0 at the end of the input.
  std::uint32_t below(std::uint32_t limit) noexcept {
    std::uint32_t value = 0;
    for (std::uint32_t reach = 1; reach < limit && size_ > 0; reach = reach > (1U << 23U) ? UINT32_MAX : reach << 8U) {
      value = value << 8U | *data_++;
      --size_;
    }
    return value % limit;
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
};

/// What must hold; a fuzzer takes an abort as a finding.
inline void expect(bool holds, const char* rule) {
  if (!holds) {
    std::fprintf(stderr, "broken: %s\n", rule);
    std::abort();
  }
}

}  // namespace twinpool::fuzz
