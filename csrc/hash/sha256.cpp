// SPDX-License-Identifier: Apache-2.0
#include "hash/sha256.h"

#include <new>
#include <stdexcept>

namespace twinpool {

namespace {

const EVP_MD* sha256() {
  // Fetched once: EVP_sha256() would look the provider up again in every init. Never freed, as long as the process.
  static const EVP_MD* const fetched = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  if (fetched == nullptr) {
    throw std::runtime_error("OpenSSL offers no SHA-256");
  }
  return fetched;
}

}  // namespace

Sha256::Sha256()
    : context_(EVP_MD_CTX_new()) {
  if (context_ == nullptr) {
    throw std::bad_alloc();
  }
}

void Sha256::digest(std::span<const std::uint8_t> message, Digest& out) {
  if (EVP_DigestInit_ex(context_.get(), sha256(), nullptr) != 1 ||
      EVP_DigestUpdate(context_.get(), message.data(), message.size()) != 1 ||
      EVP_DigestFinal_ex(context_.get(), out.data(), nullptr) != 1) {
    throw std::runtime_error("OpenSSL failed to compute a SHA-256");
  }
}

Sha256& Sha256::local() {
  thread_local Sha256 instance;
  return instance;
}

}  // namespace twinpool
