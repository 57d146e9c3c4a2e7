// SPDX-License-Identifier: Apache-2.0
// Records the calls to a router core and their outcomes, so that they can be made again elsewhere.
//
// A log begins with the whole state of the core and goes on with calls. Two halves take turns: when the newer one is
// full, the older one is dropped and a new one begins with a new state. So a log is bounded, and what there is of it
// can always be replayed from its first byte. It holds block hashes, request ids and tenants, but no tokens and no
// text.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "admission/calls.h"

namespace twinpool::admission {

class Recorder {
 public:
  explicit Recorder(RouterCore& core)
      : core_(core) {}

  /// ``max_bytes`` bounds the calls of both halves together, but for the last entry of each and 8 KiB as the least;
  /// each half also keeps a state.
  void start(std::uint64_t max_bytes);
  void stop();
  [[nodiscard]] bool on() const noexcept { return on_; }
  /// What was recorded since ``start``, or its newest part, for ``pack_log``: copying it is all that needs the core to
  /// stand still. Empty if nothing was and nothing will be.
  [[nodiscard]] std::string raw() const;
  /// The same, packed.
  [[nodiscard]] std::string dump() const;

  /// Makes the call and records it. ``call`` gives a calls::Call alternative and is asked only while recording is on.
  template <typename MakeCall, typename Run>
  auto operator()(MakeCall&& call, Run&& run) {
    if (!on_) {
      return run();
    }
    std::string entry;
    begin(entry, call());
    try {
      auto result = run();
      calls::encode(entry, result);
      append(entry);
      return result;
    } catch (const CoreError& error) {
      calls::encode_error(entry, error.what());
      append(entry);
      throw;
    }
  }

 private:
  struct Half {
    std::vector<double> limits;
    std::string state;
    std::string calls;
    std::uint64_t count = 0;
  };
  static void begin(std::string& entry, calls::Call&& call);
  void append(const std::string& entry);
  void new_half();

  RouterCore& core_;
  bool on_ = false;
  std::uint64_t half_bytes_ = 0;
  Half older_;
  Half newer_;
};

struct ReplayReport {
  std::uint64_t calls = 0;
  std::uint64_t placements = 0;
  bool equal = true;
  std::string mismatch;  // the first call whose outcome differs: the call, what was recorded, what came now
};

/// Makes all calls of a log again and compares outcomes; stops at the first that differs. ``print``, if set, gets a
/// line for each call. Throws CoreError if the bytes are not a log.
ReplayReport replay(std::span<const char> log, const std::function<void(const std::string&)>& print);

/// Compressed and checksummed bytes, and back. Throws CoreError if they are damaged.
std::string pack_log(const std::string& raw);
std::string unpack_log(std::span<const char> packed);

}  // namespace twinpool::admission
