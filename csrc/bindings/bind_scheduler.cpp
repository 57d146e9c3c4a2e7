// SPDX-License-Identifier: Apache-2.0
#include <optional>

#include "bindings/core_objects.h"

namespace twinpool::bindings {

namespace {

using Scheduler = PyStepScheduler;

/// A view of a plan's vector; the plan lives as long as the view.
template <auto Member>
py::array plan_view(const py::object& self) {
  auto& values = self.cast<StepPlan&>().*Member;
  using Value = std::remove_reference_t<decltype(values[0])>;
  return py::array_t<Value>(static_cast<py::ssize_t>(values.size()), values.data(), self);
}

py::array plan_block_table(const py::object& self) {
  const auto& plan = self.cast<StepPlan&>();
  constexpr auto item = static_cast<py::ssize_t>(sizeof(BlockId));
  return py::array_t<BlockId>({static_cast<py::ssize_t>(plan.seq.size()), static_cast<py::ssize_t>(plan.table_width)},
                              {static_cast<py::ssize_t>(plan.table_stride) * item, item}, plan.table->data(), self);
}

template <auto Member>
py::array plan_pairs(const py::object& self) {
  auto& pairs = self.cast<StepPlan&>().*Member;
  return py::array_t<std::int32_t>({static_cast<py::ssize_t>(pairs.size() / 2), py::ssize_t{2}}, pairs.data(), self);
}

NewSequence new_sequence(const py::array& tokens, const py::array& hashes, const py::bytes& root,
                         std::int64_t max_new_tokens, std::int64_t priority, double arrival, bool preemptible) {
  return {.tokens = int32_span(tokens, "tokens"),
          .hashes = hash_span(hashes, "hashes"),
          .root = hash_from_bytes(root, "root"),
          .max_new_tokens = max_new_tokens,
          .priority = priority,
          .arrival = arrival,
          .preemptible = preemptible};
}

SequenceId add(Scheduler& self, const py::array& tokens, const py::array& hashes, const py::bytes& root,
               std::int64_t max_new_tokens, std::int64_t priority, double arrival, bool preemptible, bool use_cache) {
  NewSequence request = new_sequence(tokens, hashes, root, max_new_tokens, priority, arrival, preemptible);
  request.use_cache = use_cache;
  const CoreLock lock(self.blocks->mutex);
  return self.core.add(request);
}

std::optional<SequenceId> reserve(Scheduler& self, const py::array& tokens, const py::array& hashes,
                                  const py::bytes& root, std::int64_t max_new_tokens, std::int64_t priority,
                                  double arrival, bool preemptible, std::int64_t seats) {
  NewSequence request = new_sequence(tokens, hashes, root, max_new_tokens, priority, arrival, preemptible);
  request.seats = seats;
  const CoreLock lock(self.blocks->mutex);
  return self.core.reserve(request);
}

std::unique_ptr<StepPlan> plan(Scheduler& self, double now) {
  const UnlockedCoreLock lock(self.blocks->mutex);
  return std::make_unique<StepPlan>(self.core.plan(now));
}

std::unique_ptr<StepPlan> plan_ahead(Scheduler& self, const StepPlan& plan) {
  const UnlockedCoreLock lock(self.blocks->mutex);
  return std::make_unique<StepPlan>(self.core.plan_ahead(plan));
}

void advance(Scheduler& self, const StepPlan& plan, const py::array& sampled) {
  const auto tokens = int32_span(sampled, "sampled");
  const UnlockedCoreLock lock(self.blocks->mutex);
  self.core.advance(plan, tokens);
}

template <auto Read>
auto read(Scheduler& self, SequenceId id) {
  const CoreLock lock(self.blocks->mutex);
  return Read(self.core.sequence(id));
}

py::array output_tokens(Scheduler& self, SequenceId id) {
  return to_array(read<[](const Sequence& sequence) {
    return std::vector<std::int32_t>(sequence.tokens.begin() + static_cast<std::ptrdiff_t>(sequence.prompt_tokens),
                                     sequence.tokens.end());
  }>(self, id));
}

template <std::size_t (StepScheduler::*Count)() const noexcept>
std::size_t counter(Scheduler& self) {
  const CoreLock lock(self.blocks->mutex);
  return (self.core.*Count)();
}

void bind_config(py::module_& module) {
  py::class_<SchedulerConfig>(module, "SchedulerConfig", py::is_final())
      .def(py::init([](std::int64_t seqs, std::int64_t batched, std::int64_t chunk, std::string policy,
                       std::int64_t overtaken, std::int64_t host_blocks) {
             return SchedulerConfig{.max_num_seqs = seqs,
                                    .max_batched_tokens = batched,
                                    .max_chunk_tokens = chunk,
                                    .policy = std::move(policy),
                                    .max_overtaken = overtaken,
                                    .host_blocks = host_blocks};
           }),
           py::kw_only(), py::arg("max_num_seqs") = 64, py::arg("max_batched_tokens") = 2048,
           py::arg("max_chunk_tokens") = 512, py::arg("policy") = "fcfs", py::arg("max_overtaken") = 64,
           py::arg("host_blocks") = 0)
      .def_readwrite("max_num_seqs", &SchedulerConfig::max_num_seqs)
      .def_readwrite("max_batched_tokens", &SchedulerConfig::max_batched_tokens)
      .def_readwrite("max_chunk_tokens", &SchedulerConfig::max_chunk_tokens)
      .def_readwrite("policy", &SchedulerConfig::policy)
      .def_readwrite("max_overtaken", &SchedulerConfig::max_overtaken)
      .def_readwrite("host_blocks", &SchedulerConfig::host_blocks);
}

void bind_plan(py::module_& module) {
  py::class_<StepPlan>(module, "StepPlan", py::is_final())
      .def_property_readonly("empty", [](const StepPlan& plan) { return plan.seq.empty(); })
      .def_property_readonly("seq", &plan_view<&StepPlan::seq>)
      .def_property_readonly("token_ids", &plan_view<&StepPlan::token_ids>)
      .def_property_readonly("positions", &plan_view<&StepPlan::positions>)
      .def_property_readonly("q_start", &plan_view<&StepPlan::q_start>)
      .def_property_readonly("context", &plan_view<&StepPlan::context>)
      .def_property_readonly("block_table", &plan_block_table)
      .def_property_readonly("slots", &plan_view<&StepPlan::slots>)
      .def_property_readonly("sample", &plan_view<&StepPlan::sample>)
      .def_property_readonly("num_decodes", [](const StepPlan& plan) { return plan.decodes; })
      .def_property_readonly("preempted", &plan_view<&StepPlan::preempted>)
      .def_property_readonly("follows", &plan_view<&StepPlan::follows>)
      .def_property_readonly("copies", &plan_pairs<&StepPlan::copies>)
      .def_property_readonly("swap_out", &plan_pairs<&StepPlan::swap_out>)
      .def_property_readonly("swap_in", &plan_pairs<&StepPlan::swap_in>);
}

}  // namespace

void bind_scheduler(py::module_& module) {
  bind_config(module);
  bind_plan(module);
  py::class_<Scheduler>(module, "StepScheduler", py::is_final())
      .def(py::init<std::shared_ptr<PyBlockManager>, const SchedulerConfig&>(), py::arg("blocks"), py::arg("config"))
      .def("add", &add, py::arg("tokens"), py::arg("hashes"), py::arg("root"), py::kw_only(), py::arg("max_new_tokens"),
           py::arg("priority") = 0, py::arg("arrival") = 0.0, py::arg("preemptible") = true,
           py::arg("use_cache") = true)
      .def("reserve", &reserve, py::arg("tokens"), py::arg("hashes"), py::arg("root"), py::kw_only(),
           py::arg("max_new_tokens"), py::arg("priority") = 0, py::arg("arrival") = 0.0, py::arg("preemptible") = true,
           py::arg("seats") = 1)
      .def(
          "start",
          [](Scheduler& self, SequenceId id, std::int32_t first_token) {
            const CoreLock lock(self.blocks->mutex);
            self.core.start(id, first_token);
          },
          py::arg("seq"), py::arg("first_token"))
      .def(
          "fork",
          [](Scheduler& self, SequenceId id, std::int32_t first_token, std::int64_t max_new_tokens) {
            const CoreLock lock(self.blocks->mutex);
            return self.core.fork(id, first_token, max_new_tokens);
          },
          py::arg("seq"), py::arg("first_token"), py::kw_only(), py::arg("max_new_tokens"))
      .def("plan", &plan, py::arg("now"))
      .def("plan_ahead", &plan_ahead, py::arg("plan"))
      .def("advance", &advance, py::arg("plan"), py::arg("sampled"))
      .def(
          "abort_plan",
          [](Scheduler& self, const StepPlan& plan) {
            const CoreLock lock(self.blocks->mutex);
            self.core.abort_plan(plan);
          },
          py::arg("plan"))
      .def(
          "remove",
          [](Scheduler& self, SequenceId id) {
            const CoreLock lock(self.blocks->mutex);
            self.core.remove(id);
          },
          py::arg("seq"))
      .def(
          "blocks",
          [](Scheduler& self, SequenceId id) {
            return to_array(read<[](const Sequence& sequence) { return std::vector(sequence.blocks); }>(self, id));
          },
          py::arg("seq"))
      .def("cached_tokens", &read<[](const Sequence& sequence) { return sequence.cached_tokens; }>, py::arg("seq"))
      .def("computed_tokens", &read<[](const Sequence& sequence) { return sequence.computed; }>, py::arg("seq"))
      .def("output_tokens", &output_tokens, py::arg("seq"))
      .def_property_readonly("running", &counter<&StepScheduler::running>)
      .def_property_readonly("waiting", &counter<&StepScheduler::waiting>)
      .def_property_readonly("reserved", &counter<&StepScheduler::reserved>)
      .def_property_readonly("waiting_tokens", &counter<&StepScheduler::waiting_tokens>)
      .def_property_readonly("host_blocks_used", &counter<&StepScheduler::host_blocks_used>)
      .def("check", [](Scheduler& self) {
        const CoreLock lock(self.blocks->mutex);
        self.core.check();
      });
}

}  // namespace twinpool::bindings
