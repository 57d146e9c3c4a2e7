// SPDX-License-Identifier: Apache-2.0
#include <optional>

#include "bindings/bindings.h"
#include "hash/block_hash.h"
#include "hash/digest.h"

namespace twinpool::bindings {

namespace {

std::span<const std::uint8_t> view(const py::bytes& value) {
  const auto text = static_cast<std::string_view>(value);
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

py::bytes py_root_hash(const py::bytes& fingerprint, const std::optional<py::bytes>& tenant_salt,
                       const std::optional<py::bytes>& adapter) {
  Namespace fields{.fingerprint = view(fingerprint), .tenant_salt = {}, .adapter = {}};
  if (tenant_salt) {
    fields.tenant_salt = view(*tenant_salt);
  }
  if (adapter) {
    fields.adapter = view(*adapter);
  }
  return hash_to_bytes(root_hash(fields));
}

py::array py_hash_blocks(const py::bytes& parent, const py::array& tokens, std::int64_t block_tokens) {
  const Hash128 first = hash_from_bytes(parent, "parent");
  const auto span = int32_span(tokens, "tokens");
  require(block_tokens > 0, "block_tokens must be at least 1");
  std::vector<Hash128> hashes;
  {
    const py::gil_scoped_release release;
    hash_blocks(first, span, static_cast<std::size_t>(block_tokens), hashes);
  }
  return hashes_to_array(hashes);
}

py::array py_block_digest(std::uintptr_t data, std::size_t stride_bytes, const py::array& length_bytes) {
  const auto lengths = exact_span<std::int64_t>(length_bytes, "length_bytes");
  for (const std::int64_t length : lengths) {
    require(length >= 0 && static_cast<std::size_t>(length) <= stride_bytes,
            "length_bytes must lie between 0 and stride_bytes");
  }
  std::vector<std::uint64_t> digests(lengths.size());
  {
    const py::gil_scoped_release release;
    // The caller hands over an address, as torch's data_ptr() and NIXL's descriptors do.
    const auto* base = reinterpret_cast<const std::uint8_t*>(data);  // NOLINT(performance-no-int-to-ptr)
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      digests[i] = digest64({base + i * stride_bytes, static_cast<std::size_t>(lengths[i])});
    }
  }
  return to_array(std::move(digests));
}

}  // namespace

void bind_hash(py::module_& module) {
  module.def("root_hash", &py_root_hash, py::arg("fingerprint"), py::arg("tenant_salt"), py::arg("adapter"));
  module.def("hash_blocks", &py_hash_blocks, py::arg("parent"), py::arg("tokens"), py::arg("block_tokens"));
  module.def("block_digest", &py_block_digest, py::arg("data"), py::arg("stride_bytes"), py::arg("length_bytes"));
}

}  // namespace twinpool::bindings
