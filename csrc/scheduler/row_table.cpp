// SPDX-License-Identifier: Apache-2.0
#include "scheduler/row_table.h"

#include <algorithm>

namespace twinpool {

RowTable::RowTable(std::size_t max_rows)
    : max_rows_(max_rows),
      storage_(std::make_shared<Storage>(max_rows * stride_, no_block)),
      filled_(max_rows) {
  sequences_.reserve(max_rows);
}

void RowTable::add_decode(Sequence& sequence) {
  add_prefill(sequence, decodes_);
  ++decodes_;
}

void RowTable::add_prefill(Sequence& sequence, std::size_t row) {
  sequences_.push_back(nullptr);
  for (std::size_t below = sequences_.size() - 1; below > row; --below) {
    place(*sequences_[below - 1], below);
  }
  place(sequence, row);
}

void RowTable::promote(Sequence& sequence) {
  for (std::size_t row = sequence.row; row > decodes_; --row) {
    place(*sequences_[row - 1], row);
  }
  place(sequence, decodes_++);
}

void RowTable::remove(Sequence& sequence) {
  std::size_t hole = sequence.row;
  if (hole < decodes_) {
    // The order among decodes is free, so the last one fills the hole; the order among prefills is not.
    --decodes_;
    if (hole != decodes_) {
      place(*sequences_[decodes_], hole);
    }
    hole = decodes_;
  }
  for (; hole + 1 < sequences_.size(); ++hole) {
    place(*sequences_[hole + 1], hole);
  }
  clear_last();
}

void RowTable::append(const Sequence& sequence) {
  if (sequence.blocks.size() > stride_) {
    widen(sequence.blocks.size());
  }
  row_data(sequence.row)[filled_[sequence.row]++] = sequence.blocks.back();
}

void RowTable::replace(const Sequence& sequence, std::size_t index) {
  row_data(sequence.row)[index] = sequence.blocks[index];
}

void RowTable::place(Sequence& sequence, std::size_t row) {
  const std::size_t count = sequence.blocks.size();
  if (count > stride_) {
    widen(count);
  }
  BlockId* data = row_data(row);
  std::ranges::copy(sequence.blocks, data);
  if (filled_[row] > count) {
    std::fill(data + count, data + filled_[row], no_block);
  }
  filled_[row] = count;
  sequences_[row] = &sequence;
  sequence.row = row;
}

void RowTable::clear_last() {
  const std::size_t row = sequences_.size() - 1;
  std::fill_n(row_data(row), filled_[row], no_block);
  filled_[row] = 0;
  sequences_.pop_back();
}

void RowTable::widen(std::size_t blocks) {
  const std::size_t stride = std::max(blocks, 2 * stride_);
  // A new buffer: whoever still reads the old one through storage() keeps it as it was.
  auto wider = std::make_shared<Storage>(max_rows_ * stride, no_block);
  for (std::size_t row = 0; row < sequences_.size(); ++row) {
    std::copy_n(row_data(row), filled_[row], wider->data() + row * stride);
  }
  storage_ = std::move(wider);
  stride_ = stride;
}

}  // namespace twinpool
