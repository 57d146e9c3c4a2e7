// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <openssl/evp.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>

namespace twinpool {

/// SHA-256 by OpenSSL with one context that is used again and again: a digest costs no allocation and no fetch.
/// Not for use by two threads at a time; see ``local``.
class Sha256 {
 public:
  using Digest = std::array<std::uint8_t, 32>;

  Sha256();

  void digest(std::span<const std::uint8_t> message, Digest& out);

  /// This thread's own.
  static Sha256& local();

 private:
  struct FreeContext {
    void operator()(EVP_MD_CTX* context) const noexcept { EVP_MD_CTX_free(context); }
  };
  std::unique_ptr<EVP_MD_CTX, FreeContext> context_;
};

}  // namespace twinpool
