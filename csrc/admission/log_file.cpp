// SPDX-License-Identifier: Apache-2.0
// The outer form of a log: a mark, a checksum, and the bytes, compressed where zstd is built in.
#include <algorithm>

#include "admission/recorder.h"

#ifdef TWINPOOL_ZSTD
#include <zstd.h>
#endif

namespace twinpool::admission {

namespace {

constexpr std::uint64_t k_mark = 0x32474F4C50'54ULL;  // "TPLOG2" in memory
enum class Codec : std::uint8_t { none, zstd };

// FNV-1a over words: finds damage, and is not meant to withstand an attacker.
std::uint64_t checksum(std::span<const char> bytes) {
  std::uint64_t sum = 0xCBF29CE484222325ULL ^ bytes.size();
  for (std::size_t i = 0; i < bytes.size(); i += 8) {
    std::uint64_t word = 0;
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(i), std::min<std::size_t>(8, bytes.size() - i),
                reinterpret_cast<char*>(&word));
    sum = (sum ^ word) * 0x100000001B3ULL;
    sum ^= sum >> 32U;
  }
  return sum;
}

}  // namespace

std::string pack_log(const std::string& raw) {
  std::string packed;
  Writer writer(packed);
  writer(k_mark, checksum(raw), static_cast<std::uint64_t>(raw.size()));
#ifdef TWINPOOL_ZSTD
  std::string body(ZSTD_compressBound(raw.size()), '\0');
  const std::size_t size = ZSTD_compress(body.data(), body.size(), raw.data(), raw.size(), 3);
  if (ZSTD_isError(size) == 0) {
    body.resize(size);
    writer(Codec::zstd);
    return packed + body;
  }
#endif
  writer(Codec::none);
  return packed + raw;
}

std::string unpack_log(std::span<const char> packed) {
  Reader reader(packed);
  std::uint64_t mark = 0;
  std::uint64_t sum = 0;
  std::uint64_t size = 0;
  Codec codec{};
  require(packed.size() >= 25, "log: too short");
  reader(mark, sum, size, codec);
  require(mark == k_mark, "log: not a log of a router core");
  const auto body = packed.last(reader.left());
  std::string raw;
  if (codec == Codec::none) {
    raw.assign(body.data(), body.size());
  } else {
#ifdef TWINPOOL_ZSTD
    const auto declared = ZSTD_getFrameContentSize(body.data(), body.size());
    require(codec == Codec::zstd && declared == size, "log: damaged");
    raw.resize(size);
    const std::size_t got = ZSTD_decompress(raw.data(), raw.size(), body.data(), body.size());
    require(ZSTD_isError(got) == 0 && got == size, "log: damaged");
#else
    throw CoreError("log: compressed, and this build has no zstd");
#endif
  }
  require(raw.size() == size && checksum(raw) == sum, "log: damaged");
  return raw;
}

}  // namespace twinpool::admission
