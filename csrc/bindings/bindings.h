// SPDX-License-Identifier: Apache-2.0
// What the binding files share. One bind_<part> function a part of the core; module.cpp calls them in order.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "hash/hash128.h"

namespace twinpool::bindings {

namespace py = pybind11;

void bind_hash(py::module_& module);
void bind_blocks(py::module_& module);
void bind_scheduler(py::module_& module);
void bind_router(py::module_& module);
void bind_transfer(py::module_& module);

/// Locks a core object that several Python threads share. A blocked thread waits without the GIL, so a holder may take
/// the GIL while it holds the lock, and no pair of them can wait for each other.
class CoreLock {
 public:
  explicit CoreLock(std::mutex& mutex)
      : mutex_(mutex) {
    if (!mutex_.try_lock()) {
      const py::gil_scoped_release release;
      mutex_.lock();
    }
  }
  CoreLock(const CoreLock&) = delete;
  CoreLock& operator=(const CoreLock&) = delete;
  ~CoreLock() { mutex_.unlock(); }

 private:
  std::mutex& mutex_;
};

/// The same for work that is worth running without the GIL.
class UnlockedCoreLock {
 public:
  explicit UnlockedCoreLock(std::mutex& mutex)
      : lock_(mutex) {}

 private:
  py::gil_scoped_release release_;
  std::lock_guard<std::mutex> lock_;
};

/// A C-contiguous array of exactly T; never converts. Throws TypeError that names the argument.
/// The span is valid while ``array`` lives.
template <typename T>
std::span<const T> exact_span(const py::array& array, const char* name) {
  constexpr int aligned = py::detail::npy_api::NPY_ARRAY_ALIGNED_;
  constexpr int wanted = py::array::c_style | aligned;
  if (!array.dtype().equal(py::dtype::of<T>()) || (array.flags() & wanted) != wanted) {
    throw py::type_error(std::string(name) + " must be an aligned C-contiguous array of " +
                         py::str(py::dtype::of<T>()).template cast<std::string>() + ", not " +
                         py::str(array.dtype()).template cast<std::string>());
  }
  return {static_cast<const T*>(array.data()), static_cast<std::size_t>(array.size())};
}

/// int32[n]
std::span<const std::int32_t> int32_span(const py::array& array, const char* name);
/// uint8[n, 16] as hashes, in place
std::span<const Hash128> hash_span(const py::array& array, const char* name);
/// 16 bytes
Hash128 hash_from_bytes(const py::bytes& value, const char* name);
py::bytes hash_to_bytes(const Hash128& hash);
/// A fresh uint8[n, 16]
py::array hashes_to_array(std::span<const Hash128> hashes);

/// A fresh array that owns what was in the vector (no copy).
template <typename T>
py::array_t<T> to_array(std::vector<T>&& values) {
  auto owner = std::make_unique<std::vector<T>>(std::move(values));
  T* data = owner->data();
  const auto size = static_cast<py::ssize_t>(owner->size());
  const py::capsule base(owner.get(), [](void* held) { delete static_cast<std::vector<T>*>(held); });
  owner.release();
  return py::array_t<T>(size, data, base);
}

}  // namespace twinpool::bindings
