// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "scheduler/sequence.h"

namespace twinpool {

/// The block table that a step reads: one row a running sequence, decodes first, then prefills in the order in which
/// they are served. It lives from step to step; a new block is one store, so a plan does not copy it. Rows are padded
/// with no_block to the full width.
class RowTable {
 public:
  using Storage = std::vector<BlockId>;

  explicit RowTable(std::size_t max_rows);

  [[nodiscard]] std::size_t decodes() const noexcept { return decodes_; }
  [[nodiscard]] std::size_t rows() const noexcept { return sequences_.size(); }
  [[nodiscard]] Sequence& at(std::size_t row) const noexcept { return *sequences_[row]; }

  void add_decode(Sequence& sequence);
  /// ``row`` is at least decodes(); the prefills from there on move down.
  void add_prefill(Sequence& sequence, std::size_t row);
  /// Moves a prefill to the end of the decodes.
  void promote(Sequence& sequence);
  void remove(Sequence& sequence);

  /// The sequence has just got a new last block.
  void append(const Sequence& sequence);
  /// The sequence's block at ``index`` was replaced.
  void replace(const Sequence& sequence, std::size_t index);

  /// Row-major with ``stride`` entries a row. Stays readable while the pointer lives, even when the table grows.
  [[nodiscard]] std::shared_ptr<const Storage> storage() const noexcept { return storage_; }
  [[nodiscard]] std::size_t stride() const noexcept { return stride_; }

 private:
  void place(Sequence& sequence, std::size_t row);
  void clear_last();
  void widen(std::size_t blocks);
  [[nodiscard]] BlockId* row_data(std::size_t row) noexcept { return storage_->data() + row * stride_; }

  std::size_t max_rows_;
  std::size_t stride_ = 16;
  std::size_t decodes_ = 0;
  std::shared_ptr<Storage> storage_;
  std::vector<Sequence*> sequences_;
  std::vector<std::size_t> filled_;  ///< entries of each row that are not no_block
};

}  // namespace twinpool
