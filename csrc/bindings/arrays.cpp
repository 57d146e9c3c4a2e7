// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "bindings/bindings.h"

namespace twinpool::bindings {

std::span<const std::int32_t> int32_span(const py::array& array, const char* name) {
  if (array.ndim() != 1) {
    throw py::value_error(std::string(name) + " must have one dimension");
  }
  return exact_span<std::int32_t>(array, name);
}

std::span<const Hash128> hash_span(const py::array& array, const char* name) {
  if (array.ndim() != 2 || array.shape(1) != static_cast<py::ssize_t>(Hash128::size)) {
    throw py::value_error(std::string(name) + " must have the shape [n, 16]");
  }
  const auto bytes = exact_span<std::uint8_t>(array, name);
  return {reinterpret_cast<const Hash128*>(bytes.data()), bytes.size() / Hash128::size};
}

Hash128 hash_from_bytes(const py::bytes& value, const char* name) {
  const auto text = static_cast<std::string_view>(value);
  if (text.size() != Hash128::size) {
    throw py::value_error(std::string(name) + " must be 16 bytes, not " + std::to_string(text.size()));
  }
  return Hash128::from_bytes(text.data());
}

py::bytes hash_to_bytes(const Hash128& hash) {
  return {reinterpret_cast<const char*>(hash.bytes.data()), Hash128::size};
}

py::array hashes_to_array(std::span<const Hash128> hashes) {
  py::array_t<std::uint8_t> array({static_cast<py::ssize_t>(hashes.size()), static_cast<py::ssize_t>(Hash128::size)});
  if (!hashes.empty()) {
    std::memcpy(array.mutable_data(), hashes.data(), hashes.size_bytes());
  }
  return array;
}

}  // namespace twinpool::bindings
