// SPDX-License-Identifier: Apache-2.0
#include "blocks/transfer_pins.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace twinpool {

void TransferPins::check(std::uint64_t transfer, std::int64_t readers, double expires_at) const {
  require(!std::isnan(expires_at), "a lease must end at a number");
  require(readers >= 1, "a transfer must expect at least one reader");
  const auto at = transfers_.find(transfer);
  require(at == transfers_.end() || at->second.readers == readers, [&] {
    return "transfer " + std::to_string(transfer) + " expects " + std::to_string(at->second.readers) +
           " readers; a later pin must not say " + std::to_string(readers);
  });
}

void TransferPins::add(std::uint64_t transfer, std::span<const BlockId> blocks, std::int64_t readers,
                       double expires_at) {
  const auto [at, fresh] = transfers_.try_emplace(transfer);
  Transfer& entry = at->second;
  entry.blocks.insert(entry.blocks.end(), blocks.begin(), blocks.end());
  if (fresh) {
    entry.readers = readers;
    entry.expires_at = expires_at;
    by_expiry_.emplace(expires_at, transfer);
  } else {
    prolong(transfer, entry, expires_at);
  }
}

bool TransferPins::renew(std::uint64_t transfer, double expires_at) {
  require(!std::isnan(expires_at), "a lease must end at a number");
  const auto at = transfers_.find(transfer);
  if (at == transfers_.end()) {
    return false;
  }
  prolong(transfer, at->second, expires_at);
  return true;
}

TransferPins::Release TransferPins::finish(std::uint64_t transfer, std::int64_t reader) {
  const auto at = transfers_.find(transfer);
  if (at == transfers_.end()) {
    return {};
  }
  auto& finished = at->second.finished;
  if (std::ranges::find(finished, reader) == finished.end()) {
    finished.push_back(reader);
  }
  if (static_cast<std::int64_t>(finished.size()) < at->second.readers) {
    return {.known = true, .ended = {}};
  }
  return {.known = true, .ended = take(at)};
}

std::vector<TransferPins::Ended> TransferPins::expire(double now) {
  std::vector<Ended> ended;
  while (!by_expiry_.empty() && by_expiry_.begin()->first <= now) {
    ended.push_back(take(transfers_.find(by_expiry_.begin()->second)));
  }
  return ended;
}

bool TransferPins::consistent() const {
  return by_expiry_.size() == transfers_.size() && std::ranges::all_of(by_expiry_, [this](const auto& entry) {
           const auto at = transfers_.find(entry.second);
           return at != transfers_.end() && at->second.expires_at == entry.first;
         });
}

void TransferPins::prolong(std::uint64_t id, Transfer& transfer, double expires_at) {
  if (expires_at <= transfer.expires_at) {
    return;
  }
  by_expiry_.erase({transfer.expires_at, id});
  transfer.expires_at = expires_at;
  by_expiry_.emplace(expires_at, id);
}

TransferPins::Ended TransferPins::take(Table::iterator at) {
  Ended ended{.transfer = at->first, .blocks = std::move(at->second.blocks)};
  by_expiry_.erase({at->second.expires_at, at->first});
  transfers_.erase(at);
  return ended;
}

}  // namespace twinpool
