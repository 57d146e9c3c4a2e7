// SPDX-License-Identifier: Apache-2.0
// The waiting requests of one pool: bands by priority, virtual-token fairness between the tenants of a band, earliest
// deadline first within a tenant.
//
// A *line* is what one tenant has waiting in one band. Ageing works on lines: one that has not been served for
// ``ageing_seconds`` competes one band higher, and again after as long; once served it is back in its own band. So no
// line starves, a low priority stays a low priority, and a long backlog gives its tenant no advantage over others: a
// line that gets its share never ages, however long its requests wait.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "admission/tenants.h"

namespace twinpool::admission {

struct QueueItem {
  std::uint64_t request = 0;
  std::uint64_t sequence = 0;  // order of arrival
  TenantId tenant = 0;
  double weight = 1.0;
  int priority = 0;
  double due = 0.0;   // deadline, or a stand-in for none
  double cost = 0.0;  // tokens that count against the tenant's share
  std::int64_t tokens = 0;
  std::int64_t bytes = 0;
  bool front = false;  // was placed before: next of its line
  template <typename A>
  void archive(A& a) {
    a(request, sequence, tenant, weight, priority, due, cost, tokens, bytes, front);
  }
};

class QueuePlace;

class FairQueue {
 public:
  enum class Verdict : std::uint8_t { skip, take, stop };

  static constexpr int k_highest_priority = 100;

  explicit FairQueue(double ageing_seconds)
      : ageing_seconds_(ageing_seconds) {}
  FairQueue(const FairQueue&) = delete;
  FairQueue& operator=(const FairQueue&) = delete;
  ~FairQueue() = default;

  QueuePlace push(double now, const QueueItem& item);
  /// Lifts the lines that were not served for long enough.
  void age(double now);
  /// From now on lines rise after that time; none waits longer than it for its next step.
  void set_ageing(double now, double seconds);

  /// Visits candidates of the highest band in order: lines by virtual time, the first ``k_depth`` requests of each.
  /// Returns the request that the visitor takes and charges its line; 0 if it takes none. The visitor must not change
  /// the queue; the caller ends the taken request's place afterwards.
  template <typename Visit>
  std::uint64_t next(double now, Visit&& visit);

  /// Gives back what a placement that did not come about was charged with.
  void refund(int priority, TenantId tenant, double charged);

  template <typename A>
  void archive(A& a) {
    a(bands_, lines_, items_, promotions_, tokens_, bytes_, idle_since_collection_);
  }
  [[nodiscard]] std::size_t requests() const noexcept { return items_.size(); }
  [[nodiscard]] std::int64_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }
  /// Prompt tokens in bands of at least ``priority``.
  [[nodiscard]] std::int64_t tokens_ahead(int priority) const noexcept;

 private:
  friend class QueuePlace;
  static constexpr int k_depth = 2;

  struct Key {
    bool later = false;  // not ``front``
    double due = 0.0;
    std::uint64_t sequence = 0;
    std::uint64_t request = 0;
    auto operator<=>(const Key&) const = default;
    template <typename A>
    void archive(A& a) {
      a(later, due, sequence, request);
    }
  };
  using LineId = std::pair<int, TenantId>;  // priority, tenant
  struct Line {
    double virtual_time = 0.0;
    int level = 0;            // the band that it competes in
    double tag = 0.0;         // its virtual time there
    double promote_at = 0.0;  // when it rises
    std::set<Key> waiting;
    template <typename A>
    void archive(A& a) {
      a(virtual_time, level, tag, promote_at, waiting);
    }
  };
  struct Band {
    double virtual_time = 0.0;                           // start of the line served last
    std::int64_t tokens = 0;                             // of its own lines
    std::size_t lines = 0;                               // own lines with requests, wherever they compete
    std::set<std::tuple<double, int, TenantId>> active;  // lines that compete here
    template <typename A>
    void archive(A& a) {
      a(virtual_time, tokens, lines, active);
    }
  };

  static Key key(const QueueItem& item) noexcept { return {!item.front, item.due, item.sequence, item.request}; }
  void compete(LineId id, Line& line, int level);
  void withdraw(LineId id, const Line& line);
  void charge(double now, const QueueItem& item);
  void erase(std::uint64_t request);
  void collect(int priority, Band& band);

  double ageing_seconds_;
  std::map<int, Band, std::greater<>> bands_;
  std::map<LineId, Line> lines_;
  std::unordered_map<std::uint64_t, QueueItem> items_;
  std::set<std::pair<double, LineId>> promotions_;
  std::int64_t tokens_ = 0;
  std::int64_t bytes_ = 0;
  int idle_since_collection_ = 0;
};

/// A request's place in a queue. Move-only; leaves the queue on destruction.
class QueuePlace {
 public:
  QueuePlace() = default;
  QueuePlace(const QueuePlace&) = delete;
  QueuePlace& operator=(const QueuePlace&) = delete;
  QueuePlace(QueuePlace&& other) noexcept
      : queue_(std::exchange(other.queue_, nullptr)),
        request_(other.request_),
        read_(std::exchange(other.read_, false)) {}
  QueuePlace& operator=(QueuePlace&& other) noexcept {
    if (this != &other) {
      reset();
      queue_ = std::exchange(other.queue_, nullptr);
      request_ = other.request_;
      read_ = std::exchange(other.read_, false);
    }
    return *this;
  }
  ~QueuePlace() { reset(); }
  template <typename A>
  void archive(A& a) {
    // NOLINTNEXTLINE(misc-const-correctness): a Reader writes it
    bool held = queue_ != nullptr;
    a(held, request_);
    if constexpr (A::reading) {
      read_ = held;
    }
  }
  /// After an archive was read: the queue has its item already.
  void attach(FairQueue& queue) noexcept { queue_ = std::exchange(read_, false) ? &queue : nullptr; }

 private:
  friend class FairQueue;
  QueuePlace(FairQueue& queue, std::uint64_t request)
      : queue_(&queue),
        request_(request) {}
  void reset() {
    if (FairQueue* queue = std::exchange(queue_, nullptr)) {
      queue->erase(request_);
    }
  }

  FairQueue* queue_ = nullptr;
  std::uint64_t request_ = 0;
  bool read_ = false;
};

template <typename Visit>
std::uint64_t FairQueue::next(double now, Visit&& visit) {
  for (auto& [priority, band] : bands_) {
    if (band.active.empty()) {
      continue;
    }
    for (const auto& [tag, own, tenant] : band.active) {
      int depth = 0;
      for (const Key& candidate : lines_.at({own, tenant}).waiting) {
        if (++depth > k_depth) {
          break;
        }
        const Verdict verdict = visit(candidate.request);
        if (verdict == Verdict::stop) {
          return 0;
        }
        if (verdict == Verdict::take) {
          const std::uint64_t taken = candidate.request;
          charge(now, items_.at(taken));
          return taken;
        }
      }
    }
    return 0;  // what waits in a higher band is not passed by a lower one
  }
  return 0;
}

}  // namespace twinpool::admission
