// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "hash/block_hash.h"
#include "hash/digest.h"
#include "hash/sha256.h"
#include "tests/json.h"

namespace twinpool::test {
namespace {

using Bytes = std::vector<std::uint8_t>;

const Json& golden() {
  static const Json vectors = JsonReader::file(std::string(TWINPOOL_SOURCE_DIR) + "/tests/unit/core/golden_hash.json");
  return vectors;
}

Bytes unhex(const std::string& text) {
  Bytes bytes;
  for (std::size_t i = 0; i < text.size(); i += 2) {
    bytes.push_back(static_cast<std::uint8_t>(std::stoi(text.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

std::vector<std::int32_t> tokens_of(const Json& json) {
  std::vector<std::int32_t> tokens;
  for (const Json& token : json.array()) {
    tokens.push_back(static_cast<std::int32_t>(token.integer()));
  }
  return tokens;
}

Hash128 root_of(const std::string& fingerprint, std::optional<std::string> salt, std::optional<std::string> adapter) {
  const auto bytes = [](const std::string& text) { return Bytes(text.begin(), text.end()); };
  const Bytes first = bytes(fingerprint);
  const Bytes second = bytes(salt.value_or(""));
  const Bytes third = bytes(adapter.value_or(""));
  Namespace fields{.fingerprint = first, .tenant_salt = {}, .adapter = {}};
  if (salt) {
    fields.tenant_salt = second;
  }
  if (adapter) {
    fields.adapter = third;
  }
  return root_hash(fields);
}

TEST(Hash, RootsEqualTheGoldenVectors) {
  ASSERT_GE(golden()["roots"].array().size(), 10U);
  for (const Json& vector : golden()["roots"].array()) {
    const Bytes fingerprint = unhex(vector["fingerprint"].text());
    const Json& salt = vector["tenant_salt"];
    const Json& adapter = vector["adapter"];
    const Bytes salt_bytes = salt.null() ? Bytes() : unhex(salt.text());
    const Bytes adapter_bytes = adapter.null() ? Bytes() : unhex(adapter.text());
    Namespace fields{.fingerprint = fingerprint, .tenant_salt = {}, .adapter = {}};
    if (!salt.null()) {
      fields.tenant_salt = salt_bytes;
    }
    if (!adapter.null()) {
      fields.adapter = adapter_bytes;
    }
    EXPECT_EQ(root_hash(fields).hex(), vector["hash"].text());
  }
}

TEST(Hash, ChainsEqualTheGoldenVectors) {
  ASSERT_GE(golden()["chains"].array().size(), 20U);
  for (const Json& vector : golden()["chains"].array()) {
    const Bytes parent = unhex(vector["parent"].text());
    std::vector<Hash128> hashes;
    hash_blocks(Hash128::from_bytes(parent.data()), tokens_of(vector["tokens"]),
                static_cast<std::size_t>(vector["block_tokens"].integer()), hashes);
    const auto& wanted = vector["hashes"].array();
    ASSERT_EQ(hashes.size(), wanted.size());
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      EXPECT_EQ(hashes[i].hex(), wanted[i].text());
    }
  }
}

TEST(Hash, DigestsEqualTheGoldenVectors) {
  ASSERT_GE(golden()["digests"].array().size(), 10U);
  for (const Json& vector : golden()["digests"].array()) {
    EXPECT_EQ(digest64(unhex(vector["data"].text())), std::stoull(vector["digest"].text(), nullptr, 16));
  }
}

TEST(Hash, FieldsOfANamespaceNeverMix) {
  const std::vector<Hash128> roots = {
      root_of("m", {}, {}),   root_of("m", "", {}),   root_of("m", {}, ""),  root_of("m", "", ""),
      root_of("m", "x", {}),  root_of("m", {}, "x"),  root_of("m", "x", ""), root_of("m", "", "x"),
      root_of("m", "xy", ""), root_of("m", "x", "y"), root_of("mx", "", ""), root_of("mx", "y", ""),
  };
  for (std::size_t a = 0; a < roots.size(); ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      EXPECT_FALSE(roots[a] == roots[b]) << a << " and " << b;
    }
  }
}

TEST(Hash, ABlockDependsOnEveryTokenAndOnItsParent) {
  std::vector<std::int32_t> tokens(64, 7);
  const Hash128 root = root_of("m", {}, {});
  const Hash128 plain = block_hash(root, tokens);
  EXPECT_FALSE(block_hash(plain, tokens) == plain);
  for (auto& token : tokens) {
    token ^= 1 << 20;
    EXPECT_FALSE(block_hash(root, tokens) == plain);
    token ^= 1 << 20;
  }
  EXPECT_EQ(block_hash(root, tokens), plain);
}

TEST(Hash, ChainingByPartsIsTheSameAsAtOnce) {
  std::vector<std::int32_t> tokens(5 * 16);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<std::int32_t>(i * i);
  }
  const Hash128 root = root_of("m", "s", "a");
  std::vector<Hash128> whole;
  hash_blocks(root, tokens, 16, whole);
  std::vector<Hash128> parts;
  hash_blocks(root, std::span(tokens).first(32), 16, parts);
  hash_blocks(parts.back(), std::span(tokens).subspan(32), 16, parts);
  EXPECT_EQ(whole, parts);
}

TEST(Hash, AMessageOfFixedLengthHashesAsAnyOther) {
  for (std::size_t length = 0; length < 700; ++length) {
    Sha256Message message(length);
    Bytes plain(length);
    for (std::size_t i = 0; i < length; ++i) {
      message.data()[i] = plain[i] = static_cast<std::uint8_t>(i * 7 + length);
    }
    ASSERT_EQ(message.digest(), sha256_128(plain)) << length;
    ASSERT_EQ(message.digest(), sha256_128(plain)) << "and again";
  }
}

TEST(Hash, BlockTokensOfZeroIsRefused) {
  std::vector<Hash128> hashes;
  EXPECT_THROW(hash_blocks({}, {}, 0, hashes), CoreError);
}

TEST(Hash, ThreadsHashIndependently) {
  const std::vector<std::int32_t> tokens(64 * 50, 3);
  std::vector<Hash128> wanted;
  hash_blocks({}, tokens, 64, wanted);
  std::vector<std::vector<Hash128>> results(4);
  std::vector<std::jthread> threads;
  for (auto& result : results) {
    threads.emplace_back([&result, &tokens] { hash_blocks({}, tokens, 64, result); });
  }
  threads.clear();
  for (const auto& result : results) {
    EXPECT_EQ(result, wanted);
  }
}

}  // namespace
}  // namespace twinpool::test
