// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "hash/hash128.h"

namespace twinpool {

struct CacheEvent {
  bool stored = false;          ///< else removed
  Hash128 parent;               ///< of the first hash; only when stored
  std::vector<Hash128> hashes;  ///< when stored, each is the parent of the next
};

/// What happened to the cache since the last drain, in order. A reader that never drains costs bounded memory: the
/// owner compacts the log when it is ``crowded``, which keeps the net effect.
class CacheEvents {
 public:
  explicit CacheEvents(std::size_t num_blocks)
      : crowded_hashes_(4 * num_blocks + 1024) {}

  /// Rises with each drain; something published in an earlier epoch has been told to the reader.
  [[nodiscard]] std::uint32_t epoch() const noexcept { return epoch_; }
  [[nodiscard]] bool crowded() const noexcept { return hashes_.size() >= crowded_hashes_; }

  void stored(const Hash128& hash, const Hash128& parent);
  /// ``announced``: the reader has been told that it was stored.
  void removed(const Hash128& hash, bool announced);

  std::vector<CacheEvent> drain();

  /// Keeps of the log what ``keep_stored(hash)`` and ``keep_removed(hash)`` say; they are asked in order. A removal
  /// that the reader need not hear, because it never heard of the store, is dropped unasked.
  template <typename KeepStored, typename KeepRemoved>
  void compact(KeepStored&& keep_stored, KeepRemoved&& keep_removed) {
    CacheEvents kept(0);
    std::size_t at = 0;
    for (const Run& run : runs_) {
      Hash128 parent = run.parent;
      for (const std::size_t end = at + run.count; at < end; ++at) {
        if (run.kind == Kind::stored) {
          if (keep_stored(hashes_[at])) {
            kept.stored(hashes_[at], parent);
          }
          parent = hashes_[at];
        } else if (run.kind == Kind::removed_announced && keep_removed(hashes_[at])) {
          kept.removed(hashes_[at], true);
        }
      }
    }
    runs_.swap(kept.runs_);
    hashes_.swap(kept.hashes_);
  }

 private:
  enum class Kind : std::uint8_t { stored, removed_announced, removed_untold };
  struct Run {
    Kind kind;
    Hash128 parent;
    std::size_t count;
  };

  std::size_t crowded_hashes_;
  std::uint32_t epoch_ = 1;
  std::vector<Run> runs_;
  std::vector<Hash128> hashes_;
};

}  // namespace twinpool
