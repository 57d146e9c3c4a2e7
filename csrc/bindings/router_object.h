// SPDX-License-Identifier: Apache-2.0
// The router core as Python holds it: with a lock and a recorder.
#pragma once

#include "admission/recorder.h"
#include "bindings/bindings.h"

namespace twinpool::bindings {

inline constexpr std::size_t k_unlocked_hashes = 512;  // batches from here on run without the GIL

struct PyRouterCore {
  explicit PyRouterCore(const admission::AdmissionConfig& config)
      : core(config),
        recorder(core) {}
  std::mutex mutex;
  admission::RouterCore core;
  admission::Recorder recorder;
  std::vector<std::pair<const placement::Worker*, std::uint32_t>> prefixes;
  std::vector<std::pair<std::uint64_t, py::object>> names;  // by worker slot, with its epoch
};
/// Makes a call under the lock, and records it where asked for.
template <typename Call>
auto make(PyRouterCore& self, const Call& call) {
  const CoreLock lock(self.mutex);
  return self.recorder([&] { return admission::calls::Call(call); }, [&] { return call.run(self.core); });
}

/// The same for calls with hashes: those are copied only while recording, and large ones run without the GIL.
template <typename Record, typename Run>
void make_with_hashes(PyRouterCore& self, std::size_t hashes, Record&& record, Run&& run) {
  const auto both = [&] {
    self.recorder(std::forward<Record>(record), [&] {
      run();
      return admission::calls::Nothing{};
    });
  };
  if (hashes < k_unlocked_hashes) {
    const CoreLock lock(self.mutex);
    both();
  } else {
    const UnlockedCoreLock lock(self.mutex);
    both();
  }
}

inline prefix::HashBytes bytes_of(std::span<const Hash128> hashes) {
  return {reinterpret_cast<const std::uint8_t*>(hashes.data()), hashes.size() * Hash128::size};
}

inline admission::calls::Bytes copy_of(prefix::HashBytes hashes) {
  return {hashes.begin(), hashes.end()};
}

/// index_stored, index_removed, index_cleared, index_hashes, longest_prefix.
void bind_router_index(py::class_<PyRouterCore>& core);

}  // namespace twinpool::bindings
