// SPDX-License-Identifier: Apache-2.0
#define OPENSSL_SUPPRESS_DEPRECATED
#include "hash/sha256.h"

#include <openssl/evp.h>
#ifdef TWINPOOL_SHA256_LOW_LEVEL
#include <openssl/sha.h>
#endif

#include <memory>
#include <new>
#include <stdexcept>

namespace twinpool {

namespace {

constexpr std::size_t chunk_bytes = 64;
constexpr std::size_t length_bytes = 8;

struct FreeContext {
  void operator()(EVP_MD_CTX* context) const noexcept { EVP_MD_CTX_free(context); }
};

const EVP_MD* fetched_sha256() {
  // Fetched once: EVP_sha256() would look the provider up in every init. Never freed, as long as the process.
  static const EVP_MD* const fetched = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  if (fetched == nullptr) {
    throw std::runtime_error("OpenSSL offers no SHA-256");
  }
  return fetched;
}

EVP_MD_CTX* local_context() {
  thread_local const std::unique_ptr<EVP_MD_CTX, FreeContext> context(EVP_MD_CTX_new());
  if (context == nullptr) {
    throw std::bad_alloc();
  }
  return context.get();
}

}  // namespace

Hash128 sha256_128(std::span<const std::uint8_t> message) {
  EVP_MD_CTX* const context = local_context();
  std::array<std::uint8_t, 32> digest{};
  if (EVP_DigestInit_ex(context, fetched_sha256(), nullptr) != 1 ||
      EVP_DigestUpdate(context, message.data(), message.size()) != 1 ||
      EVP_DigestFinal_ex(context, digest.data(), nullptr) != 1) {
    throw std::runtime_error("OpenSSL failed to compute a SHA-256");
  }
  return Hash128::from_bytes(digest.data());
}

Sha256Message::Sha256Message(std::size_t length)
    : length_(length),
      padded_((length + 1 + length_bytes + chunk_bytes - 1) / chunk_bytes * chunk_bytes) {
  if (padded_ > inline_.size()) {
    heap_.resize(padded_);
    data_ = heap_.data();
  }
  // FIPS 180-4, section 5.1.1: a one bit, zeros, and the length in bits, most significant byte first.
  data_[length_] = 0x80;
  const std::uint64_t bits = std::uint64_t{8} * length_;
  for (std::size_t i = 0; i < length_bytes; ++i) {
    data_[padded_ - 1 - i] = static_cast<std::uint8_t>(bits >> (8 * i));
  }
}

Hash128 Sha256Message::digest() const {
#ifdef TWINPOOL_SHA256_LOW_LEVEL
  SHA256_CTX state;
  SHA256_Init(&state);
  SHA256_Update(&state, data_, padded_);  // whole chunks: compressed at once, nothing is buffered
  Hash128 hash;
  for (std::size_t i = 0; i < Hash128::size; ++i) {
    hash.bytes[i] = static_cast<std::uint8_t>(state.h[i / 4] >> (24 - 8 * (i % 4)));
  }
  return hash;
#else
  return sha256_128({data_, length_});
#endif
}

}  // namespace twinpool
