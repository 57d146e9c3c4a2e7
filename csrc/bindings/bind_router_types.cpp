// SPDX-License-Identifier: Apache-2.0
// Python names of what goes into the router core (limits) and what comes out (submissions, actions, transitions).
#include <pybind11/stl.h>

#include <optional>

#include "admission/recorder.h"
#include "bindings/bindings.h"
#include "bindings/router_dicts.h"

namespace twinpool::bindings {

namespace {

namespace ad = twinpool::admission;

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
      .def_readonly("by", &Action::by)
      .def_readonly("prefill", &Action::prefill)
      .def_readonly("decode", &Action::decode)
      .def_property_readonly("fetch_from",
                             [](const Action& a) -> std::optional<ad::WorkerName> {
                               if (a.fetch_from.first.empty())
                                 return std::nullopt;
                               return a.fetch_from;
                             })
      .def_readonly("fetch_blocks", &Action::fetch_blocks)
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

}  // namespace

void bind_router_tables(py::module_& module, py::object core) {
  py::list states;
  for (const std::string_view name : ad::state_names()) {
    states.append(std::string(name));
  }
  core.attr("STATES") = states;
  py::list events;
  for (const std::string_view name : ad::event_names()) {
    events.append(std::string(name));
  }
  core.attr("EVENTS") = events;
  py::list table;
  for (const ad::TransitionRow& row : ad::transition_table()) {
    table.append(py::make_tuple(std::string(row.event), std::string(row.state), row.result));
  }
  core.attr("TRANSITIONS") = table;
  py::class_<ad::ReplayReport>(module, "ReplayReport")
      .def_readonly("calls", &ad::ReplayReport::calls)
      .def_readonly("placements", &ad::ReplayReport::placements)
      .def_readonly("equal", &ad::ReplayReport::equal)
      .def_readonly("mismatch", &ad::ReplayReport::mismatch);
  module.def(
      "replay_log",
      [](const py::bytes& log, const std::optional<py::function>& line) {
        const std::string_view bytes(log);
        std::function<void(const std::string&)> print;
        if (line) {
          print = [&](const std::string& text) { (*line)(text); };
        }
        return ad::replay(bytes, print);
      },
      py::arg("log"), py::arg("line") = py::none());
}

void bind_router_types(py::module_& module) {
  bind_config(module);
  bind_results(module);
}

}  // namespace twinpool::bindings
