// SPDX-License-Identifier: Apache-2.0
// Python names of the router core: admission, placement, prefix index.
#include <pybind11/stl.h>

#include <cmath>
#include <optional>

#include "bindings/router_dicts.h"
#include "bindings/router_object.h"

namespace twinpool::bindings {

namespace {

namespace ad = twinpool::admission;
namespace calls = twinpool::admission::calls;
using Self = PyRouterCore;

void bind_cluster(py::class_<Self>& core) {
  core.def(
      "upsert_worker",
      [](Self& self, double now, std::string name, std::uint64_t incarnation, std::string pool, const std::string& role,
         const std::string& state, std::string fingerprint, std::uint32_t num_blocks, std::uint32_t block_tokens,
         std::uint32_t max_num_seqs, std::vector<std::string> adapters) {
        make(self, calls::UpsertWorker{now,
                                       {std::move(name), incarnation, std::move(pool), placement::parse_role(role),
                                        placement::parse_worker_state(state), std::move(fingerprint), num_blocks,
                                        block_tokens, max_num_seqs, std::move(adapters)}});
      },
      py::arg("now"), py::arg("name"), py::arg("incarnation"), py::arg("pool"), py::arg("role"), py::arg("state"),
      py::arg("fingerprint"), py::arg("num_blocks"), py::arg("block_tokens"), py::arg("max_num_seqs"),
      py::arg("adapters") = std::vector<std::string>{});
  core.def(
      "remove_worker",
      [](Self& self, double now, const std::string& name, std::uint64_t incarnation) {
        make(self, calls::RemoveWorker{now, name, incarnation});
      },
      py::arg("now"), py::arg("name"), py::arg("incarnation"));
  core.def(
      "report_load",
      [](Self& self, double now, const std::string& name, std::uint64_t incarnation, std::uint32_t running,
         std::uint32_t waiting, std::uint64_t waiting_prefill_tokens, std::uint32_t available_blocks,
         double step_seconds) {
        make(self, calls::ReportLoad{now,
                                     name,
                                     incarnation,
                                     {now, running, waiting, waiting_prefill_tokens, available_blocks, step_seconds}});
      },
      py::arg("now"), py::arg("name"), py::arg("incarnation"), py::arg("running"), py::arg("waiting"),
      py::arg("waiting_prefill_tokens"), py::arg("available_blocks"), py::arg("step_seconds"));
  core.def(
      "quarantine",
      [](Self& self, double now, const std::string& name, std::uint64_t incarnation, double until, bool probation) {
        make(self, calls::Quarantine{now, name, incarnation, until, probation});
      },
      py::arg("now"), py::arg("name"), py::arg("incarnation"), py::arg("until"), py::arg("probation") = false);
  core.def(
      "observe_prefill",
      [](Self& self, const std::string& name, std::uint64_t incarnation, std::int64_t tokens,
         std::int64_t cached_tokens,
         double seconds) { make(self, calls::ObservePrefill{name, incarnation, tokens, cached_tokens, seconds}); },
      py::arg("name"), py::arg("incarnation"), py::arg("tokens"), py::arg("cached_tokens"), py::arg("seconds"));
  core.def(
      "observe_transfer",
      [](Self& self, const std::string& name, std::uint64_t incarnation, std::int64_t blocks, double seconds) {
        make(self, calls::ObserveTransfer{name, incarnation, blocks, seconds});
      },
      py::arg("name"), py::arg("incarnation"), py::arg("blocks"), py::arg("seconds"));
  core.def(
      "predict_transfer",
      [](Self& self, const std::string& name, std::uint64_t incarnation, std::int64_t blocks) {
        const CoreLock lock(self.mutex);
        return self.core.predict_transfer(name, incarnation, blocks);
      },
      py::arg("name"), py::arg("incarnation"), py::arg("blocks"));
  core.def(
      "set_cost_model",
      [](Self& self, const std::string& name, std::uint64_t incarnation, const std::string& kind, double base_seconds,
         double per_unit_seconds, double per_context_seconds) {
        make(self, calls::SetCostModel{name, incarnation, kind, {base_seconds, per_unit_seconds, per_context_seconds}});
      },
      py::arg("name"), py::arg("incarnation"), py::arg("kind"), py::arg("base_seconds"), py::arg("per_unit_seconds"),
      py::arg("per_context_seconds") = 0.0);
  core.def(
      "set_tenant",
      [](Self& self, double now, const std::string& tenant, double weight, std::int64_t max_requests,
         double tokens_per_second, double burst_tokens, std::int64_t max_priority) {
        make(self,
             calls::SetTenant{now, tenant, {weight, max_requests, tokens_per_second, burst_tokens, max_priority}});
      },
      py::arg("now"), py::arg("tenant"), py::kw_only(), py::arg("weight") = 1.0, py::arg("max_requests") = 0,
      py::arg("tokens_per_second") = 0.0, py::arg("burst_tokens") = 0.0, py::arg("max_priority") = 100);
  core.def(
      "configure",
      [](Self& self, double now, const ad::AdmissionConfig& config) {
        calls::Configure call{now, {}, {}};
        for (const std::string_view field : ad::AdmissionConfig::fields()) {
          call.fields.emplace_back(field);
          call.values.push_back(config.get(field));
        }
        make(self, call);
      },
      py::arg("now"), py::arg("config"));
  core.def("workers", [](Self& self) {
    const CoreLock lock(self.mutex);
    return worker_dicts(self.core);
  });
}

void bind_requests(py::class_<Self>& core) {
  core.def(
      "submit",
      [](Self& self, double now, std::string request_id, std::string pool, std::int64_t prompt_tokens,
         std::int64_t max_new_tokens, const py::array& hashes, std::int64_t n, int priority, std::string tenant,
         double deadline, std::int64_t bytes, bool preemptible, std::string adapter,
         std::vector<ad::SessionWorker> prefer) {
        const prefix::HashBytes span = bytes_of(hash_span(hashes, "hashes"));
        ad::SubmitArguments arguments{std::move(request_id),
                                      std::move(pool),
                                      std::move(tenant),
                                      prompt_tokens,
                                      max_new_tokens,
                                      n,
                                      bytes,
                                      priority,
                                      deadline,
                                      span,
                                      preemptible,
                                      std::move(adapter),
                                      std::move(prefer)};
        const CoreLock lock(self.mutex);
        return self.recorder([&] { return calls::Call(calls::Submit{now, arguments, copy_of(span)}); },
                             [&] { return self.core.submit(now, arguments); });
      },
      py::arg("now"), py::arg("request_id"), py::arg("pool"), py::arg("prompt_tokens"), py::arg("max_new_tokens"),
      py::arg("hashes"), py::kw_only(), py::arg("n") = 1, py::arg("priority") = 0, py::arg("tenant") = "",
      py::arg("deadline") = 0.0, py::arg("bytes") = 0, py::arg("preemptible") = true, py::arg("adapter") = "",
      py::arg("prefer") = std::vector<ad::SessionWorker>{});
  core.def("plan", [](Self& self, double now) { return make(self, calls::Plan{now}); }, py::arg("now"));
  core.def(
      "next_wake",
      [](Self& self, double now) -> std::optional<double> {
        const CoreLock lock(self.mutex);
        const double at = self.core.next_wake(now);
        if (std::isinf(at)) {
          return std::nullopt;
        }
        return at;
      },
      py::arg("now"));
  core.def(
      "advance",
      [](Self& self, double now, std::uint64_t request, std::uint32_t attempt, std::string event, std::string detail) {
        return make(self, calls::Advance{now, request, attempt, std::move(event), std::move(detail)});
      },
      py::arg("now"), py::arg("request"), py::arg("attempt"), py::arg("event"), py::arg("detail") = "");
  core.def(
      "extend",
      [](Self& self, std::uint64_t request, std::int64_t prompt_tokens, std::int64_t max_new_tokens,
         const py::array& hashes) {
        return make(self, calls::Extend{request, prompt_tokens, max_new_tokens,
                                        copy_of(bytes_of(hash_span(hashes, "hashes")))});
      },
      py::arg("request"), py::arg("prompt_tokens"), py::arg("max_new_tokens"), py::arg("hashes"));
  core.def("forget", [](Self& self, std::uint64_t request) { make(self, calls::Forget{request}); }, py::arg("request"));
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
  core.def("queues", [](Self& self) {
    const CoreLock lock(self.mutex);
    return self.core.queues();
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

void bind_recorder(py::class_<Self>& core) {
  core.def(
      "record",
      [](Self& self, std::uint64_t max_bytes) {
        const UnlockedCoreLock lock(self.mutex);
        if (max_bytes == 0) {
          self.recorder.stop();
        } else {
          self.recorder.start(max_bytes);
        }
      },
      py::arg("max_bytes"));
  core.def("recorded", [](Self& self) {
    std::string log;
    {
      const py::gil_scoped_release release;
      {
        const std::lock_guard lock(self.mutex);
        log = self.recorder.raw();
      }
      if (!log.empty()) {
        log = admission::pack_log(log);
      }
    }
    return py::bytes(log);
  });
}

}  // namespace

void bind_router(py::module_& module) {
  bind_router_types(module);
  py::class_<Self> core(module, "RouterCore");
  core.def(py::init<const ad::AdmissionConfig&>(), py::arg("config"));
  bind_cluster(core);
  bind_router_index(core);
  bind_requests(core);
  bind_recorder(core);
  bind_router_tables(module, core);
}

}  // namespace twinpool::bindings
