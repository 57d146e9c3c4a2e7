// SPDX-License-Identifier: Apache-2.0
// XXH64 as its specification describes it (github.com/Cyan4973/xxHash, doc/xxhash_spec.md).
#include "hash/digest.h"

#include <array>
#include <bit>
#include <cstring>

namespace twinpool {

namespace {

static_assert(std::endian::native == std::endian::little, "lanes are read in place as little-endian");

constexpr std::uint64_t prime1 = 0x9E3779B185EBCA87ULL;
constexpr std::uint64_t prime2 = 0xC2B2AE3D27D4EB4FULL;
constexpr std::uint64_t prime3 = 0x165667B19E3779F9ULL;
constexpr std::uint64_t prime4 = 0x85EBCA77C2B2AE63ULL;
constexpr std::uint64_t prime5 = 0x27D4EB2F165667C5ULL;
constexpr std::size_t stripe_bytes = 32;

template <typename Word>
Word read(const std::uint8_t* at) noexcept {
  Word word = 0;
  std::memcpy(&word, at, sizeof word);
  return word;
}

std::uint64_t mix_lane(std::uint64_t accumulator, std::uint64_t lane) noexcept {
  return std::rotl(accumulator + lane * prime2, 31) * prime1;
}

std::uint64_t merge_lane(std::uint64_t accumulator, std::uint64_t lane) noexcept {
  return (accumulator ^ mix_lane(0, lane)) * prime1 + prime4;
}

/// Consumes all whole stripes; ``at`` ends behind the last.
std::uint64_t mix_stripes(const std::uint8_t*& at, std::size_t stripes, std::uint64_t seed) noexcept {
  std::array<std::uint64_t, 4> lanes = {seed + prime1 + prime2, seed + prime2, seed, seed - prime1};
  for (; stripes > 0; --stripes, at += stripe_bytes) {
    for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
      lanes[lane] = mix_lane(lanes[lane], read<std::uint64_t>(at + 8 * lane));
    }
  }
  std::uint64_t hash =
      std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) + std::rotl(lanes[3], 18);
  for (const std::uint64_t lane : lanes) {
    hash = merge_lane(hash, lane);
  }
  return hash;
}

}  // namespace

std::uint64_t xxh64(std::span<const std::uint8_t> data, std::uint64_t seed) noexcept {
  const std::uint8_t* at = data.data();
  std::size_t left = data.size();
  std::uint64_t hash = seed + prime5;
  if (left >= stripe_bytes) {
    hash = mix_stripes(at, left / stripe_bytes, seed);
    left %= stripe_bytes;
  }
  hash += data.size();
  for (; left >= 8; left -= 8, at += 8) {
    hash = std::rotl(hash ^ mix_lane(0, read<std::uint64_t>(at)), 27) * prime1 + prime4;
  }
  if (left >= 4) {
    hash = std::rotl(hash ^ read<std::uint32_t>(at) * prime1, 23) * prime2 + prime3;
    left -= 4;
    at += 4;
  }
  for (; left > 0; --left, ++at) {
    hash = std::rotl(hash ^ *at * prime5, 11) * prime1;
  }
  hash = (hash ^ (hash >> 33U)) * prime2;
  hash = (hash ^ (hash >> 29U)) * prime3;
  return hash ^ (hash >> 32U);
}

}  // namespace twinpool
