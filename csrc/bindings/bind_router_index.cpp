// SPDX-License-Identifier: Apache-2.0
// Python names of the prefix index, which is part of the router core.
#include "bindings/router_object.h"

namespace twinpool::bindings {

namespace {

namespace calls = twinpool::admission::calls;
using prefix::HashBytes;
using Self = PyRouterCore;

prefix::Tier tier_of(const std::string& tier) {
  if (tier == "device") {
    return prefix::Tier::device;
  }
  if (tier == "host") {
    return prefix::Tier::host;
  }
  throw CoreError("tier=" + tier + "; allowed: device, host");
}

/// The worker's name as Python has it; made once, since making it is most of what an answer costs.
const py::object& name_object(PyRouterCore& self, const placement::Worker& worker) {
  const std::size_t slot = self.core.workers().ref(worker).slot;
  if (self.names.size() <= slot) {
    self.names.resize(slot + 1);
  }
  auto& [epoch, name] = self.names[slot];
  if (epoch != worker.epoch) {
    name = py::str(worker.spec.name);
    epoch = worker.epoch;
  }
  return name;
}

}  // namespace

void bind_router_index(py::class_<Self>& core) {
  core.def(
      "index_stored",
      [](Self& self, const std::string& name, std::uint64_t incarnation, const py::array& hashes,
         const std::string& tier, bool counted) {
        const HashBytes span = bytes_of(hash_span(hashes, "hashes"));
        const prefix::Tier where = tier_of(tier);
        make_with_hashes(
            self, span.size() / Hash128::size,
            [&] { return calls::Call(calls::IndexStored{name, incarnation, copy_of(span), where, counted}); },
            [&] { self.core.index_stored(name, incarnation, span, where, counted); });
      },
      py::arg("name"), py::arg("incarnation"), py::arg("hashes"), py::kw_only(), py::arg("tier") = "device",
      py::arg("counted") = false);
  core.def(
      "index_removed",
      [](Self& self, const std::string& name, std::uint64_t incarnation, const py::array& hashes,
         const std::string& tier) {
        const HashBytes span = bytes_of(hash_span(hashes, "hashes"));
        const prefix::Tier where = tier_of(tier);
        make_with_hashes(
            self, span.size() / Hash128::size,
            [&] { return calls::Call(calls::IndexRemoved{name, incarnation, copy_of(span), where}); },
            [&] { self.core.index_removed(name, incarnation, span, where); });
      },
      py::arg("name"), py::arg("incarnation"), py::arg("hashes"), py::kw_only(), py::arg("tier") = "device");
  core.def(
      "index_cleared",
      [](Self& self, const std::string& name, std::uint64_t incarnation) {
        make(self, calls::IndexCleared{name, incarnation});
      },
      py::arg("name"), py::arg("incarnation"));
  core.def(
      "index_hashes",
      [](Self& self, const std::string& name, std::uint64_t incarnation, const std::string& tier) {
        const prefix::Tier where = tier_of(tier);
        std::vector<Hash128> found;
        {
          const UnlockedCoreLock lock(self.mutex);
          self.core.index_hashes(name, incarnation, where, found);
        }
        return hashes_to_array(found);
      },
      py::arg("name"), py::arg("incarnation"), py::kw_only(), py::arg("tier") = "device");
  core.def(
      "longest_prefix",
      [](Self& self, const py::array& hashes) {
        const HashBytes span = bytes_of(hash_span(hashes, "hashes"));
        const CoreLock lock(self.mutex);
        self.recorder([&] { return calls::Call(calls::LongestPrefix{copy_of(span)}); },
                      [&] {
                        self.core.longest_prefix(span, self.prefixes);
                        return calls::Nothing{};
                      });
        py::list out(self.prefixes.size());
        for (std::size_t i = 0; i < self.prefixes.size(); ++i) {
          const auto& [worker, blocks] = self.prefixes[i];
          PyObject* row = PyTuple_Pack(2, name_object(self, *worker).ptr(), py::int_(blocks).ptr());
          if (row == nullptr) {
            throw py::error_already_set();
          }
          PyList_SET_ITEM(out.ptr(), static_cast<py::ssize_t>(i), row);
        }
        return out;
      },
      py::arg("hashes"));
}

}  // namespace twinpool::bindings
