// SPDX-License-Identifier: Apache-2.0
// Python names of the router core: admission, placement, prefix index.
#include <pybind11/stl.h>

#include <cmath>
#include <optional>

#include "admission/router_core.h"
#include "bindings/bindings.h"
#include "bindings/router_dicts.h"

namespace twinpool::bindings {

namespace {

namespace ad = twinpool::admission;
using prefix::HashBytes;

struct PyRouterCore {
  explicit PyRouterCore(const ad::AdmissionConfig& config)
      : core(config) {}
  std::mutex mutex;
  ad::RouterCore core;
  std::vector<ad::Action> actions;  // memory of the last plan, used again
  std::vector<std::pair<const placement::Worker*, std::uint32_t>> prefixes;
};
using Self = PyRouterCore;

constexpr std::size_t k_unlocked_hashes = 512;  // batches from here on run without the GIL

HashBytes bytes_of(std::span<const Hash128> hashes) {
  return {reinterpret_cast<const std::uint8_t*>(hashes.data()), hashes.size() * Hash128::size};
}

prefix::Tier tier_of(const std::string& tier) {
  if (tier == "device")
    return prefix::Tier::device;
  if (tier == "host")
    return prefix::Tier::host;
  throw CoreError("tier=" + tier + "; allowed: device, host");
}

template <typename Work>
void locked(Self& self, std::size_t hashes, Work&& work) {
  if (hashes < k_unlocked_hashes) {
    const CoreLock lock(self.mutex);
    work();
  } else {
    const UnlockedCoreLock lock(self.mutex);
    work();
  }
}

ad::AdmissionConfig make_config(const py::kwargs& limits) {
  ad::AdmissionConfig config;
  for (const auto& [name, value] : limits)
    config.set(name.cast<std::string>(), value.cast<double>());
  return config;
}

void bind_config(py::module_& module) {
  py::class_<ad::AdmissionConfig> config(module, "AdmissionConfig");
  config.def(py::init(&make_config));
  for (const std::string_view view : ad::AdmissionConfig::fields()) {
    const std::string field(view);
    const bool whole = ad::AdmissionConfig::whole(field);
    config.def_property(
        field.c_str(),
        [field, whole](const ad::AdmissionConfig& self) -> py::object {
          const double value = self.get(field);
          if (whole)
            return py::int_(static_cast<std::int64_t>(value));
          return py::float_(value);
        },
        [field](ad::AdmissionConfig& self, double value) { self.set(field, value); });
  }
  py::list names;
  for (const std::string_view field : ad::AdmissionConfig::fields())
    names.append(std::string(field));
  config.attr("FIELDS") = names;
}

void bind_results(py::module_& module) {
  using ad::Action;
  py::class_<ad::Submission>(module, "Submission")
      .def_readonly("accepted", &ad::Submission::accepted)
      .def_readonly("request", &ad::Submission::request)
      .def_property_readonly("reason", [](const ad::Submission& s) { return std::string(ad::name_of(s.reason)); })
      .def_readonly("limit", &ad::Submission::limit)
      .def_readonly("retry_after", &ad::Submission::retry_after)
      .def("__repr__", [](const ad::Submission& s) {
        return "Submission(accepted=" + std::string(s.accepted ? "True" : "False") +
               ", request=" + std::to_string(s.request) + ", reason='" + std::string(ad::name_of(s.reason)) + "')";
      });
  py::class_<Action>(module, "Action")
      .def_property_readonly(
          "kind",
          [](const Action& a) {
            return a.kind == Action::Kind::place ? "place" : a.kind == Action::Kind::end ? "end" : "preempt";
          })
      .def_readonly("request", &Action::request)
      .def_readonly("attempt", &Action::attempt)
      .def_readonly("prefill", &Action::prefill)
      .def_readonly("decode", &Action::decode)
      .def_property_readonly("fetch_from",
                             [](const Action& a) -> std::optional<ad::WorkerName> {
                               if (a.fetch_from.first.empty())
                                 return std::nullopt;
                               return a.fetch_from;
                             })
      .def_readonly("local", &Action::local)
      .def_readonly("predicted_cached_blocks", &Action::prefill_cached_blocks)
      .def_readonly("predicted_decode_cached_blocks", &Action::decode_cached_blocks)
      .def_readonly("predicted_ttft_seconds", &Action::ttft_seconds)
      .def_property_readonly("state", [](const Action& a) { return std::string(a.state); })
      .def_property_readonly("cause", [](const Action& a) { return std::string(ad::name_of(a.cause)); })
      .def_readonly("retry_after", &Action::retry_after);
  py::class_<ad::Transition>(module, "Transition")
      .def_readonly("applied", &ad::Transition::applied)
      .def_property_readonly("state", [](const ad::Transition& t) { return std::string(t.state); })
      .def_readonly("terminal", &ad::Transition::terminal)
      .def_property_readonly("cause", [](const ad::Transition& t) { return std::string(ad::name_of(t.cause)); })
      .def_readonly("attempt", &ad::Transition::attempt)
      .def("__repr__", [](const ad::Transition& t) {
        return "Transition(applied=" + std::string(t.applied ? "True" : "False") + ", state='" + std::string(t.state) +
               "', cause='" + std::string(ad::name_of(t.cause)) + "')";
      });
}

void bind_cluster(py::class_<Self>& core) {
  core.def(
      "upsert_worker",
      [](Self& self, double now, std::string name, std::uint64_t incarnation, std::string pool, const std::string& role,
         const std::string& state, std::string fingerprint, std::uint32_t num_blocks, std::uint32_t block_tokens,
         std::uint32_t max_num_seqs) {
        const placement::WorkerSpec spec{std::move(name),
                                         incarnation,
                                         std::move(pool),
                                         placement::parse_role(role),
                                         placement::parse_worker_state(state),
                                         std::move(fingerprint),
                                         num_blocks,
                                         block_tokens,
                                         max_num_seqs};
        const CoreLock lock(self.mutex);
        self.core.upsert_worker(now, spec);
      },
      py::arg("now"), py::arg("name"), py::arg("incarnation"), py::arg("pool"), py::arg("role"), py::arg("state"),
      py::arg("fingerprint"), py::arg("num_blocks"), py::arg("block_tokens"), py::arg("max_num_seqs"));
  core.def(
      "remove_worker",
      [](Self& self, double now, const std::string& name, std::uint64_t incarnation) {
        const CoreLock lock(self.mutex);
        self.core.remove_worker(now, name, incarnation);
      },
      py::arg("now"), py::arg("name"), py::arg("incarnation"));
  core.def(
      "report_load",
      [](Self& self, double now, const std::string& name, std::uint64_t incarnation, std::uint32_t running,
         std::uint32_t waiting, std::uint64_t waiting_prefill_tokens, std::uint32_t available_blocks,
         double step_seconds) {
        const CoreLock lock(self.mutex);
        self.core.report_load(now, name, incarnation,
                              {now, running, waiting, waiting_prefill_tokens, available_blocks, step_seconds});
      },
      py::arg("now"), py::arg("name"), py::arg("incarnation"), py::arg("running"), py::arg("waiting"),
      py::arg("waiting_prefill_tokens"), py::arg("available_blocks"), py::arg("step_seconds"));
  core.def(
      "quarantine",
      [](Self& self, double now, const std::string& name, std::uint64_t incarnation, double until) {
        const CoreLock lock(self.mutex);
        self.core.quarantine(now, name, incarnation, until);
      },
      py::arg("now"), py::arg("name"), py::arg("incarnation"), py::arg("until"));
  core.def(
      "observe_prefill",
      [](Self& self, const std::string& name, std::uint64_t incarnation, std::int64_t tokens,
         std::int64_t cached_tokens, double seconds) {
        const CoreLock lock(self.mutex);
        self.core.observe_prefill(name, incarnation, tokens, cached_tokens, seconds);
      },
      py::arg("name"), py::arg("incarnation"), py::arg("tokens"), py::arg("cached_tokens"), py::arg("seconds"));
  core.def(
      "observe_transfer",
      [](Self& self, const std::string& name, std::uint64_t incarnation, std::int64_t blocks, double seconds) {
        const CoreLock lock(self.mutex);
        self.core.observe_transfer(name, incarnation, blocks, seconds);
      },
      py::arg("name"), py::arg("incarnation"), py::arg("blocks"), py::arg("seconds"));
  core.def(
      "set_tenant",
      [](Self& self, double now, const std::string& tenant, double weight, std::int64_t max_requests,
         double tokens_per_second, double burst_tokens, std::int64_t max_priority) {
        const CoreLock lock(self.mutex);
        self.core.set_tenant(now, tenant, {weight, max_requests, tokens_per_second, burst_tokens, max_priority});
      },
      py::arg("now"), py::arg("tenant"), py::kw_only(), py::arg("weight") = 1.0, py::arg("max_requests") = 0,
      py::arg("tokens_per_second") = 0.0, py::arg("burst_tokens") = 0.0, py::arg("max_priority") = 100);
  core.def("workers", [](Self& self) {
    const CoreLock lock(self.mutex);
    return worker_dicts(self.core);
  });
}

void bind_index(py::class_<Self>& core) {
  core.def(
      "index_stored",
      [](Self& self, const std::string& name, std::uint64_t incarnation, const py::array& hashes,
         const std::string& tier, bool counted) {
        const auto span = hash_span(hashes, "hashes");
        const prefix::Tier where = tier_of(tier);
        locked(self, span.size(), [&] { self.core.index_stored(name, incarnation, bytes_of(span), where, counted); });
      },
      py::arg("name"), py::arg("incarnation"), py::arg("hashes"), py::kw_only(), py::arg("tier") = "device",
      py::arg("counted") = false);
  core.def(
      "index_removed",
      [](Self& self, const std::string& name, std::uint64_t incarnation, const py::array& hashes,
         const std::string& tier) {
        const auto span = hash_span(hashes, "hashes");
        const prefix::Tier where = tier_of(tier);
        locked(self, span.size(), [&] { self.core.index_removed(name, incarnation, bytes_of(span), where); });
      },
      py::arg("name"), py::arg("incarnation"), py::arg("hashes"), py::kw_only(), py::arg("tier") = "device");
  core.def(
      "index_cleared",
      [](Self& self, const std::string& name, std::uint64_t incarnation) {
        const CoreLock lock(self.mutex);
        self.core.index_cleared(name, incarnation);
      },
      py::arg("name"), py::arg("incarnation"));
  core.def(
      "longest_prefix",
      [](Self& self, const py::array& hashes) {
        const auto span = hash_span(hashes, "hashes");
        const CoreLock lock(self.mutex);
        self.core.longest_prefix(bytes_of(span), self.prefixes);
        py::list out(self.prefixes.size());
        for (std::size_t i = 0; i < self.prefixes.size(); ++i) {
          out[i] = py::make_tuple(self.prefixes[i].first->spec.name, self.prefixes[i].second);
        }
        return out;
      },
      py::arg("hashes"));
}

void bind_requests(py::class_<Self>& core) {
  core.def(
      "submit",
      [](Self& self, double now, std::string request_id, std::string pool, std::int64_t prompt_tokens,
         std::int64_t max_new_tokens, const py::array& hashes, std::int64_t n, int priority, std::string tenant,
         double deadline, std::int64_t bytes) {
        const auto span = hash_span(hashes, "hashes");
        const ad::SubmitArguments arguments{std::move(request_id),
                                            std::move(pool),
                                            std::move(tenant),
                                            prompt_tokens,
                                            max_new_tokens,
                                            n,
                                            bytes,
                                            priority,
                                            deadline,
                                            bytes_of(span)};
        const CoreLock lock(self.mutex);
        return self.core.submit(now, arguments);
      },
      py::arg("now"), py::arg("request_id"), py::arg("pool"), py::arg("prompt_tokens"), py::arg("max_new_tokens"),
      py::arg("hashes"), py::kw_only(), py::arg("n") = 1, py::arg("priority") = 0, py::arg("tenant") = "",
      py::arg("deadline") = 0.0, py::arg("bytes") = 0);
  core.def(
      "plan",
      [](Self& self, double now) {
        const CoreLock lock(self.mutex);
        self.core.plan(now, self.actions);
        py::list out(self.actions.size());
        for (std::size_t i = 0; i < self.actions.size(); ++i)
          out[i] = py::cast(std::move(self.actions[i]));
        return out;
      },
      py::arg("now"));
  core.def(
      "next_wake",
      [](Self& self, double now) -> std::optional<double> {
        const CoreLock lock(self.mutex);
        const double at = self.core.next_wake(now);
        if (std::isinf(at))
          return std::nullopt;
        return at;
      },
      py::arg("now"));
  core.def(
      "advance",
      [](Self& self, double now, std::uint64_t request, std::uint32_t attempt, const std::string& event,
         const std::string& detail) {
        const CoreLock lock(self.mutex);
        return self.core.advance(now, request, attempt, event, detail);
      },
      py::arg("now"), py::arg("request"), py::arg("attempt"), py::arg("event"), py::arg("detail") = "");
  core.def(
      "forget",
      [](Self& self, std::uint64_t request) {
        const CoreLock lock(self.mutex);
        self.core.forget(request);
      },
      py::arg("request"));
  core.def(
      "state",
      [](Self& self, std::uint64_t request) {
        const CoreLock lock(self.mutex);
        return std::string(self.core.state(request));
      },
      py::arg("request"));
  core.def("stats", [](Self& self) {
    const CoreLock lock(self.mutex);
    return self.core.stats();
  });
  core.def(
      "requests_on",
      [](Self& self, const std::string& name, std::uint64_t incarnation) {
        const CoreLock lock(self.mutex);
        return self.core.requests_on(name, incarnation);
      },
      py::arg("name"), py::arg("incarnation"));
  core.def(
      "explain",
      [](Self& self, std::uint64_t request) {
        const CoreLock lock(self.mutex);
        return explain_dict(self.core, request);
      },
      py::arg("request"));
}

}  // namespace

void bind_router(py::module_& module) {
  bind_config(module);
  bind_results(module);
  py::class_<Self> core(module, "RouterCore");
  core.def(py::init<const ad::AdmissionConfig&>(), py::arg("config"));
  bind_cluster(core);
  bind_index(core);
  bind_requests(core);
  py::list states;
  for (const std::string_view name : ad::state_names())
    states.append(std::string(name));
  core.attr("STATES") = states;
  py::list events;
  for (const std::string_view name : ad::event_names())
    events.append(std::string(name));
  core.attr("EVENTS") = events;
  py::list table;
  for (const ad::TransitionRow& row : ad::transition_table()) {
    table.append(py::make_tuple(std::string(row.event), std::string(row.state), row.result));
  }
  core.attr("TRANSITIONS") = table;
}

}  // namespace twinpool::bindings
