// SPDX-License-Identifier: Apache-2.0
#include <optional>

#include "bindings/core_objects.h"

namespace twinpool::bindings {

namespace {

using Manager = PyBlockManager;

std::span<std::uint64_t> writable_generations(const py::array& array) {
  if (array.ndim() != 1 || !array.writeable()) {
    throw py::type_error("generations must be a writable array of one dimension");
  }
  const auto span = exact_span<std::uint64_t>(array, "generations");
  return {const_cast<std::uint64_t*>(span.data()), span.size()};  // NOLINT(cppcoreguidelines-pro-type-const-cast)
}

std::span<const BlockId> block_span(const py::array& blocks) {
  return int32_span(blocks, "blocks");
}

py::array acquire_prefix(Manager& self, const py::array& hashes) {
  const auto span = hash_span(hashes, "hashes");
  std::vector<BlockId> blocks;
  {
    const CoreLock lock(self.mutex);
    self.core.acquire_prefix(span, blocks);
  }
  return to_array(std::move(blocks));
}

std::optional<py::array> allocate(Manager& self, std::int64_t count) {
  require(count >= 0, "count must not be negative");
  std::vector<BlockId> blocks;
  {
    const CoreLock lock(self.mutex);
    if (!self.core.allocate(static_cast<std::size_t>(count), blocks)) {
      return std::nullopt;
    }
  }
  return to_array(std::move(blocks));
}

py::array commit(Manager& self, const py::array& blocks, const py::array& hashes, const py::bytes& parent) {
  const auto block_ids = block_span(blocks);
  const auto hash_values = hash_span(hashes, "hashes");
  const Hash128 before = hash_from_bytes(parent, "parent");
  std::vector<BlockId> published;
  {
    const CoreLock lock(self.mutex);
    self.core.commit(block_ids, hash_values, before, published);
  }
  return to_array(std::move(published));
}

py::list drain_events(Manager& self) {
  std::vector<CacheEvent> events;
  {
    const CoreLock lock(self.mutex);
    events = self.core.drain_events();
  }
  py::list result;
  for (const CacheEvent& event : events) {
    const py::bytes parent = event.stored ? hash_to_bytes(event.parent) : py::bytes();
    result.append(py::make_tuple(event.stored ? "stored" : "removed", hashes_to_array(event.hashes), parent));
  }
  return result;
}

/// A counter of the core as a Python property.
template <std::size_t (BlockManager::*Count)() const noexcept>
std::size_t counter(Manager& self) {
  const CoreLock lock(self.mutex);
  return (self.core.*Count)();
}

/// A method of the core that takes blocks and returns nothing.
template <void (BlockManager::*Method)(std::span<const BlockId>)>
void with_blocks(Manager& self, const py::array& blocks) {
  const auto ids = block_span(blocks);
  const CoreLock lock(self.mutex);
  (self.core.*Method)(ids);
}

py::tuple unpin_prefixes(Manager& self, std::string tenant, std::string pin, std::string session,
                         const std::optional<py::bytes>& last) {
  PrefixPinFilter filter{.tenant = std::move(tenant), .pin = std::move(pin), .session = std::move(session), .last = {}};
  if (last) {
    filter.last = hash_from_bytes(*last, "last");
  }
  std::vector<PrefixPins::Pin> ended;
  {
    const CoreLock lock(self.mutex);
    ended = self.core.unpin_prefixes(filter);
  }
  std::vector<BlockId> blocks;
  for (const PrefixPins::Pin& each : ended) {
    blocks.insert(blocks.end(), each.blocks.begin(), each.blocks.end());
  }
  return py::make_tuple(ended.size(), to_array(std::move(blocks)));
}

void bind_prefix_pins(py::class_<Manager, std::shared_ptr<Manager>>& manager) {
  manager.def_property_readonly("prefix_pinned_blocks", &counter<&BlockManager::prefix_pinned_blocks>)
      .def_property_readonly("prefix_pins", &counter<&BlockManager::prefix_pins>)
      .def(
          "has_prefix_pin",
          [](Manager& self, const std::string& pin) {
            const CoreLock lock(self.mutex);
            return self.core.has_prefix_pin(pin);
          },
          py::arg("pin"))
      .def(
          "pin_prefix",
          [](Manager& self, std::string pin, std::string tenant, std::string session, const py::array& hashes,
             double expires_at, std::size_t max_pins, std::size_t max_blocks, std::size_t max_tenant_blocks) {
            const auto span = hash_span(hashes, "hashes");
            const PrefixPinOwner owner{std::move(pin), std::move(tenant), std::move(session), expires_at};
            const CoreLock lock(self.mutex);
            const auto result = self.core.pin_prefix(owner, span, {max_pins, max_blocks, max_tenant_blocks});
            return std::make_tuple(std::string(name_of(result.refusal)), result.blocks, result.expires_at);
          },
          py::arg("pin"), py::arg("tenant"), py::arg("session"), py::arg("hashes"), py::arg("expires_at"),
          py::kw_only(), py::arg("max_pins"), py::arg("max_blocks"), py::arg("max_tenant_blocks"))
      .def("unpin_prefixes", &unpin_prefixes, py::arg("tenant"), py::kw_only(), py::arg("pin") = "",
           py::arg("session") = "", py::arg("last") = py::none())
      .def(
          "expire_prefix_pins",
          [](Manager& self, double now) {
            const CoreLock lock(self.mutex);
            return self.core.expire_prefix_pins(now);
          },
          py::arg("now"))
      .def("end_next_prefix_pin",
           [](Manager& self) {
             const CoreLock lock(self.mutex);
             return self.core.end_next_prefix_pin();
           })
      .def("next_prefix_expiry",
           [](Manager& self) {
             const CoreLock lock(self.mutex);
             return self.core.next_prefix_expiry();
           })
      .def(
          "demote",
          [](Manager& self, const py::array& blocks, const py::array& generations) {
            const auto ids = block_span(blocks);
            const auto of_ids = exact_span<std::uint64_t>(generations, "generations");
            const CoreLock lock(self.mutex);
            return self.core.demote(ids, of_ids);
          },
          py::arg("blocks"), py::arg("generations"));
}

}  // namespace

PyBlockManager::PyBlockManager(std::int64_t num_blocks, std::int64_t block_tokens, py::array generations_array)
    : generations(std::move(generations_array)),
      core(num_blocks, block_tokens, writable_generations(generations)) {}

void bind_blocks(py::module_& module) {
  py::class_<Manager, std::shared_ptr<Manager>> manager(module, "BlockManager", py::is_final());
  bind_prefix_pins(manager);
  manager
      .def(py::init<std::int64_t, std::int64_t, py::array>(), py::arg("num_blocks"), py::arg("block_tokens"),
           py::arg("generations"))
      .def_property_readonly("num_blocks", &counter<&BlockManager::num_blocks>)
      .def_property_readonly("block_tokens", &counter<&BlockManager::block_tokens>)
      .def_property_readonly("free_blocks", &counter<&BlockManager::free_blocks>)
      .def_property_readonly("cached_blocks", &counter<&BlockManager::cached_blocks>)
      .def_property_readonly("held_blocks", &counter<&BlockManager::held_blocks>)
      .def_property_readonly("pinned_blocks", &counter<&BlockManager::pinned_blocks>)
      .def_property_readonly("quarantined_blocks", &counter<&BlockManager::quarantined_blocks>)
      .def_property_readonly("available_blocks", &counter<&BlockManager::available_blocks>)
      .def("pinned_transfers", &counter<&BlockManager::pinned_transfers>)
      .def(
          "lookup",
          [](Manager& self, const py::array& hashes) {
            const auto span = hash_span(hashes, "hashes");
            const CoreLock lock(self.mutex);
            return self.core.lookup(span);
          },
          py::arg("hashes"))
      .def("acquire_prefix", &acquire_prefix, py::arg("hashes"))
      .def("allocate", &allocate, py::arg("count"))
      .def("reference", &with_blocks<&BlockManager::reference>, py::arg("blocks"))
      .def("release", &with_blocks<&BlockManager::release>, py::arg("blocks"))
      .def("commit", &commit, py::arg("blocks"), py::arg("hashes"), py::arg("parent"))
      .def(
          "pin",
          [](Manager& self, std::uint64_t transfer, const py::array& blocks, std::int64_t readers, double expires_at) {
            const auto ids = block_span(blocks);
            const CoreLock lock(self.mutex);
            self.core.pin(transfer, ids, readers, expires_at);
          },
          py::arg("transfer_id"), py::arg("blocks"), py::arg("readers"), py::arg("expires_at"))
      .def(
          "renew",
          [](Manager& self, std::uint64_t transfer, double expires_at) {
            const CoreLock lock(self.mutex);
            return self.core.renew(transfer, expires_at);
          },
          py::arg("transfer_id"), py::arg("expires_at"))
      .def(
          "unpin",
          [](Manager& self, std::uint64_t transfer, std::int64_t reader) {
            const CoreLock lock(self.mutex);
            return self.core.unpin(transfer, reader);
          },
          py::arg("transfer_id"), py::arg("reader"))
      .def(
          "expire",
          [](Manager& self, double now) {
            const CoreLock lock(self.mutex);
            return self.core.expire(now);
          },
          py::arg("now"))
      .def("quarantine", &with_blocks<&BlockManager::quarantine>, py::arg("blocks"))
      .def("unquarantine", &with_blocks<&BlockManager::unquarantine>, py::arg("blocks"))
      .def("drain_freed",
           [](Manager& self) {
             std::vector<BlockId> freed;
             {
               const CoreLock lock(self.mutex);
               freed = self.core.drain_freed();
             }
             return to_array(std::move(freed));
           })
      .def("drain_events", &drain_events)
      .def("reset_cache",
           [](Manager& self) {
             const CoreLock lock(self.mutex);
             return self.core.reset_cache();
           })
      .def("check", [](Manager& self) {
        const CoreLock lock(self.mutex);
        self.core.check();
      });
}

}  // namespace twinpool::bindings
