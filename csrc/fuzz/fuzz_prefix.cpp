// SPDX-License-Identifier: Apache-2.0
// libFuzzer target: index operations of any order against sets of blocks.
#include <array>
#include <set>
#include <string>
#include <vector>

#include "fuzz/bytes.h"
#include "placement/archive.h"
#include "prefix/prefix_index.h"

namespace {

using twinpool::fuzz::Bytes;
using twinpool::fuzz::expect;
using twinpool::prefix::HashBytes;
using twinpool::prefix::k_hash_bytes;
using twinpool::prefix::PrefixIndex;
using twinpool::prefix::PrefixLengths;
using twinpool::prefix::Tier;

constexpr std::uint32_t k_chains = 4;
constexpr std::uint32_t k_blocks = 24;
constexpr std::uint32_t k_workers = 5;

// Chains share their first blocks pairwise; block k of a chain is a mix of chain and position.
std::vector<std::uint8_t> chain(std::uint32_t which) {
  std::vector<std::uint8_t> bytes(k_blocks * k_hash_bytes);
  for (std::uint32_t i = 0; i < k_blocks; ++i) {
    std::uint64_t state = (i < 6 ? which / 2 : which) * 1000003ULL + i;
    for (std::size_t k = 0; k < k_hash_bytes; ++k) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      bytes[i * k_hash_bytes + k] = static_cast<std::uint8_t>(state >> 56U);
    }
  }
  return bytes;
}

struct Worker {
  PrefixIndex::Slot slot = 0;
  std::array<std::multiset<std::string>, 2> held;  // by tier; copies count
};

class Model {
 public:
  explicit Model(Bytes bytes)
      : bytes_(bytes) {
    for (std::uint32_t i = 0; i < k_chains; ++i) {
      chains_.push_back(chain(i));
    }
    for (Worker& worker : workers_) {
      worker.slot = index_.add_holder();
    }
  }

  void run() {
    while (!bytes_.empty()) {
      step();
      check();
    }
  }

 private:
  static std::string block(HashBytes hashes, std::size_t i) {
    const auto one = hashes.subspan(i * k_hash_bytes, k_hash_bytes);
    return {one.begin(), one.end()};
  }
  HashBytes some_blocks() {
    const HashBytes all = chains_[bytes_.below(k_chains)];
    const std::size_t first = bytes_.below(k_blocks);
    const std::size_t count = bytes_.below(k_blocks + 1 - static_cast<std::uint32_t>(first));
    return all.subspan(first * k_hash_bytes, count * k_hash_bytes);
  }
  void step() {
    Worker& worker = workers_[bytes_.below(k_workers)];
    const auto tier = static_cast<Tier>(bytes_.below(2));
    auto& held = worker.held[static_cast<std::size_t>(tier)];
    switch (bytes_.below(8)) {
    case 0:
    case 1: {
      const HashBytes hashes = some_blocks();
      const bool counted = bytes_.below(2) == 1;
      index_.store(worker.slot, hashes, tier, counted);
      for (std::size_t i = 0; i < hashes.size() / k_hash_bytes; ++i) {
        if (counted || held.count(block(hashes, i)) == 0) {
          held.insert(block(hashes, i));
        }
      }
      break;
    }
    case 2:
    case 3: {
      const HashBytes hashes = some_blocks();
      index_.remove(worker.slot, hashes, tier);
      for (std::size_t i = 0; i < hashes.size() / k_hash_bytes; ++i) {
        const auto copy = held.find(block(hashes, i));
        if (copy != held.end()) {
          held.erase(copy);
        }
      }
      break;
    }
    case 4:
      index_.drop_holder(worker.slot);
      worker = Worker{};
      worker.slot = index_.add_holder();
      break;
    case 5:
      index_.maintain(bytes_.below(40));
      break;
    case 6:
      save_and_load();
      break;
    default:
      search(chains_[bytes_.below(k_chains)]);
    }
  }
  void save_and_load() {
    std::string state;
    twinpool::Writer writer(state);
    writer(index_);
    PrefixIndex other;
    twinpool::Reader reader(state);
    reader(other);
    expect(reader.at_end(), "an archive is read to its end");
    expect(other.blocks() == index_.blocks(), "an archive holds all blocks");
    index_ = std::move(other);
  }
  void search(HashBytes prompt) {
    PrefixLengths lengths;
    index_.longest_prefix(prompt, lengths);
    for (const Worker& worker : workers_) {
      const auto holds = [&](std::size_t i) {
        return worker.held[0].contains(block(prompt, i)) || worker.held[1].contains(block(prompt, i));
      };
      std::size_t first_missing = 0;
      while (first_missing < k_blocks && holds(first_missing)) {
        ++first_missing;
      }
      bool closed = true;
      for (std::size_t i = first_missing; i < k_blocks; ++i) {
        closed = closed && !holds(i);
      }
      const std::uint32_t found = lengths.blocks[worker.slot];
      expect(found <= k_blocks && (found == 0 || holds(found - 1)), "the last block of a prefix is held");
      expect(found == 0 || holds(0), "a prefix begins at the first block");
      expect(!closed || found == first_missing, "the prefix of a closed set is exact");
    }
  }
  void check() {
    std::set<std::string> all;
    for (const Worker& worker : workers_) {
      std::size_t entries = 0;
      for (const auto& held : worker.held) {
        const std::set<std::string> distinct(held.begin(), held.end());
        entries += distinct.size();
        all.insert(distinct.begin(), distinct.end());
      }
      expect(index_.blocks_of(worker.slot) == entries, "blocks of a worker");
    }
    expect(index_.blocks() == all.size(), "blocks of all workers");
  }

  Bytes bytes_;
  PrefixIndex index_;
  std::array<Worker, k_workers> workers_;
  std::vector<std::vector<std::uint8_t>> chains_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Model(Bytes(data, size)).run();
  return 0;
}
