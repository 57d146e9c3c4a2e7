// SPDX-License-Identifier: Apache-2.0
#include "hash/digest.h"

#include <bit>
#include <cstring>

namespace twinpool {

namespace {

static_assert(std::endian::native == std::endian::little, "words are read in place as little-endian");

constexpr std::uint64_t golden = 0x9E3779B97F4A7C15ULL;
constexpr std::size_t word_bytes = 8;

constexpr std::uint64_t mix(std::uint64_t value) noexcept {
  value = (value ^ (value >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27U)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31U);
}

}  // namespace

std::uint64_t digest64(std::span<const std::uint8_t> data) noexcept {
  std::uint64_t sum = mix(data.size());
  std::uint64_t key = golden;
  const std::uint8_t* at = data.data();
  for (std::size_t words = data.size() / word_bytes; words > 0; --words, at += word_bytes, key += golden) {
    std::uint64_t word = 0;
    std::memcpy(&word, at, word_bytes);
    sum += mix(word + key);
  }
  if (const std::size_t tail = data.size() % word_bytes; tail > 0) {
    std::uint64_t word = 0;
    std::memcpy(&word, at, tail);
    sum += mix(word + key);
  }
  return sum;
}

}  // namespace twinpool
