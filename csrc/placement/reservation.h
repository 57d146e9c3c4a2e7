// SPDX-License-Identifier: Apache-2.0
// What an attempt holds on workers. Each is move-only, gives back on destruction what it still holds, and does
// nothing if its worker was removed meanwhile: the epoch no longer matches.
#pragma once

#include <cstdint>
#include <utility>

#include "placement/worker.h"

namespace twinpool::placement {

class WorkerTable;

/// The common part: a worker, and the promise that the destructor of ``Derived`` gives back at most once. Only
/// ``Derived`` may construct it: the cast in the assignment rests on that.
template <typename Derived>
class Reservation {
 public:
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  Reservation& operator=(Reservation&& other) noexcept {
    if (this != &other) {
      static_cast<Derived*>(this)->reset();
      table_ = std::exchange(other.table_, nullptr);
      ref_ = other.ref_;
      read_ = std::exchange(other.read_, false);
    }
    return *this;
  }

  [[nodiscard]] WorkerRef worker() const noexcept { return ref_; }

  /// After an archive was read: the table holds what the reservation says already.
  void attach(WorkerTable& table) noexcept { table_ = std::exchange(read_, false) ? &table : nullptr; }

 private:
  friend Derived;
  Reservation() = default;
  Reservation(Reservation&& other) noexcept
      : table_(std::exchange(other.table_, nullptr)),
        ref_(other.ref_),
        read_(std::exchange(other.read_, false)) {}
  ~Reservation() = default;

  template <typename A>
  void archive_base(A& a) {
    // NOLINTNEXTLINE(misc-const-correctness): a Reader writes it
    bool held = table_ != nullptr;
    a(held, ref_);
    if constexpr (A::reading) {
      read_ = held;
    }
  }

  WorkerTable* table_ = nullptr;
  WorkerRef ref_;
  bool read_ = false;  // from an archive, and not attached yet
};

/// Uncached prompt tokens in a prefill worker's window, and the blocks of the prompt.
class PrefillWork : public Reservation<PrefillWork> {
 public:
  PrefillWork() = default;
  PrefillWork(WorkerTable& table, WorkerRef worker, std::int64_t tokens, std::int64_t blocks);
  PrefillWork(const PrefillWork&) = delete;
  PrefillWork& operator=(const PrefillWork&) = delete;
  PrefillWork(PrefillWork&&) noexcept = default;
  PrefillWork& operator=(PrefillWork&& other) noexcept;
  ~PrefillWork() { reset(); }
  void reset() noexcept;
  template <typename A>
  void archive(A& a) {
    this->archive_base(a);
    a(tokens_, blocks_, reports_);
  }

 private:
  std::int64_t tokens_ = 0;
  std::int64_t blocks_ = 0;
  std::uint32_t reports_ = 0;
};

/// One hand-off in a decode worker's transfer window.
class TransferSlot : public Reservation<TransferSlot> {
 public:
  TransferSlot() = default;
  TransferSlot(WorkerTable& table, WorkerRef worker, std::int64_t blocks);
  TransferSlot(const TransferSlot&) = delete;
  TransferSlot& operator=(const TransferSlot&) = delete;
  TransferSlot(TransferSlot&&) noexcept = default;
  TransferSlot& operator=(TransferSlot&& other) noexcept;
  ~TransferSlot() { reset(); }
  void reset() noexcept;
  template <typename A>
  void archive(A& a) {
    this->archive_base(a);
    a(blocks_);
  }

 private:
  std::int64_t blocks_ = 0;
};

/// Blocks and sequence slots of a decode worker: the prompt's blocks, and growth for the expected output.
class DecodeBlocks : public Reservation<DecodeBlocks> {
 public:
  DecodeBlocks() = default;
  DecodeBlocks(WorkerTable& table, WorkerRef worker, std::int64_t prompt_blocks, std::int64_t growth_blocks,
               std::int64_t sequences);
  DecodeBlocks(const DecodeBlocks&) = delete;
  DecodeBlocks& operator=(const DecodeBlocks&) = delete;
  DecodeBlocks(DecodeBlocks&&) noexcept = default;
  DecodeBlocks& operator=(DecodeBlocks&& other) noexcept;
  ~DecodeBlocks() { reset(); }
  void reset() noexcept;
  template <typename A>
  void archive(A& a) {
    this->archive_base(a);
    a(prompt_blocks_, growth_blocks_, sequences_, acknowledged_, reports_);
  }

  /// The worker holds the prompt's blocks: its next report contains them.
  void acknowledge() noexcept;
  /// The output has grown by so many blocks: they are no longer expected but there.
  void grow(std::int64_t blocks) noexcept;

 private:
  std::int64_t prompt_blocks_ = 0;
  std::int64_t growth_blocks_ = 0;
  std::int64_t sequences_ = 0;
  bool acknowledged_ = false;
  std::uint32_t reports_ = 0;  // of the worker, when it acknowledged
};

}  // namespace twinpool::placement
