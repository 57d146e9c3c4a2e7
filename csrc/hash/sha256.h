// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "hash/hash128.h"

namespace twinpool {

/// The first 128 bits of the SHA-256 of ``message``, by OpenSSL's EVP interface.
Hash128 sha256_128(std::span<const std::uint8_t> message);

/// A message of one length that is hashed again and again with other contents. Its padding is laid out once and OpenSSL
/// compresses it in one go: a block of 64 tokens took 170 ns that way where init, update and final of EVP took 300.
/// Where OpenSSL lacks the low-level interface (see TWINPOOL_SHA256_EVP in CMakeLists.txt) it falls back to EVP; the
/// results are the same.
class Sha256Message {
 public:
  explicit Sha256Message(std::size_t length);
  Sha256Message(const Sha256Message&) = delete;
  Sha256Message& operator=(const Sha256Message&) = delete;
  ~Sha256Message() = default;

  /// ``length`` bytes to write the contents into.
  [[nodiscard]] std::uint8_t* data() noexcept { return data_; }
  [[nodiscard]] Hash128 digest() const;

 private:
  static constexpr std::size_t inline_bytes = 576;  ///< a block of 128 tokens, the largest that the design allows

  std::size_t length_;
  std::size_t padded_;
  std::array<std::uint8_t, inline_bytes> inline_{};
  std::vector<std::uint8_t> heap_;
  std::uint8_t* data_ = inline_.data();
};

}  // namespace twinpool
