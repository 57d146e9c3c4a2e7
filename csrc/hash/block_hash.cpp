// SPDX-License-Identifier: Apache-2.0
#include "hash/block_hash.h"

#include <algorithm>
#include <bit>
#include <string_view>

#include "core/error.h"
#include "hash/sha256.h"

namespace twinpool {

namespace {

static_assert(std::endian::native == std::endian::little, "tokens are hashed in place as little-endian");

constexpr std::string_view root_tag = "tp.root1";
constexpr std::string_view block_tag = "tp.blk.1";
constexpr std::size_t head_bytes = block_tag.size() + Hash128::size;

enum class Field : std::uint8_t { fingerprint = 1, tenant_salt = 2, adapter = 3 };

void append_field(std::vector<std::uint8_t>& message, Field field, std::span<const std::uint8_t> value) {
  message.push_back(static_cast<std::uint8_t>(field));
  for (unsigned shift = 0; shift < 64; shift += 8) {
    message.push_back(static_cast<std::uint8_t>(value.size() >> shift));
  }
  message.insert(message.end(), value.begin(), value.end());
}

/// The message of one block; each block overwrites parent and tokens.
class BlockMessage {
 public:
  explicit BlockMessage(std::size_t block_tokens)
      : token_bytes_(block_tokens * sizeof(std::int32_t)),
        message_(head_bytes + token_bytes_) {
    std::memcpy(message_.data(), block_tag.data(), block_tag.size());
  }

  Hash128 digest(const Hash128& parent, const std::int32_t* tokens) {
    std::memcpy(message_.data() + block_tag.size(), parent.bytes.data(), Hash128::size);
    std::memcpy(message_.data() + head_bytes, tokens, token_bytes_);
    return message_.digest();
  }

 private:
  std::size_t token_bytes_;
  Sha256Message message_;
};

}  // namespace

std::string Hash128::hex() const {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string text;
  text.reserve(2 * size);
  for (const std::uint8_t byte : bytes) {
    text.push_back(digits[byte >> 4U]);
    text.push_back(digits[byte & 15U]);
  }
  return text;
}

Hash128 root_hash(const Namespace& fields) {
  std::vector<std::uint8_t> message(root_tag.begin(), root_tag.end());
  append_field(message, Field::fingerprint, fields.fingerprint);
  if (fields.tenant_salt) {
    append_field(message, Field::tenant_salt, *fields.tenant_salt);
  }
  if (fields.adapter) {
    append_field(message, Field::adapter, *fields.adapter);
  }
  return sha256_128(message);
}

Hash128 block_hash(const Hash128& parent, std::span<const std::int32_t> tokens) {
  return BlockMessage(tokens.size()).digest(parent, tokens.data());
}

void hash_blocks(Hash128 parent, std::span<const std::int32_t> tokens, std::size_t block_tokens,
                 std::vector<Hash128>& out) {
  require(block_tokens > 0, "block_tokens must be at least 1");
  const std::size_t count = tokens.size() / block_tokens;
  if (out.empty()) {
    out.reserve(count);  // else it grows by itself: an exact reserve for every block would copy it every time
  }
  BlockMessage message(block_tokens);
  for (std::size_t i = 0; i < count; ++i) {
    parent = message.digest(parent, tokens.data() + i * block_tokens);
    out.push_back(parent);
  }
}

}  // namespace twinpool
